"""Checkpoints of small tables and the commands that read and write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typer.testing import CliRunner

import hotbed as hb
from hotbed.cli.app import app

USERS = torch.tensor([-(2**63), -7, 0, 5, 2**40, 2**63 - 1])


def run(*arguments: Any) -> tuple[int, str]:
    """(exit code, what was said, in one line)"""
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "250"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(result.output.split())


def refused(*arguments: Any) -> str:
    code, said = run(*arguments)
    assert code == 2 and said.startswith("Error: "), said
    return said


def imported(path: Any, to: Path, *options: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """What the command makes of a file: (ids, weights) of each table, by rising id."""
    code, said = run("import", path, "--to", to, *options)
    assert code == 0, said
    return tables_in(to)


def about(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """What its manifest says of each table."""
    from hotbed.checkpoint.inspect import contents

    return {entry["table"]: entry for entry in contents(str(checkpoint))["tables"]}


def tables_in(checkpoint: Path) -> dict[str, tuple[Tensor, Tensor]]:
    found = {}
    for name in about(checkpoint):
        chunks = list(hb.checkpoint.read(checkpoint, name))
        ids, order = torch.cat([chunk.ids for chunk in chunks]).sort()
        found[name] = ids, torch.cat([chunk.weights for chunk in chunks])[order]
    return found


def a_checkpoint(
    folder: Path, dtype: torch.dtype = torch.float32
) -> dict[str, tuple[Tensor, Tensor]]:
    """Writes one: a static and a dynamic table in chunks, the static one not in the order of its ids."""
    items, users = torch.randn(10, 3).to(dtype), torch.randn(len(USERS), 5).to(dtype)
    order = torch.randperm(10)
    chunks = {
        "item.weight": [(order[:4], items[order[:4]]), (order[4:], items[order[4:]])],
        "user": [(USERS[3:], users[3:]), (USERS[:3], users[:3])],
    }
    hb.checkpoint.write(folder, chunks, rows={"item.weight": 10})
    return {"item.weight": (torch.arange(10), items), "user": (USERS, users)}


def same(
    found: dict[str, tuple[Tensor, Tensor]], expected: dict[str, tuple[Tensor, Tensor]]
) -> None:
    """Bit for bit."""
    assert set(found) == set(expected)
    for name, (ids, weights) in expected.items():
        assert found[name][0].tolist() == ids.tolist()
        assert found[name][1].dtype == weights.dtype
        assert (
            found[name][1].numpy(force=True).tobytes() == weights.numpy(force=True).tobytes()
            if (weights.dtype != torch.bfloat16)
            else torch.equal(found[name][1], weights)
        )
