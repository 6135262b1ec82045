"""The ways a kernel may be launched, and which one is.

A kernel's module lists its variants: ``variants()`` returns every `Variant` that its launchers can
choose, so that all of them can be compiled, and looked at, without a GPU. A launcher finds its
candidates by a small rule (shape → variants, the best guess first), takes one with `choose` and
starts it with `launch`. Nothing is tuned in a training step: the guess is used unless the user
has had the candidates measured (``HOTBED_TUNE=1``), which is remembered on disk.

Integers of a kernel are annotated (``n: tl.int64``) and named in ``do_not_specialize``, so that no
value makes Triton compile another binary; pointers are what it specialises: those in `aligned`
are divisible by 16. A kernel that wants to load 16 bytes at a time of rows whose length is a
multiple of 16 says so by arithmetic, under a constexpr: ``dim = dim // 16 * 16``.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hotbed import devices
from hotbed.errors import InputError

__all__ = [
    "FLOATS",
    "MODULES",
    "MOST_LAYERS",
    "MOST_VECTORS",
    "TYPES",
    "Variant",
    "all_variants",
    "choose",
    "interpreted",
    "launch",
    "launched",
    "on_gpu",
    "require_gpu",
    "runs_on",
    "tensor_cores",
]

MODULES: tuple[str, ...] = (
    "chunks",
    "codec",
    "count_sort",
    "cross_matrix",
    "cross_vector",
    "dot",
    "finite",
    "ids",
    "masks",
    "mlp",
    "pool",
    "reduce",
    "terms",
    "transpose",
    "update",
    "weight_gradients",
)
"""Modules of this package that have a function ``variants() -> list[Variant]``."""

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""What kernels compute with."""

MOST_VECTORS = 64
"""Vectors of a sample, the dense one included, that a program of the interaction can hold."""

MOST_LAYERS = 8
"""Layers of the vector form of the cross interaction that a program has room for."""

TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
"""Triton's names. A pointer's has an asterisk before it."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Kernel with types and constants, for which Triton compiles one binary.

    Args:
        kernel: the function, decorated with ``triton.jit``.
        types: Triton's type of every argument that is given at run time: ``"*fp32"``, ``"i64"``.
        constants: the values of the others: constexprs, and pointers that are None.
        aligned: pointers known to be divisible by 16.
        fused_multiply_add: whether a * b + c may round once. Without, results have the bits of
            the core and of the interpreter.
        since: the oldest compute capability that it is for.
    """

    kernel: Any = field(repr=False)
    types: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 2
    fused_multiply_add: bool = False
    since: int = 75

    @property
    def options(self) -> dict[str, object]:
        """Return Triton's options beside the arguments."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": self.fused_multiply_add,
        }

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.kernel.fn.__name__)

    @property
    def key(self) -> str:
        """Names the variant among all: kernel, types, constants, warps, stages."""
        types = ",".join(f"{k}:{v}" for k, v in sorted(self.types.items()))
        constants = ",".join(f"{k}={v}" for k, v in sorted(self.constants.items()))
        return (
            f"{self.name}({types}; {constants}; {self.num_warps} warps, {self.num_stages} stages)"
        )


@cache
def all_variants() -> tuple[Variant, ...]:
    """Every variant of every kernel."""
    found: list[Variant] = []
    for module in MODULES:
        found += importlib.import_module(f"hotbed.ops.gpu.{module}").variants()
    return tuple(found)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on tensors of any device."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def require_gpu(what: str, *tensors: Tensor) -> None:
    """Raises unless all tensors lie on one device that kernels can run on.

    Raises:
        InputError: a tensor lies on the CPU (the interpreter allows that), or on another device.
    """
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise InputError(
            f"{what}: the tensors lie on {', '.join(sorted(map(str, devices)))}. Move them to one device."
        )
    for device in devices:
        if device.type != "cuda" and not interpreted():
            raise InputError(
                f"{what}: the tensors lie on {device}, and this is a GPU kernel. Move them to a CUDA "
                "device, or set TRITON_INTERPRET=1 before Triton is imported."
            )


_NAMES_PRECISIONS = hasattr(torch.backends.cuda.matmul, "fp32_precision")

_INSTALLED = importlib.util.find_spec("triton") is not None


def on_gpu(tensor: Tensor) -> bool:
    """Whether a kernel may take `tensor`, as far as a compiler can know: its device and dtype."""
    return _INSTALLED and tensor.device.type in devices.KINDS and tensor.dtype in FLOATS


def runs_on(tensor: Tensor, since: tuple[int, int] = (8, 0)) -> bool:
    """Whether the card under `tensor` has the compute capability `since`."""
    if tensor.device.type != "cuda":
        return interpreted()
    return _capability(tensor.device.index or 0) >= since


def tensor_cores(tensor: Tensor) -> bool:
    """Whether products of `tensor`'s dtype may round their factors to what tensor cores take.

    For float32 that is TF32, on cards that have it, where the user allows it
    (``torch.set_float32_matmul_precision``, ``torch.backends.cuda.matmul.fp32_precision``). Smaller
    dtypes are what they take.
    """
    if tensor.dtype != torch.float32:
        return True
    matmul = torch.backends.cuda.matmul
    # Before torch 2.9 there was only the older name; asking by it fails where the newer was used.
    tf32 = matmul.fp32_precision == "tf32" if _NAMES_PRECISIONS else matmul.allow_tf32
    if not tf32:
        return False
    return tensor.device.type != "cuda" or _capability(tensor.device.index or 0) >= (8, 0)


@lru_cache(maxsize=16)
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


_recording: set[str] | None = None


class launched:
    """The keys of the variants that `launch` starts inside the block: ``with launched() as keys``."""

    def __enter__(self) -> set[str]:
        global _recording
        self._before, _recording = _recording, set()
        return _recording

    def __exit__(self, *_: object) -> None:
        global _recording
        _recording = self._before


def launch(variant: Variant, grid: tuple[int, ...], **arguments: object) -> None:
    """Starts a variant on the current stream; `arguments` are those of `variant.types`.

    An empty grid is nothing to do. Nothing here waits for the device.
    """
    if _recording is not None:
        _recording.add(variant.key)
    if 0 in grid:
        return
    device = next((a.device for a in arguments.values() if isinstance(a, Tensor)), None)
    start = variant.kernel[grid]
    if device is not None and device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            start(**arguments, **variant.constants, **variant.options)
    else:
        start(**arguments, **variant.constants, **variant.options)


# --- Measured choices. ---


def choose(
    candidates: Sequence[Variant], shape_class: str, run: Callable[[Variant], None]
) -> Variant:
    """The candidate to launch: the first, unless another was measured to be faster.

    Args:
        candidates: best guess first. All must compute the same.
        shape_class: names the shapes that one choice serves ("batch 2^16, 27 x 128").
        run: launches a candidate on the caller's tensors; called only while tuning.

    With ``HOTBED_TUNE=1`` the candidates of a shape class not seen before are measured once per
    card, which waits for the device, and the choice is kept in ``$HOTBED_CACHE_DIR`` (default
    ``~/.cache/hotbed``). Choices in that file are used by later processes, tuning or not.
    """
    tuning = os.environ.get("HOTBED_TUNE", "") not in ("", "0")
    if len(candidates) == 1 or not (tuning or _choices()) or interpreted():
        return candidates[0]
    card = _card(torch.cuda.current_device())
    kept = _choices().get(card, {})
    slot = f"{candidates[0].name}, {shape_class}"
    if slot in kept:
        return next((c for c in candidates if c.key == kept[slot]), candidates[0])
    if not tuning:
        return candidates[0]
    best = min(candidates, key=lambda candidate: _milliseconds(run, candidate))
    _choices().setdefault(card, {})[slot] = best.key
    _store(_choices())
    return best


@lru_cache(maxsize=16)
def _card(index: int) -> str:
    return torch.cuda.get_device_name(index)


def _choices_file() -> Path:
    folder = os.environ.get("HOTBED_CACHE_DIR")
    return (Path(folder) if folder else Path.home() / ".cache" / "hotbed") / "kernels.json"


@cache
def _choices() -> dict[str, dict[str, str]]:
    """Card → kernel and shape class → key of the variant. A file that cannot be read is empty."""
    try:
        found = json.loads(_choices_file().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _store(choices: Mapping[str, Mapping[str, str]]) -> None:
    path = _choices_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(choices, indent=1, sort_keys=True) + "\n")
    draft.replace(path)  # whole or not at all, for processes that read it meanwhile


def _milliseconds(run: Callable[[Variant], None], candidate: Variant, repeats: int = 10) -> float:
    run(candidate)  # compiles
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times: list[float] = []
    for _ in range(repeats):
        begin.record()
        run(candidate)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[repeats // 2]
