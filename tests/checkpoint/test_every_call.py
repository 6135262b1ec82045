"""A save that is killed, or fails, at any call of the file system leaves a checkpoint that is whole."""

from __future__ import annotations

import functools
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint.disk_calls import BROKEN, FULL, at_call, die
from checkpoint.small_models import made, train
from checkpoint.whole_checkpoints import check_goes_on, names_in
from copies import in_a_copy
from effort import SOAK

import hotbed as hb
from hotbed.checkpoint import rows

MOST_CALLS = 200


@pytest.fixture(autouse=True, scope="module")
def a_file_for_each_table() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "FILE_BYTES", 1)
        yield


HOW = ["blocking", "background", "linked"]


def numbers(how: str) -> range:
    """Of calls. What lies over an SSD takes long to make."""
    return range(1, MOST_CALLS, 1 if how != "linked" or SOAK else 4)


def made_for(how: str, folder: Path) -> tuple[Any, Any]:
    """`folder`: of rows on disk, where links are made."""
    return made("ssd" if how == "linked" else "memory", folder, "Adam")


def saved(run: Path, model: Any, optimizer: Any, how: str, trained: list[float]) -> None:
    """Save step 2, which removes the first. In the background a step is taken meanwhile, the loss of which
    `trained` gets."""
    if how != "background":
        hb.save(run, model, optimizer, step=2, keep=1, linked=how == "linked")
        return
    saving = hb.save(run, model, optimizer, step=2, keep=1, blocking=False)
    try:
        trained += train(model, optimizer, range(2, 3))
    finally:
        saving.wait()


def killed_at_every_call(folder: Path, how: str) -> None:
    """In `folder` / "runs" / N a second save, which removes the first, was killed at its call N."""
    runs = folder / "runs"

    def in_a_fork(act: Callable[[], object]) -> int:
        child = os.fork()
        if not child:
            try:
                act()
                os._exit(0)
            finally:
                os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def first() -> None:
        model, optimizer = made_for(how, folder / "rows-first")
        train(model, optimizer, range(1))
        hb.save(runs / "first", model, optimizer, step=1, linked=how == "linked")

    def second(run: Path, number: int) -> None:
        model, optimizer = made_for(how, folder / f"rows-{number}")
        hb.load(run, model, optimizer)
        train(model, optimizer, range(1, 2))
        with at_call(number, die):
            saved(run, model, optimizer, how, [])

    rows.FILE_BYTES = 1
    assert in_a_fork(first) == 0
    for number in numbers(how):
        run = shutil.copytree(runs / "first", runs / str(number), copy_function=os.link)
        ended = in_a_fork(functools.partial(second, run, number))
        if ended == 0:
            return
        assert ended == -signal.SIGKILL, f"the save before call {number} ended with {ended}"


@pytest.mark.process
@pytest.mark.parametrize("how", HOW)
def test_a_process_killed_at_any_call_leaves_a_complete_checkpoint(
    quick_folder: Path, how: str
) -> None:
    in_a_copy(killed_at_every_call, quick_folder, how)
    shutil.rmtree(quick_folder / "runs" / "first")
    steps = []
    for path in sorted((quick_folder / "runs").iterdir(), key=lambda path: int(path.name)):
        steps.append(check_goes_on(path))
        model, optimizer = made("memory", quick_folder, "Adam")
        hb.save(path, model, optimizer, step=3, keep=1)
        assert names_in(path) == ["step-000000000003"]
    assert 40 < numbers(how)[len(steps) - 1] < MOST_CALLS - 4
    # In the background its calls and those of others come in any order.
    assert set(steps) == {1, 2} and (steps == sorted(steps) or how == "background")


@pytest.mark.parametrize("then_too", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("fail", [FULL, BROKEN], ids=["full", "broken"])
@pytest.mark.parametrize("how", HOW)
def test_a_disk_that_fails_at_any_call_leaves_what_was_there(
    quick_folder: Path, fail: Callable[[], Any], then_too: bool, how: str
) -> None:
    model, optimizer = made_for(how, quick_folder / "rows-first")
    train(model, optimizer, range(1))
    hb.save(quick_folder / "first", model, optimizer, step=1, linked=how == "linked")
    losses = train(model, optimizer, range(1, 3))
    told = []
    for number in numbers(how):
        run = shutil.copytree(quick_folder / "first", quick_folder / "run", copy_function=os.link)
        model, optimizer = made_for(how, quick_folder / f"rows-{number}")
        hb.load(run, model, optimizer)
        assert train(model, optimizer, range(1, 2)) == losses[:1]
        trained: list[float] = []
        with at_call(number, fail, then_too=then_too) as calls:
            try:
                saved(run, model, optimizer, how, trained)
            except OSError as error:
                told.append(str(error))
                raised = True
            else:
                raised = False
        step = check_goes_on(run)
        assert step == 2 if not raised else step == 1 or then_too
        if raised and not then_too:
            assert names_in(run) == ["step-000000000001"]
        assert (trained or train(model, optimizer, range(2, 3))) == losses[1:]
        hb.save(run, model, optimizer, step=3, keep=1)
        assert names_in(run) == ["step-000000000003"] and check_goes_on(run) == 3
        shutil.rmtree(run)
        if len(calls) < number:
            break
    assert 20 < len(told) * numbers(how).step and 40 < number < MOST_CALLS - 4
