"""Where ids come from: the functions of torch that made them of what a model was called with."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from hotbed.conversion.fused import InputsOf
from hotbed.errors import TableError
from hotbed.table.sparse_gradient import Function, Keywords

__all__ = ["traced_inputs"]

T = TypeVar("T")

_RANDOM = re.compile(r"rand|multinomial|bernoulli|dropout|normal|uniform|exponential|poisson")


class _Call(NamedTuple):
    function: Callable[..., object]
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    result: object

    @property
    def fault(self) -> str | None:
        """Return why it cannot be called again for another batch; None: it can."""
        name = getattr(self.function, "__name__", "")
        if _RANDOM.search(name):
            return f"they are drawn at random ({name})"
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place or name == "__setitem__" or self.kwargs.get("out") is not None:
            return f"they are changed in place ({name})"
        return None


class _Recorder(TorchFunctionMode):
    """Keeps all calls of torch's functions, with the very tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_function__(
        self, func: Function, types: object, args: Iterable[object] = (), kwargs: Keywords = None
    ) -> object:
        kwargs = kwargs or {}
        args = tuple(args)
        result = func(*args, **kwargs)
        self.calls.append(_Call(func, args, kwargs, result))
        return result


class _FromBatch(NamedTuple):
    """Leaf number `leaf` of what the model is called with."""

    leaf: int


class _FromCall(NamedTuple):
    """Leaf number `leaf` of what a call returned."""

    call: int
    leaf: int


_Source = _FromBatch | _FromCall


def traced_inputs(
    model: nn.Module, layers: Mapping[str, nn.Module], sample: object
) -> InputsOf | None:
    """Call the model once, and return a function that makes each layer's inputs of a batch like it.

    Layers whose inputs do not come from the batch by functions of torch, or are drawn or changed on the way,
    are left out. None: no layer is left.

    Raises:
        TableError: the model cannot be called with the sample.
    """
    args = sample if isinstance(sample, tuple) else (sample,)
    calls, looked_up = _recorded(model, layers, args)
    leaves, _ = tree_flatten((args, {}))
    source: dict[int, _Source] = {id(leaf): _FromBatch(n) for n, leaf in enumerate(leaves)}
    for number, call in enumerate(calls):
        for at, leaf in enumerate(tree_flatten(call.result)[0]):
            if isinstance(leaf, Tensor):
                source.setdefault(id(leaf), _FromCall(number, at))
    traced: dict[str, list[tuple[object, ...]]] = {}
    needed: set[int] = set()
    for path, inputs in looked_up:
        found = _slice_of(inputs, calls, source)
        if found is not None:
            needed |= found
            traced.setdefault(path, []).append(_refer(inputs, source))
    if not traced:
        return None
    steps = [
        (n, calls[n].function, _refer((calls[n].args, calls[n].kwargs), source))
        for n in sorted(needed)
    ]
    return _Replay(steps, traced)


_Arguments = tuple[tuple[object, ...], Mapping[str, object]]


class _Replay:
    """Calls functions of torch again for another batch.

    Args:
        steps: number, function and arguments of each call, with sources in place of tensors.
        traced: inputs of each layer, likewise.
    """

    def __init__(
        self,
        steps: list[tuple[int, Callable[..., object], _Arguments]],
        traced: Mapping[str, list[tuple[object, ...]]],
    ) -> None:
        self._steps, self._traced = steps, traced

    def __call__(self, *args: object, **kwargs: object) -> Mapping[str, object]:
        given, _ = tree_flatten((args, kwargs))
        results: dict[int, list[object]] = {}

        def value(one: object) -> object:
            if isinstance(one, _FromBatch):
                return given[one.leaf]
            return results[one.call][one.leaf] if isinstance(one, _FromCall) else one

        for number, function, arguments in self._steps:
            own, named = _filled(arguments, value)
            results[number] = tree_flatten(function(*own, **named))[0]
        return {
            path: [_filled(one, value) for one in every] for path, every in self._traced.items()
        }


def _recorded(
    model: nn.Module, layers: Mapping[str, nn.Module], args: tuple[object, ...]
) -> tuple[list[_Call], list[tuple[str, tuple[object, ...]]]]:
    """Return the calls of torch in a forward, and what each layer was called with, in order."""
    looked_up: list[tuple[str, tuple[object, ...]]] = []
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, given, named, path=path: looked_up.append((path, _in_order(given, named))),
            with_kwargs=True,
        )
        for path, layer in layers.items()
    ]
    modes = {module: module.training for module in model.modules()}
    recorder = _Recorder()
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]), recorder:
            model(*args)
    except Exception as error:
        raise TableError(
            f"hotbed.convert: the model cannot be called with sample= ({type(error).__name__}: {error}). "
            "Give what its forward takes, as a tuple if it takes several arguments."
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes.items():
            module.training = training
    return recorder.calls, looked_up


def _in_order(given: tuple[object, ...], named: Mapping[str, object]) -> tuple[object, ...]:
    """Return the arguments of a layer's forward by position."""
    names = ("input", "offsets", "per_sample_weights")[len(given) :]
    every = (*given, *(named.get(name) for name in names))
    while len(every) > 1 and every[-1] is None:
        every = every[:-1]
    return every


def _slice_of(
    inputs: tuple[object, ...], calls: list[_Call], source: Mapping[int, _Source]
) -> set[int] | None:
    """Return the calls that inputs come from; None: not from the batch, or not again in the same way."""
    needed: set[int] = set()
    from_batch = False
    open_ = [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]
    while open_:
        leaf = open_.pop()
        found = source.get(id(leaf))
        if isinstance(found, _FromBatch):
            from_batch = True
        elif found is None:
            if leaf.requires_grad:
                return None
        elif found.call not in needed:
            call = calls[found.call]
            if call.fault is not None:
                return None
            needed.add(found.call)
            arguments = tree_flatten((call.args, dict(call.kwargs)))[0]
            open_ += [one for one in arguments if isinstance(one, Tensor)]
    touched = {id(leaf) for n in needed for leaf in tree_flatten(calls[n].result)[0]}
    for call in calls:  # what changes them later is no function of the batch
        if call.fault is not None and call.args and id(call.args[0]) in touched:
            return None
    return needed if from_batch else None


def _refer(value: T, source: Mapping[int, _Source]) -> T:
    """Return nested arguments with tensors replaced by where they come from, of the same structure."""
    found = tree_map(
        lambda one: source.get(id(one), one) if isinstance(one, Tensor) else one, value
    )
    return cast(T, found)


def _filled(value: T, of: Callable[[object], object]) -> T:
    leaves, spec = tree_flatten(value, is_leaf=lambda one: isinstance(one, (_FromBatch, _FromCall)))
    return cast(T, tree_unflatten([of(leaf) for leaf in leaves], spec))
