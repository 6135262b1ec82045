"""Saved models as bundles: the whole of `hotbed export`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hotbed.checkpoint.behind import RowsBehind
from hotbed.checkpoint.entries import Manifest
from hotbed.checkpoint.errors import CheckpointError, others_loaded_by
from hotbed.checkpoint.folder import latest
from hotbed.checkpoint.loading import load_model
from hotbed.checkpoint.manifest import read_manifest
from hotbed.data import ColumnFiles, CriteoLog, Schema
from hotbed.modules.owner import tables_of
from hotbed.serve.bundles.bundle import CRITEO, ExportError
from hotbed.serve.bundles.defaults import moving
from hotbed.serve.exporting.export import Origin, export_checkpoint
from hotbed.storage import Storage

__all__ = ["export_saved"]

SAMPLES = 64


def export_saved(
    run: str,
    out: str,
    data: Sequence[str],
    rows: str = "float32",
    default: str = "zeros",
    storage: Storage | None = None,
    standalone: bool = False,
) -> int:
    """Write a saved model as a bundle. Returns its bytes.

    Args:
        run: a checkpoint, or a folder of them, of which the latest is meant.
        data: click logs, or files of the model's schema, the first samples of which are the sample.

    Raises:
        HotbedError, ValueError, OSError: as of `hotbed.checkpoint.load_model` and `hotbed.export`.
    """
    folder = latest(run)
    if folder is None:
        raise CheckpointError(f"{run} has no complete checkpoint.")
    with others_loaded_by(f"hotbed export {{path}} {out}"):
        model = load_model(folder, storage=storage)
    schema = getattr(model, "schema", None)
    reader: CriteoLog | ColumnFiles
    if isinstance(schema, Schema):
        reader = ColumnFiles(data, schema, SAMPLES, labels="auto")
    else:
        reader = CriteoLog(data, SAMPLES, labels="auto")
    sample = next(iter(reader), None)
    if sample is None:
        raise ExportError(f"--data {' '.join(data)} has no samples.")
    manifest = read_manifest(folder)
    if default == "first":
        _refuse_moving(model, manifest)
    with torch.no_grad():
        path = export_checkpoint(
            model,
            out,
            sample=sample,
            rows=rows,
            default=default,
            origin=Origin(
                manifest["step"],
                manifest.get("uid"),
                CRITEO if isinstance(reader, CriteoLog) else None,
            ),
            standalone=standalone,
        )
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _refuse_moving(model: nn.Module, manifest: Manifest) -> None:
    """Raise ExportError where the training that was saved reads no first values of ids without row."""
    for stem, table in tables_of(model).items():
        entry = manifest["tables"][stem]
        rule = entry["rule"]
        if table.spec.rows is None and rule is not None and rule["untouched"] == "exact":
            if RowsBehind(table, entry).rule.has_moved_untouched:
                raise ExportError(moving(stem))
