"""The dense part of a model, with looked-up vectors as inputs, as a program of `torch.export` and as ONNX."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils import _pytree as pytree

from hotbed.jagged import Jagged
from hotbed.serve.bundles.bundle import ExportError
from hotbed.serve.exporting.lookups import Lookup, WithoutTables
from hotbed.serve.exporting.onnx_nodes import OnnxGraph, OnnxModel, OnnxNode, rename

__all__ = [
    "Leaves",
    "Program",
    "leaves_of",
    "named_outputs",
    "onnx_of",
    "parameters_of",
    "program_of",
]


_GIVEN, _ANSWERED = "hotbed-given/", "hotbed-answered/"
"""Before names of inputs and outputs, while torch gives names to other values."""
_LOGS = ("torch.onnx", "torch.fx.experimental.symbolic_shapes", "torch._export", "torch.export")
"""Loggers of torch's exporters."""


class Leaves(NamedTuple):
    """Tensors and `Jagged`s of a sample, by name, and how they lie in it."""

    named: dict[str, object]
    places: pytree.TreeSpec

    def sample(self, values: Mapping[str, object]) -> tuple[object, ...]:
        """Return arguments of the model's forward with other values."""
        found: tuple[object, ...] = pytree.tree_unflatten([*values.values()], self.places)
        return found


def leaves_of(model: nn.Module, args: tuple[object, ...]) -> Leaves:
    """Return the leaves of a forward's arguments: of one mapping by its keys, else by argument."""
    found, places = pytree.tree_flatten_with_path(args, lambda x: isinstance(x, Jagged))
    named: dict[str, object] = {}
    taken: set[int] = set()
    for path, leaf in found:
        keys = [str(getattr(key, "key", getattr(key, "idx", ""))) for key in path]
        name = ".".join(keys[1:] if len(args) == 1 and len(keys) > 1 else keys)
        name = "input" if len(args) == 1 and len(keys) == 1 else name
        if name in named:
            raise ExportError(f"The sample has {name!r} in two ways. Rename one.")
        # Two features may share memory, and a request has one each of them.
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            memory = leaf.untyped_storage().data_ptr()
            leaf = leaf.clone() if memory in taken else leaf
            taken.add(memory)
        elif any(leaf is other for other in named.values()):
            leaf = copy.copy(leaf)
        named[name] = leaf
    return Leaves(named, places)


class Program(NamedTuple):
    """The dense part."""

    exported: torch.export.ExportedProgram
    inputs: list[str]
    """Names: vectors, then other leaves."""
    by_sample: list[str]
    """Those of them that have a row for each sample."""


class _Unread(Jagged):
    """Stands for bags of a sample, of which a program would have what it reads as constants."""

    _named = ""

    @classmethod
    def of(cls, leaf: object, name: str) -> object:
        if not isinstance(leaf, Jagged):
            return leaf
        own = cls.__new__(cls)
        object.__setattr__(own, "_named", name)
        return own

    def to(self, *args: object, **kwargs: object) -> _Unread:
        """Return itself: where bags lie is nothing that a program has."""
        return self

    def __getattribute__(self, name: str) -> object:
        if name == "to" or name.startswith("__"):
            return object.__getattribute__(self, name)
        raise ExportError(
            f"The model reads {name!r} of the bags {object.__getattribute__(self, '_named')!r}, and a "
            "request has others. Make what it needs where the batch is made, as numbers of each sample."
        )


