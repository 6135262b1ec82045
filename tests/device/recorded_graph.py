"""A graph of CUDA as far as a machine without one can have it: launches are kept and repeated.

What it is strict about is what a real one is: a replay runs no Python of the step, and reads and
writes the very buffers that were there when it was recorded. Kernels are not run while it is recorded.
torch's operations are, on whatever lies there, since their results are wanted; what they write is
written again by a replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hotbed.ops.gpu import variants


class RecordedGraph:
    """Stands in for `hotbed.graphs.CudaGraph`."""

    def __init__(self, device: torch.device) -> None:
        self.acts: list[Callable[[], None]] = []
        self.replays = 0

    def rehearse(self, function: Callable[[], Any]) -> Any:
        return function()

    def record(self, function: Callable[[], Any]) -> Any:
        names = [name for name in variants.MODULES if hasattr(_module(name), "launch")]
        before = {name: _module(name).launch for name in names}
        try:
            for name in names:
                _module(name).launch = self._launch
            with _Operations(self.acts):
                return function()
        finally:
            for name in names:
                _module(name).launch = before[name]

    def _launch(self, variant: variants.Variant, grid: tuple[int, ...], **arguments: Any) -> None:
        self.acts.append(lambda: variants.launch(variant, grid, **arguments))

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad():
            for act in self.acts:
                act()


def _module(name: str) -> Any:
    import importlib

    return importlib.import_module(f"hotbed.ops.gpu.{name}")


class _Operations(TorchDispatchMode):
    """Keeps every operation, with the tensors it took and made."""

    def __init__(self, acts: list[Callable[[], None]]) -> None:
        super().__init__()
        self._acts = acts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {t.untyped_storage().data_ptr() for t in _strided((args, kwargs))}
        made = [t for t in _strided(result) if t.untyped_storage().data_ptr() not in given]

        def act() -> None:
            again = func(*args, **kwargs)
            fresh = [t for t in _strided(again) if t.untyped_storage().data_ptr() not in given]
            for old, new in zip(made, fresh, strict=True):
                if new.numel():
                    old.copy_(new)

        self._acts.append(act)
        return result


def _strided(parts: Any) -> list[torch.Tensor]:
    return [
        t for t in tree_leaves(parts) if isinstance(t, torch.Tensor) and t.layout is torch.strided
    ]
