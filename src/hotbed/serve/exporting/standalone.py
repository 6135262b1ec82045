"""A bundle as one ONNX model: the dense part, with tables and lookups in it, for any onnxruntime.

Lookups are made of standard operations. An id of a dynamic table is found by binary search among the table's
ids, which takes four nodes a step; ids outside a static table make `Gather` fail, as in the bundle. Rows stay
as they are stored, and those in few bits are decoded when they are read.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from hotbed.serve.bundles.bundle import (
    SAMPLE,
    STANDALONE,
    ExportError,
    InputEntry,
    LookupEntry,
    TableEntry,
)
from hotbed.serve.bundles.reading import MappedRows
from hotbed.serve.bundles.sessions import session_of
from hotbed.serve.exporting.comparing import TOLERANCE, apart
from hotbed.serve.exporting.onnx_lookups import Asked, OneId, Ragged, Rectangular, lookup_of
from hotbed.serve.exporting.onnx_nodes import Nodes, OnnxModel, OnnxValue, rename

__all__ = ["write_standalone"]

INSIDE = 2**31 - 2**20
"""The most bytes of the file: protobuf reads none of 2 GiB. Beyond, the tables' files are read beside it."""


def write_standalone(
    folder: str,
    dense: OnnxModel,
    inputs: Sequence[InputEntry],
    lookups: Sequence[LookupEntry],
    tables: Mapping[str, TableEntry],
    ragged: Collection[str],
    model_version: str,
) -> None:
    """Write `STANDALONE` to a bundle whose other files are there, and compare its answers of the sample.

    Args:
        ragged: inputs that are asked for as (N,) ids of all bags, and (B,) ``NAME.lengths``. Other bags are
            (B, K), with any K.

    Raises:
        ExportError: names clash, the operation set is too old, or answers differ.
        OSError: as of files.
    """
    names = {each["name"] for each in inputs}
    for name in sorted(ragged):
        if _lengths(name) in names:
            raise ExportError(
                f"standalone: {name!r} is asked for with {_lengths(name)!r}, which is an input, too. "
                "Rename that one."
            )
    outputs = {each.name for each in dense.graph.output}
    if both := {*names, *map(_lengths, ragged)} & outputs:
        raise ExportError(f"{min(both)!r} is asked with and answered. Rename it in the batch.")
    mapped = {name: MappedRows(folder, about) for name, about in tables.items()}
    model = _model(dense, inputs, lookups, mapped, ragged)
    model.metadata_props.add(key="model_version", value=model_version)
    path = os.path.join(folder, STANDALONE)
    Path(path).write_bytes(model.SerializeToString())
    _compare(path, folder, inputs, ragged)


def _model(
    dense: OnnxModel,
    inputs: Sequence[InputEntry],
    lookups: Sequence[LookupEntry],
    tables: Mapping[str, MappedRows],
    ragged: Collection[str],
) -> OnnxModel:
    """Return all of it as one model."""
    onnx = importlib.import_module("onnx")
    model: OnnxModel = onnx.load_model_from_string(dense.SerializeToString())
    opset = next(each.version for each in model.opset_import if not each.domain)
    if opset < 18:
        raise ExportError(f"standalone needs operation set 18 of ONNX; torch has written {opset}.")
    graph = model.graph
    taken = {each.name: each for each in graph.input}
    answered = [onnx.ValueInfoProto.FromString(each.SerializeToString()) for each in graph.output]
    prefix = "hotbed/"
    while any(name.startswith(prefix) for name in [*taken, *(each.name for each in answered)]):
        prefix = f"_{prefix}"
    given = _inputs(inputs, taken, ragged)
    own = f"{prefix}dense/"
    rename(graph, lambda name: f"{own}{name}")
    stored = sum(each.nbytes for table in tables.values() for each in table.arrays().values())
    nodes = Nodes(prefix, beside=stored + model.ByteSize() > INSIDE)
    for name in [each["name"] for each in inputs if each["dense"]]:
        nodes.add("Identity", name, named=f"{own}{name}")
    asked = {
        each["name"]: _asked(nodes, each, each["name"] in ragged)
        for each in inputs
        if each["kind"] == "ids"
    }
    for lookup in lookups:
        vectors = lookup_of(nodes, lookup, tables[lookup["table"]], asked[lookup["input"]])
        dtype = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(lookup["dtype"]))
        nodes.add("Cast", vectors, named=f"{own}{lookup['vectors']}", to=dtype)
    ends = Nodes(f"{prefix}end/")
    for each in answered:
        ends.add("Identity", f"{own}{each.name}", named=each.name)
    between = [*graph.node]
    for field, values in (
        ("node", [*nodes.made, *between, *ends.made]),
        ("input", given),
        ("output", answered),
    ):
        graph.ClearField(field)
        getattr(graph, field).extend(values)
    graph.initializer.extend(nodes.constants)
    return model


def _inputs(
    inputs: Sequence[InputEntry], taken: Mapping[str, OnnxValue], ragged: Collection[str]
) -> list[OnnxValue]:
    """Return what the model is asked with. `taken`: inputs of the dense part, by name."""
    onnx = importlib.import_module("onnx")
    found = []
    for each in inputs:
        name = each["name"]
        if each["dense"]:
            found.append(onnx.ValueInfoProto.FromString(taken[name].SerializeToString()))
            continue
        sizes = [f"{name}.size" if size == -1 else size for size in each["shape"]]
        shape = [f"{name}.count"] if name in ragged else ["batch", *sizes]
        dtype = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(each["dtype"]))
        found.append(onnx.helper.make_tensor_value_info(name, dtype, shape))
        if name in ragged:
            int64 = onnx.TensorProto.INT64
            found.append(onnx.helper.make_tensor_value_info(_lengths(name), int64, ["batch"]))
    return found


def _lengths(name: str) -> str:
    return f"{name}.lengths"


def _asked(nodes: Nodes, about: InputEntry, is_ragged: bool) -> Asked:
    """Return the ids of an input, in the form in which they are asked for."""
    ids = about["name"]
    if about["dtype"] != "int64":
        ids = nodes.add("Cast", ids, to=nodes.int64)
    if is_ragged:
        return Ragged(nodes, ids, _lengths(about["name"]))
    return Rectangular(nodes, ids) if about["shape"] else OneId(nodes, ids)


def _compare(path: str, folder: str, inputs: Sequence[InputEntry], ragged: Collection[str]) -> None:
    """Ask the model with the bundle's sample request.

    Raises:
        ExportError: it answers otherwise than the bundle.
    """
    sample = json.loads(Path(folder, SAMPLE).read_text(encoding="utf-8"))
    fed: dict[str, NDArray[np.generic]] = {}
    for each in inputs:
        name, column = each["name"], [row[each["name"]] for row in sample["instances"]]
        if name in ragged:
            fed[_lengths(name)] = np.array([len(bag) for bag in column], np.int64)
            column = [id_ for bag in column for id_ in bag]
        fed[name] = np.asarray(column, each["dtype"])
    names = [*sample["predictions"][0]]
    for name, answer in zip(names, session_of(path).run(names, fed), strict=True):
        expected = np.asarray([row[name] for row in sample["predictions"]], answer.dtype)
        away = apart(torch.from_numpy(answer), torch.from_numpy(expected))
        if not away <= TOLERANCE:
            raise ExportError(
                f"{STANDALONE} answers {name!r} of the sample otherwise than the bundle, by {away:.3g}. "
                "Export without standalone, and report it."
            )
