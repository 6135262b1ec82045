"""Checkpoints of models of the zoo, and a second reading of the format: how a manifest is sealed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hotbed as hb
from hotbed.checkpoint import load_model
from hotbed.data import CATEGORIES, synthetic_clicks
from hotbed.models import DLRM

DENSE, ROWS, MANIFEST = "dense.safetensors", "rows-0-0.safetensors", "checkpoint.json"


def trained(kind: Any = DLRM, tables: Any = CATEGORIES, **options: Any) -> Any:
    """A model whose tables have met some ids, with rows that are not first values."""
    torch.manual_seed(5)
    model = kind(tables, dim=4, **options)
    model(next(iter(synthetic_clicks(100, 100))))
    for name in model.embeddings.tables:
        ids = model.embeddings.rows(name).ids
        width = model.embeddings.tables[name].dim
        model.embeddings.assign(name, ids, torch.randn(len(ids), width))
    return model.eval()


def with_bias(value: float) -> Any:
    """A small model that is told from others by one number."""
    model = DLRM(["a", "b"], dim=4, num_dense=1, top=[3], seed=0)
    model({"a": torch.tensor([1, 2]), "b": torch.tensor([3, 3]), "dense": torch.ones(2, 1)})
    with torch.no_grad():
        model.top.layers[0].bias.fill_(value)
    return model


def saved(path: Path, model: Any, step: int = 0) -> Path:
    """The folder of its only checkpoint there."""
    return Path(hb.save(path, model, step=step, keep=1).path)


def bias_of(path: Path) -> float:
    return float(load_model(path).top.layers[0].bias[0].detach())


def crc32c(data: bytes) -> int:
    """RFC 3720, bit by bit."""
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


def seal(path: Path, contents: dict[str, Any]) -> None:
    """Writes a JSON file whose last line is the checksum of all before it."""
    contents.pop("crc32c", None)
    body = json.dumps(contents, indent=2).removesuffix("\n}").encode() + b",\n"
    path.write_bytes(body + f'  "crc32c": "{crc32c(body):08x}"\n}}\n'.encode())


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """A manifest that somebody else wrote, its checksum right."""
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    seal(folder / MANIFEST, manifest)


def replace_file(folder: Path, name: str, contents: bytes) -> None:
    """Other contents of a file of tensors, with a manifest that has the checksums of these."""

    def change(manifest: dict[str, Any]) -> None:
        entry = next(file for file in manifest["files"] if file["name"] == name)
        entry |= {"bytes": len(contents), "crc32c": [f"{crc32c(contents):08x}"]}

    (folder / name).write_bytes(contents)
    rewrite(folder, change)
