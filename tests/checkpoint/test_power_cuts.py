"""The power fails while checkpoints are saved: writes that were not synced are lost, torn or reordered."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoint.recorded_disk import Event, RecordedDisk, after_power_cut, put, there
from checkpoint.small_models import made, train
from checkpoint.whole_checkpoints import STEPS, check_goes_on, names_in
from effort import examples

import hotbed as hb
from hotbed.checkpoint import CheckpointError
from hotbed.checkpoint.folder import complete_in

NEW = "checkpoint.json.new"


class Story:
    """A training that saved steps 1 to 4, the latest two of which stay."""

    def __init__(self, folder: Path, blocking: bool) -> None:
        disk = folder / "disk"
        disk.mkdir()
        recorded = RecordedDisk(disk)
        model, optimizer = made("memory", folder, "Adam")
        run, saving = disk / "of" / "run", None
        with recorded.recording():
            for step in range(1, STEPS + 1):
                train(
                    model, optimizer, range(step - 1, step)
                )  # perhaps while the last one is saved
                if saving is not None:
                    recorded.mark(saving.wait().step)
                if blocking:
                    recorded.mark(hb.save(run, model, optimizer, step=step, keep=2).step)
                else:
                    saving = hb.save(run, model, optimizer, step=step, keep=2, blocking=False)
            if saving is not None:
                recorded.mark(saving.wait().step)
        self.events, self.at_last, self.blocking = recorded.events, there(disk), blocking


@pytest.fixture(scope="module", params=[True, False], ids=["blocking", "background"])
def story(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Story]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hotbed.checkpoint.rows.FILE_BYTES", 1)
        yield Story(tmp_path_factory.mktemp("story"), request.param)


def check(events: list[Event], cut: int, chance: random.Random, top: Path) -> None:
    """Whatever is there after the power has failed is whole, and no older than what was saved."""
    put(after_power_cut(events, cut, chance), top)
    run = top / "of" / "run"
    told = max([0, *(event.of for event in events[:cut] if event.what == "mark")])
    if complete_in(str(run)) or told:
        assert told <= check_goes_on(run) <= STEPS
    hb.save(run, *made("memory", top, "Adam"), step=9, keep=1)
    assert names_in(run) == ["step-000000000009"]


def a_cut(events: list[Event], chance: random.Random) -> int:
    """Anywhere; half of the time where the last name to change is not yet synced."""
    if chance.random() < 0.5:
        return 1 + chance.choice(
            [at for at, e in enumerate(events) if e.what in ("rename", "remove")]
        )
    return chance.randrange(len(events) + 1)


def test_all_that_was_done_is_recorded(story: Story) -> None:
    assert after_power_cut(story.events, len(story.events), None) == story.at_last
    rows = [name for name in story.at_last if "rows-" in name]
    # In the background rows that have changed meanwhile come in files of their own.
    assert len(rows) == 4 or (not story.blocking and len(rows) > 4)


def test_after_any_power_cut_training_goes_on(story: Story, quick_folder: Path) -> None:
    for seed in range(examples(200)):
        chance = random.Random(seed)
        check(story.events, a_cut(story.events, chance), chance, quick_folder)
        shutil.rmtree(quick_folder / "of")


# -- that this sees what is wrong --------------------------------------------------------------------


def without_syncs(of: str) -> Callable[[list[Event]], list[Event]]:
    """As it would be without one of the syncs of each save."""
    around = {  # of folders: what is done before and after it
        "folders above": ("make folder", "make folder"),
        "names of files": ("sync", "rename"),
        "name of the manifest": ("rename", "sync folder"),
        "name of the checkpoint": ("sync folder", "remove"),
        "end of an old one": ("remove", "remove"),
    }

    def change(events: list[Event]) -> list[Event]:
        names = {e.item: e.name for e in events if e.what == "make"}
        kept = []
        for before, event, after in zip(
            [events[0], *events], events, [*events[1:], events[0]], strict=False
        ):
            here = before.what, after.what.replace("mark", "remove")
            of_folder = event.what == "sync folder" and here == around.get(of)
            of_file = event.what == "sync" and names[event.of].startswith(of)
            if not (of_folder or of_file):
                kept.append(event)
        return kept

    return change


def manifest_first(events: list[Event]) -> list[Event]:
    """As it would be if the manifest came before the files that it names."""
    moved: list[Event] = []
    for _ in range(STEPS):
        names, kinds = [event.name for event in events], [event.what for event in events]
        others, own, end = kinds.index("make"), names.index(NEW), kinds.index("rename") + 2
        moved += [*events[:others], *events[own:end], *events[others:own]]
        events = events[end:]
    return moved + events


def never_renamed(events: list[Event]) -> list[Event]:
    """As it would be if the manifest was written under its own name."""
    return [
        event._replace(name=event.name.removesuffix(".new"))
        for event in events
        if event.what != "rename"
    ]


WRONG = {
    **{
        f"no sync of {of}": without_syncs(of)
        for of in (
            "dense",
            "rows-",
            "checkpoint.json",
            "folders above",
            "names of files",
            "name of the manifest",
            "name of the checkpoint",
            "end of an old one",
        )
    },
    "manifest first": manifest_first,
    "never renamed": never_renamed,
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_done_in_another_way_is_found(story: Story, quick_folder: Path, what: str) -> None:
    events = WRONG[what](story.events)
    assert events != story.events
    for seed in range(2000):
        chance = random.Random(seed)
        top = quick_folder / str(seed)
        top.mkdir()
        try:
            check(events, a_cut(events, chance), chance, top)
        except (AssertionError, CheckpointError):
            return
        shutil.rmtree(top)
    pytest.fail("the checkpoints are whole without it")