class _Dense(nn.Module):
    """Takes vectors, then all leaves that are tensors."""

    def __init__(self, bare: WithoutTables, lookups: Sequence[Lookup], leaves: Leaves) -> None:
        super().__init__()
        self.model = bare.model
        self._owners = bare.owners
        self._names = [lookup.name for lookup in lookups]
        self._called = dict.fromkeys(lookup.module for lookup in lookups)
        self._leaves = leaves

    def forward(self, vectors: list[Tensor], tensors: list[Tensor]) -> object:
        named = dict(zip(self._names, vectors, strict=True))
        for name in self._called:
            owner = self._owners[name]
            owner.given = iter([owner.as_returned(name, named)])
        rest = iter(tensors)
        values = {
            name: next(rest) if isinstance(leaf, Tensor) else _Unread.of(leaf, name)
            for name, leaf in self._leaves.named.items()
        }
        found: object = self.model(*self._leaves.sample(values))
        # In ONNX what is answered cannot be what is asked with, nor two answers the same.
        return pytree.tree_map_only(Tensor, Tensor.clone, found)


def program_of(bare: WithoutTables, lookups: Sequence[Lookup], leaves: Leaves) -> Program:
    """Return the dense part for batches of any size.

    Raises:
        ExportError: it cannot be written as a program; the layer is named.
    """
    tensors = {name: leaf for name, leaf in leaves.named.items() if isinstance(leaf, Tensor)}
    vectors = [lookup.vectors for lookup in lookups]
    samples = vectors[0].shape[0] if vectors else 0
    if samples < 2:
        raise ExportError(
            f"The sample has {samples} samples. Give at least two, so that the batch can be told from "
            "other dimensions."
        )
    batch = torch.export.Dim("batch")

    def any_batch(tensor: Tensor) -> dict[int, object] | None:
        return {0: batch} if tensor.dim() and tensor.shape[0] == samples else None

    shapes = [any_batch(each) for each in vectors], [any_batch(each) for each in tensors.values()]
    dense = _Dense(bare, lookups, leaves)
    with _layer_named(bare.model), torch.no_grad(), _quiet():
        exported = torch.export.export(
            dense, (vectors, [*tensors.values()]), dynamic_shapes=shapes, strict=False
        )
    named = {**{lookup.input: lookup.vectors for lookup in lookups}, **tensors}
    return Program(exported, [*named], [name for name, each in named.items() if any_batch(each)])


def named_outputs(outputs: object) -> dict[str, Tensor]:
    """Return what a forward returns, by name: keys of a dict, ``output`` for a tensor, else ``output_N``.

    Raises:
        ExportError: something is no tensor, or two have the same name.
    """
    found, _ = pytree.tree_flatten_with_path(outputs)
    named: dict[str, Tensor] = {}
    for number, (path, leaf) in enumerate(found):
        keys = ".".join(str(getattr(key, "key", number)) for key in path)
        name = "output" if not path else keys if isinstance(outputs, dict) else f"output_{number}"
        if not isinstance(leaf, Tensor) or not leaf.dim():
            raise ExportError(f"The model returns {type(leaf).__name__}, not a number a sample.")
        if name in named:
            raise ExportError(f"The model returns {name!r} in two ways. Rename one.")
        named[name] = leaf
    return named


