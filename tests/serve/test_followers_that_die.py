"""Followers that are killed at any file that they write, and readers beside them."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import launching
import numpy as np
import pytest
from serve.followed_pairs import ITEMS, Pairs
from serve.followed_runs import Run, contents_of, served_from

from hotbed.serve import BundleError
from hotbed.serve.bundles.versions import Version, current, open_layers, versions_of

pytestmark = pytest.mark.process

KILLS, CALLS = 20, 200
LAST = 25
ONCE = """
import os, signal, sys
from hotbed.serve.following.follower import Follower
bundle, run, at, where = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
seen = 0
KINDS = {"open", "os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir", "mmap.__new__"}
def look(event, args):
    global seen
    if event in KINDS and (where in str(args[0]) or event[0] == "m" and where == "versions"):
        seen += 1
        if seen == at:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(look)
with Follower(bundle, run, keep=2, most_layers=2) as follower:
    while follower.poll() is not None:
        pass
    follower.wait_for_merges()
print(seen)
"""
ON = """
import sys
from hotbed.serve.following.follower import follow
follow(sys.argv[1], sys.argv[2], every=0.01, keep=1, most_layers=2)
"""


def step_of(version: Version) -> int:
    return int(version.model_version.partition("-")[0])


def test_a_follower_that_is_killed(tmp_path: Path) -> None:
    """Whatever it was doing, all versions that are there are whole, and the next follower goes on."""
    run = Run(tmp_path)
    run.save()
    bundle = run.export()
    expected = {run.step: contents_of(run.model, tmp_path / "expected")}
    drawn, ends = random.Random(5), []
    for number in range(KILLS + 1):
        run.train()
        run.erase({run.step})
        run.save(delta=number % 5 != 3)
        expected[run.step] = contents_of(run.model, tmp_path / "expected")
        at = drawn.randrange(1, CALLS) if number < KILLS else 0
        arguments = ["-c", ONCE, str(bundle), run.root, str(at), "versions"]
        process = launching.start(launching.python, arguments, tmp_path / f"said-{number}")
        process.join()
        ends.append(process.exitcode)
        for version in versions_of(bundle):
            expected[step_of(version)].check(open_layers(bundle, version))
    assert ends.count(-9) >= KILLS * 3 // 4 and ends[-1] == 0, ends
    assert step_of(current(bundle)) == run.step
    where = Path(current(bundle).folder).parent
    parts = [name for name in os.listdir(where) if name.endswith(".part")]
    assert all(name.startswith("merged-") for name in parts) and len(parts) <= 2


def test_a_follower_that_is_killed_beside_items(tmp_path: Path) -> None:
    """At each file of theirs that it opens: versions that are there have vectors of their own rows."""
    run = Pairs(tmp_path, tags=True)
    run.save()
    bundle = run.export()
    expected = {run.step: run.vectors()}
    ends: list[int | None] = []
    while not ends or ends[-1] != 0:
        run.train()
        run.save(delta=True)
        expected[run.step] = run.vectors()
        arguments = ["-c", ONCE, str(bundle), str(run.root), str(len(ends) + 1), "/topk"]
        process = launching.start(launching.python, arguments, tmp_path / f"said-{len(ends)}")
        process.join()
        ends.append(process.exitcode)
        for version in versions_of(bundle):
            items = open_layers(bundle, version).items
            assert items is not None
            np.testing.assert_array_equal(items.vectors.ids, ITEMS.sort().values)
            own = expected[step_of(version)]
            np.testing.assert_allclose(items.vectors.vectors, own, rtol=0, atol=1e-5)
    assert {*ends[:-1]} == {-9} and 8 <= len(ends) <= 60
    assert step_of(current(bundle)) == run.step


def test_readers_beside_a_follower(tmp_path: Path) -> None:
    """They never see a part of a version, though each is removed as soon as there is a newer one."""
    run = Run(tmp_path)
    run.save()
    bundle = run.export()
    expected = {run.step: contents_of(run.model, tmp_path / "expected")}
    said = tmp_path / "said"
    process = launching.start(launching.python, ["-c", ON, str(bundle), run.root], said)
    opened, until = -1, time.monotonic() + 120
    try:
        while opened < LAST:
            assert process.is_alive() and time.monotonic() < until
            if opened >= run.step - 2 and run.step < LAST:
                run.train()
                expected[run.step] = contents_of(run.model, tmp_path / "expected")
                run.save(delta=run.step % 4 != 0)
            try:
                found = served_from(bundle)
            except BundleError:  # removed as it was opened
                continue
            assert step_of(found.version) >= opened
            opened = step_of(found.version)
            expected[opened].check(found)
    finally:
        process.kill()
        process.join()
