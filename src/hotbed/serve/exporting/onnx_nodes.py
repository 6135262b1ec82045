"""Nodes and constants of an ONNX graph, as they are added."""

from __future__ import annotations

import importlib
from collections.abc import Callable, MutableSequence, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Nodes", "OnnxGraph", "OnnxModel", "OnnxNode", "OnnxValue", "rename"]


class OnnxValue(Protocol):
    """An ``onnx.ValueInfoProto`` or ``onnx.TensorProto``."""

    name: str

    def SerializeToString(self) -> bytes: ...


class _Sparse(Protocol):
    values: OnnxValue
    indices: OnnxValue


class _Attribute(Protocol):
    name: str
    i: int

    @property
    def g(self) -> OnnxGraph: ...
    @property
    def graphs(self) -> Sequence[OnnxGraph]: ...
    def HasField(self, name: str) -> bool: ...


class OnnxNode(Protocol):
    """An ``onnx.NodeProto``."""

    op_type: str
    input: MutableSequence[str]
    output: MutableSequence[str]
    attribute: Sequence[_Attribute]


class OnnxGraph(Protocol):
    """An ``onnx.GraphProto``."""

    input: list[OnnxValue]
    output: list[OnnxValue]
    initializer: list[OnnxValue]
    sparse_initializer: Sequence[_Sparse]
    value_info: Sequence[OnnxValue]
    node: list[OnnxNode]

    def ClearField(self, name: str) -> None: ...


class _Opset(Protocol):
    domain: str
    version: int


class _Properties(Protocol):
    def add(self, *, key: str, value: str) -> object: ...


class OnnxModel(Protocol):
    """An ``onnx.ModelProto``."""

    graph: OnnxGraph
    opset_import: Sequence[_Opset]
    metadata_props: _Properties

    def SerializeToString(self) -> bytes: ...
    def ByteSize(self) -> int: ...


class Nodes:
    """Nodes in the order in which they are added, and the constants that they take.

    Args:
        prefix: of all names.
        beside: arrays that are mapped from a file are referred to, and not copied: whoever reads the model
            finds the folder ``tables`` beside it.
    """

    def __init__(self, prefix: str, beside: bool = False) -> None:
        self._onnx = importlib.import_module("onnx")
        self._prefix, self._beside = prefix, beside
        self._known: dict[object, str] = {}
        self.made: list[OnnxNode] = []
        self.constants: list[OnnxValue] = []
        self.int64: int = self._onnx.TensorProto.INT64
        self.float32: int = self._onnx.TensorProto.FLOAT

    def add(self, operation: str, *given: str, named: str | None = None, **options: object) -> str:
        """Add a node with one output. Returns the output's name.

        Args:
            given: names of its inputs.
            named: the output's name. Default: a new one.
            options: attributes; an array becomes a tensor.
        """
        name = named or f"{self._prefix}{operation}_{len(self.made)}"
        attributes = {
            key: self._onnx.numpy_helper.from_array(value)
            if isinstance(value, np.ndarray)
            else value
            for key, value in options.items()
        }
        made = self._onnx.helper.make_node(operation, [*given], [name], name=name, **attributes)
        self.made.append(made)
        return name

    def numbers(self, *values: int) -> str:
        """Return the name of an int64 constant, (n,)."""
        return self._constant(("numbers", values), np.array(values, np.int64))

    def number(self, value: float, dtype: type[np.generic] = np.float32) -> str:
        """Return the name of a constant without dimensions."""
        return self._constant((dtype, value), np.array(value, dtype))

    def stored(self, file: str, array: NDArray[np.generic]) -> str:
        """Return the name of an array that a file of the bundle has. `file`: its path there."""
        if file in self._known:
            return self._known[file]
        if not (self._beside and isinstance(array, np.memmap)):
            return self._constant(file, array, file)
        tensor = self._onnx.TensorProto(name=f"{self._prefix}{file}", dims=array.shape)
        tensor.data_type = self._onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        tensor.data_location = self._onnx.TensorProto.EXTERNAL
        at = {"location": file, "offset": array.offset, "length": array.nbytes}
        for key, value in at.items():
            tensor.external_data.add(key=key, value=str(value))
        self.constants.append(tensor)
        self._known[file] = tensor.name
        return str(tensor.name)

    def _constant(self, key: object, array: NDArray[np.generic], name: str | None = None) -> str:
        if key not in self._known:
            named = f"{self._prefix}{name or f'constant_{len(self.constants)}'}"
            tensor = self._onnx.numpy_helper.from_array(np.ascontiguousarray(array), named)
            tensor.ClearField("dims")  # ascontiguousarray gives a number a dimension
            tensor.dims.extend(array.shape)
            self.constants.append(tensor)
            self._known[key] = named
        return self._known[key]


def rename(graph: OnnxGraph, renamed: Callable[[str], str]) -> None:
    """Give the values of a graph, and of graphs in it, other names."""
    values = [*graph.input, *graph.output, *graph.value_info, *graph.initializer]
    for sparse in graph.sparse_initializer:
        values += [sparse.values, sparse.indices]
    for value in values:
        value.name = renamed(value.name)
    for node in graph.node:
        node.input[:] = [renamed(name) if name else "" for name in node.input]
        node.output[:] = [renamed(name) if name else "" for name in node.output]
        for attribute in node.attribute:
            for inner in [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]:
                rename(inner, renamed)
