"""Checkpoints of what has changed, on the command line: saved, looked at, merged, scored."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from cli.command_line import run

import hotbed as hb
from hotbed.checkpoint.folder import complete_in
from hotbed.data import write_criteo_tsv


def test_a_run_saves_what_has_changed(tmp_path: Path) -> None:
    log, folder = tmp_path / "clicks.tsv", tmp_path / "run"
    write_criteo_tsv(str(log), rows=700, seed=2)
    size = ("--dim", 4, "--batch-size", 64, "--every", 2, "--keep", 2, "--full-every", 4)
    done = run("train", "--data", log, *size, "--checkpoint", folder)
    assert done.exit_code == 0, done.output
    said = run("checkpoint", "show", folder, "--json", tmp_path / "about.json")
    assert said.exit_code == 0 and "changes since step-" in said.stdout
    about = json.loads((tmp_path / "about.json").read_text())
    bases = [one["base"] and Path(one["base"]).name for one in about["checkpoints"]]
    names = [Path(one["path"]).name for one in about["checkpoints"]]
    assert bases == [None, *names[:-1]] and about["base"] == names[-2]
    assert f"changes since {names[-2]}" in run("checkpoint", "verify", folder).stdout.replace(
        "\n", ""
    )
    merged = run("checkpoint", "merge", folder, "--out", tmp_path / "whole")
    assert merged.exit_code == 0 and "is whole" in merged.stdout
    (whole,) = complete_in(str(tmp_path / "whole"))
    scores = []
    for one in (folder, whole):
        out = tmp_path / "scores.csv"
        assert run("predict", one, "--data", log, "--out", out).exit_code == 0
        scores.append(out.read_bytes())
        out.unlink()
    assert scores[0] == scores[1]
    (folder / names[0] / "dense.safetensors").unlink()
    damaged = run("checkpoint", "verify", folder)
    assert damaged.exit_code != 0 and names[0] in damaged.output
    assert run("checkpoint", "merge", folder, "--out", tmp_path / "again").exit_code != 0
    assert not (tmp_path / "again").exists()


def test_whole_tables_are_dumped_and_planned_for(tmp_path: Path) -> None:
    """A checkpoint of changes stands for all rows, not for those that it has itself."""
    model = hb.EmbeddingCollection([hb.Table("a", 4), hb.Table("b", 4, rows=50)])
    model.assign("a", torch.arange(1000), torch.randn(1000, 4))
    hb.save(tmp_path / "run", model, step=1)
    model.assign("a", torch.arange(990, 1010), torch.ones(20, 4))
    model.erase("a", [500])
    model.assign("b", [3], torch.ones(1, 4))
    saved = hb.save(tmp_path / "run", model, step=2, delta=True)
    assert saved.base is not None and saved.rows == 21
    for name in ("all.safetensors", "all.pt"):
        done = run("dump", tmp_path / "run", "--to", tmp_path / name)
        assert done.exit_code == 0, done.output
    dumped = torch.load(tmp_path / "all.pt", weights_only=True)
    found = model.rows("a")
    order = dumped["a.ids"].argsort()
    assert torch.equal(dumped["a.ids"][order], found.ids) and len(found.ids) == 1009
    assert torch.equal(dumped["a"][order], found.values)
    assert torch.equal(dumped["b"], model.rows("b").values)
    planned = run("plan", tmp_path / "run")
    assert planned.exit_code == 0 and "1,009" in planned.output, planned.output