def onnx_of(program: Program, outputs: Sequence[str]) -> OnnxModel:
    """Return the dense part as ONNX: inputs that nothing uses are left out, and parameters
    have their names in the model's state_dict.

    Raises:
        ExportError: ONNX has no counterpart of an operation.
    """
    if "" in {*program.inputs, *outputs}:
        raise ExportError(
            "A name in the batch, or of what the model returns, is empty. Give it one."
        )
    if len({*program.inputs}) < len(program.inputs):
        twice = max(program.inputs, key=program.inputs.count)
        raise ExportError(f"{twice!r} is the name of looked-up vectors. Rename it in the batch.")
    if both := {*program.inputs} & {*outputs}:
        raise ExportError(f"{min(both)!r} is asked with and answered. Rename it in the batch.")
    try:
        with _quiet(), torch.no_grad():
            made = torch.onnx.export(
                program.exported,
                dynamo=True,
                verbose=False,
                input_names=[f"{_GIVEN}{name}" for name in program.inputs],
                output_names=[f"{_ANSWERED}{name}" for name in outputs],
                optimize=False,  # that makes one of equal weights, and constants of others
            )
    except torch.onnx.errors.OnnxExporterError as error:
        raise ExportError(f"The dense part cannot be written as ONNX: {error}") from error
    assert made is not None
    model: OnnxModel = made.model_proto
    graph = model.graph
    _name(graph, {*program.inputs, *outputs})
    _size_by_what_is_used(graph, program.by_sample)
    used = {name for node in graph.node for name in node.input}
    unused = [given for given in graph.input if given.name not in used]
    for given in unused:
        graph.input.remove(given)
    taken = {value.name for value in graph.input} | {o for node in graph.node for o in node.output}
    names = {
        each.name: each.name.removeprefix("model.")
        for each in graph.initializer
        if each.name.startswith("model.") and each.name.removeprefix("model.") not in taken
    }
    for each in graph.initializer:
        each.name = names.get(each.name, each.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    return model


def _name(graph: OnnxGraph, taken: Collection[str]) -> None:
    """Give inputs and outputs their names, which are `taken`, also where torch has given one to others."""

    def renamed(name: str) -> str:
        for prefix in (_GIVEN, _ANSWERED):
            if name.startswith(prefix):
                return name.removeprefix(prefix)
        return f"{name}/inner" if name in taken else name

    rename(graph, renamed)


def _size_by_what_is_used(graph: OnnxGraph, by_sample: Sequence[str]) -> None:
    """Have the number of samples read from an input that something else uses, too: ids are not asked for
    only to be counted."""
    counts = [node for node in graph.node if node.op_type == "Shape" and _is_first(node)]
    others = {name for node in graph.node if node not in counts for name in node.input}
    if used := [name for name in by_sample if name in others]:
        for node in counts:
            node.input[:] = [used[0] if name in by_sample else name for name in node.input]


def _is_first(node: OnnxNode) -> bool:
    """Return whether a node ``Shape`` gives the first dimension alone."""
    return {each.name: each.i for each in node.attribute} == {"start": 0, "end": 1}


def parameters_of(program: Program, onnx: OnnxModel) -> dict[str, str]:
    """Return the initialisers that are parameters or buffers of the model, with their names in its
    state_dict.

    Raises:
        ExportError: one that the program takes is no initialiser.
    """
    signature = program.exported.graph_signature
    there = {each.name for each in onnx.graph.initializer}
    fixed = {*signature.non_persistent_buffers}
    taken = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    found: dict[str, str] = {}
    for node in program.exported.graph.nodes:
        if node.op != "placeholder" or not node.users or taken.get(node.name, "") in {"", *fixed}:
            continue
        name = taken[node.name]
        own = name.removeprefix("model.")
        initialiser = own if own in there else name
        if initialiser not in there:
            raise ExportError(f"ONNX has {own!r} as part of a constant, and not by its name.")
        found[initialiser] = own
    return found


@contextlib.contextmanager
def _layer_named(model: nn.Module) -> Iterator[None]:
    """An error while a model is traced becomes an `ExportError` that names the innermost layer."""
    names = {module: name for name, module in model.named_modules()}
    inside: list[nn.Module] = []

    def enter(module: nn.Module, *_: object) -> None:
        inside.append(module)

    def leave(module: nn.Module, *_: object) -> None:
        while inside and inside.pop() is not module:
            pass

    with contextlib.ExitStack() as stack:
        for hook in (
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave),
        ):
            stack.callback(hook.remove)
        try:
            yield
        except ExportError:
            raise
        except Exception as error:
            at = [names[module] for module in inside if names.get(module)]
            where = f"Layer {at[-1]!r}" if at else "The model"
            text = str(error).strip().split("\n")[0]
            raise ExportError(
                f"{where} cannot be exported: {text} What is done with vectors must not depend on their "
                "values or on how many samples there are."
            ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """For a ``with`` statement: torch's exporters log nothing; what they cannot do is an error alone."""
    levels = {log: log.level for log in map(logging.getLogger, _LOGS)}
    for log in levels:
        log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, before in levels.items():
            log.setLevel(before)
