"""Models as bundles."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hotbed.arrays import id_tensor
from hotbed.checkpoint.deltas import new_uid
from hotbed.checkpoint.files import write_json_sealed
from hotbed.checkpoint.models import description_of
from hotbed.checkpoint.stores.local_files import sync_folder
from hotbed.errors import TableError
from hotbed.files import appearing_folder
from hotbed.jagged import Jagged
from hotbed.modules.owner import tables_of
from hotbed.paths import path_text
from hotbed.serve.bundles.bundle import (
    DENSE,
    FORMAT,
    MANIFEST,
    PROGRAM,
    SAMPLE,
    TABLES,
    VERSION,
    BundleError,
    ExportError,
    InputEntry,
    LookupEntry,
    TableEntry,
    is_of_a_bundle,
)
from hotbed.serve.bundles.dense_weights import dense_of, shapes_of
from hotbed.serve.bundles.manifests import files_in
from hotbed.serve.bundles.reading import BundleTable, Ids, MappedRows, looked_up
from hotbed.serve.bundles.row_formats import ROW_FORMATS
from hotbed.serve.bundles.table_files import check_forms, refuse_shared, write_table
from hotbed.serve.exporting.asking import (
    as_rows,
    ids_of,
    inputs_of,
    lookups_of_ids,
    outputs_of,
    samples_at,
)
from hotbed.serve.exporting.dense import named_outputs
from hotbed.serve.exporting.item_vectors import Items, towers_of, write_items
from hotbed.serve.exporting.onnx_nodes import OnnxModel
from hotbed.serve.exporting.standalone import write_standalone
from hotbed.serve.exporting.tracing import Traced, answered_by, traced_of

__all__ = ["Origin", "export", "export_checkpoint"]

_ONE_AT_A_TIME = threading.Lock()
"""Threads that trace a model, which torch does for one, or put a bundle in its place."""
SHOWN = 4
"""Samples in the sample request."""


class Origin(NamedTuple):
    """Where a model comes from, as a bundle says it."""

    step: int | None = None
    checkpoint: str | None = None
    """`uid` of the checkpoint that it was loaded from; None: of none."""
    encoding: str | None = None
    """As in `Bundle`."""


def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    sample: object,
    rows: str = "float32",
    tables: Mapping[str, object] | None = None,
    default: str = "zeros",
    program: bool = False,
    standalone: bool = False,
    step: int | None = None,
    items: Items | None = None,
) -> Path:
    """Write a model as a bundle, which answers with onnxruntime and NumPy alone; see docs/serving.md.

    The dense part is one ONNX model for batches of any size, with the looked-up vectors as inputs; rows
    lie in files that are mapped into memory. Answers of both are compared before anything is there.

    Args:
        path: a folder, which is made, or an earlier bundle, which is replaced; or a symbolic link to one,
            which stays.
        sample: a batch of at least two samples, as ``model(sample)`` takes it; a tuple: several arguments.
        rows: "float32", "float16", "int8" or "int4"; see `hotbed.serve.bundles.row_formats`.
        tables: ids of dynamic tables by their names in the model's state_dict, whose rows alone are written.
        default: the vector of an id without row: "zeros", the "mean" of the table's rows, or the "first"
            values that it has in training, which Hotbed itself computes: `standalone` and NumPy cannot.
        program: whether the dense part is written as a `torch.export` program, too. It is a pickle.
        standalone: whether dense part and tables are written as one ONNX model, too, which onnxruntime serves
            alone.
        step: of the training, for answers to tell.
        items: of a `hotbed.models.TwoTower`, batches with the item's features, of all items that top-k
            answers. None: the rows of the item's table are the items, if its id is all that an item has;
            else the bundle answers no top-k.

    Returns:
        The folder.

    Raises:
        ExportError: the model computes ids, or does with vectors what no program can; the layer is named. Or
            there is no such kind of rows or default. Or first values are to be read by `standalone`, or of a
            table whose optimizer moves rows that no batch has had.
        TableError: there is no such table.
        PlanError: ranks share a table.
        BundleError: something else is at `path`.
        ImportError: ``pip install 'hotbed[export]'``.
        OSError, StorageError: it cannot be written; what was there is there.
    """
    return export_checkpoint(
        model,
        path,
        sample=sample,
        rows=rows,
        tables=tables,
        default=default,
        program=program,
        origin=Origin(step),
        items=items,
        standalone=standalone,
    )


def export_checkpoint(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    sample: object,
    rows: str = "float32",
    tables: Mapping[str, object] | None = None,
    default: str = "zeros",
    program: bool = False,
    standalone: bool = False,
    origin: Origin,
    items: Items | None = None,
) -> Path:
    """Write a model as a bundle, as `export`."""
    target = _target(path, rows, default)
    stems = {table: stem for stem, table in tables_of(model).items()}
    for table in stems:
        refuse_shared(table)
    dynamic = [stem for table, stem in stems.items() if table.spec.rows is None]
    if standalone and default == "first" and dynamic:
        raise ExportError(
            f"Hotbed itself computes the first values of table {dynamic[0]!r}, and standalone.onnx runs "
            'without it. Pass default="zeros" or "mean", or leave standalone out.'
        )
    only = _only(tables, {stem: table.spec.rows for table, stem in stems.items()})
    with _ONE_AT_A_TIME:
        traced = traced_of(model, sample if isinstance(sample, tuple) else (sample,))
        lookups = lookups_of_ids(traced.found.lookups, traced.leaves.named, stems)
        towers = towers_of(model, traced.leaves, traced.found, lookups, items)
    with _in_place_of(target) as folder:
        os.mkdir(os.path.join(folder, TABLES))
        entries: dict[str, TableEntry] = {}
        for table in dict.fromkeys(lookup.table for lookup in traced.found.lookups):
            files, stem = f"{TABLES}/{len(entries)}", stems[table]
            entries[stem] = write_table(
                folder, files, table, ROW_FORMATS[rows], only.get(stem), default
            )
        with open(os.path.join(folder, DENSE), "wb") as file:
            file.write(traced.onnx.SerializeToString())
        if program:
            torch.export.save(traced.exported, os.path.join(folder, PROGRAM))
        taken = [each.name for each in traced.onnx.graph.input]
        inputs = inputs_of(traced.leaves.named, lookups, taken)
        read = {stem: BundleTable([MappedRows(folder, about)]) for stem, about in entries.items()}
        _write_sample(folder, traced, inputs, lookups, read)
        of_items: Mapping[str, object] = {} if towers is None else write_items(folder, towers, read)
        version = f"{'' if origin.step is None else f'{origin.step}-'}{new_uid()[:8]}"
        if standalone:
            leaves = traced.leaves.named
            ragged = {each["name"] for each in inputs if isinstance(leaves[each["name"]], Jagged)}
            write_standalone(folder, traced.onnx, inputs, lookups, entries, ragged, version)
        about: dict[str, object] = {
            "format": FORMAT,
            "version": VERSION,
            "model": description_of(model),
            "model_version": version,
            "inputs": inputs,
            "lookups": lookups,
            "outputs": outputs_of(named_outputs(traced.found.outputs)),
            "tables": entries,
            "files": files_in(folder),
            "made_with": _versions(traced.onnx),
            "largest_difference": traced.difference,
            "step": origin.step,
            "checkpoint": origin.checkpoint,
            "parameters": traced.parameters,
            "state_dict": shapes_of(dense_of(model)),
        }
        more = {"encoding": origin.encoding, **of_items}
        about |= {key: value for key, value in more.items() if value is not None}
        write_json_sealed(os.path.join(folder, MANIFEST), about)
    return Path(target)


def _target(path: str | os.PathLike[str], rows: str, default: str) -> str:
    """Return the absolute path of a bundle; raises what `export` raises before it looks at the model."""
    named = path_text(path)
    check_forms(rows, default)
    for module in ("onnx", "onnxscript", "onnxruntime"):
        _needed(module)
    if "://" in named:
        raise ExportError(f"{named} is no folder of this machine. Write one, and copy it there.")
    target = os.path.abspath(named)
    if os.path.islink(target):  # what it points to is replaced, and not the link
        target = os.path.realpath(target)
    if os.path.lexists(target) and not os.path.isfile(os.path.join(target, MANIFEST)):
        raise BundleError(f"{target} is there, and no bundle. Name another folder.")
    others = [] if not os.path.isdir(target) else os.listdir(target)
    if others := [name for name in others if not is_of_a_bundle(name)]:
        raise BundleError(
            f"{target} has {min(others)!r} beside a bundle, which would go. Move it, or name another folder."
        )
    return target


def _write_sample(
    folder: str,
    traced: Traced,
    inputs: Sequence[InputEntry],
    lookups: Sequence[LookupEntry],
    tables: Mapping[str, BundleTable],
) -> None:
    """Write a request of a few samples, and what the bundle answers."""
    outputs = named_outputs(traced.found.outputs)
    count = len(traced.found.lookups[0].vectors)
    shown_at = torch.arange(min(SHOWN, count))
    shown = {
        each["name"]: samples_at(traced.leaves.named[each["name"]], shown_at, count)
        for each in inputs
    }
    requested = [
        Ids.of(each, tables[each["table"]], *ids_of(shown[each["input"]], each)) for each in lookups
    ]
    vectors = {
        each["vectors"]: torch.from_numpy(one)
        for each, one in zip(lookups, looked_up(requested), strict=True)
    }
    answers = answered_by(traced.session, {**shown, **vectors}, [*outputs])
    with open(os.path.join(folder, SAMPLE), "w", encoding="utf-8") as text:
        json.dump({"instances": as_rows(shown), "predictions": as_rows(answers)}, text, indent=1)


def _only(
    tables: Mapping[str, object] | None, known: Mapping[str, int | None]
) -> dict[str, Tensor]:
    """Return the ids that are wanted, checked, rising."""
    found = {}
    for stem, ids in (tables or {}).items():
        if stem not in known:
            raise TableError(f"tables has {stem!r}, and there are {', '.join(known)}.")
        if known[stem] is not None:
            raise TableError(f"Table {stem!r} is static, and is written as a whole. Leave it out.")
        wanted = id_tensor(f"tables[{stem!r}]", ids).to(device="cpu", dtype=torch.int64)
        found[stem] = torch.unique(wanted)
    return found


def _needed(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"hotbed.export needs {module}: pip install 'hotbed[export]'", name=module
        ) from error


@contextlib.contextmanager
def _in_place_of(target: str) -> Iterator[str]:
    """For a ``with`` statement: the folder to fill, which is at `target` then; an earlier bundle goes."""
    new, before = (f"{target}.{new_uid()[:8]}.{what}" for what in ("new", "before"))
    with contextlib.ExitStack() as stack:
        with appearing_folder(new) as folder:
            yield folder
            for path, _, _ in os.walk(folder):
                sync_folder(path)
        with _ONE_AT_A_TIME:
            if os.path.lexists(target):
                os.rename(target, before)
                stack.callback(shutil.rmtree, before, ignore_errors=True)
            os.rename(new, target)
        sync_folder(os.path.dirname(target))


def _versions(onnx: OnnxModel) -> dict[str, str]:
    opset = next(each.version for each in onnx.opset_import if not each.domain)
    return {
        "hotbed": importlib.metadata.version("hotbed"),
        "torch": torch.__version__,
        "onnx": _needed("onnx").__version__,
        "opset": str(opset),
    }
