"""A disk that remembers: what was done to a folder, and how that folder may look when the power fails.

A sync makes lasting what was written to a file, or which names a folder has, and nothing else does. What
was not synced may be there, or not, or in part, whatever was done after it.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

SECTOR = 512


class Event(NamedTuple):
    """Something that was done. Files and folders have numbers, as names come and go; 0 is the top."""

    what: str
    """"make", "make folder", "rename", "remove", "write", "cut", "sync", "sync folder", or "mark"."""
    of: int
    """The folder whose names change, or what is written or synced; of a mark, its number."""
    name: str = ""
    to: str = ""
    """Of a rename, the new name."""
    item: int = 0
    """What the name is of."""
    data: bytes = b""
    size: int = 0
    """Of a cut, the bytes of the file that stay."""


class RecordedDisk:
    """What `os` does below an empty folder is recorded, while this is entered by a ``with`` statement."""

    def __init__(self, top: Path) -> None:
        self.top = str(top)
        self.events: list[Event] = []
        self._names: dict[int, dict[str, int]] = {0: {}}
        self._opened: dict[int, int] = {}
        self._alone = threading.Lock()
        self._real = {
            name: getattr(os, name)
            for name in (
                *("open", "write", "ftruncate", "fsync", "close"),
                *("replace", "unlink", "mkdir", "rmdir"),
            )
        }

    def mark(self, number: int) -> None:
        self.events.append(Event("mark", number))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        assert not os.listdir(self.top)
        own = {name: self._one_by_one(getattr(self, f"_{name}")) for name in self._real}
        with mock.patch.multiple(os, **own):
            yield

    def _one_by_one(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            with self._alone:
                return function(*given, **options)

        return call

    def _place(self, path: Any) -> tuple[int, str] | None:
        """(folder, name) of what lies below the top, and "" for the name of the top."""
        relative = os.path.relpath(os.path.abspath(path), self.top)
        if relative.startswith(".."):
            return None
        *above, name = [part for part in relative.split(os.sep) if part != "."] or [""]
        folder = 0
        for part in above:
            folder = self._names[folder][part]
        return folder, name

    def _open(self, path: Any, flags: int, *mode: int, **options: Any) -> int:
        descriptor: int = self._real["open"](path, flags, *mode, **options)
        if place := self._place(path):
            folder, name = place
            if name and name not in self._names[folder]:
                self._make("make", folder, name)
            self._opened[descriptor] = self._names[folder][name] if name else folder
        return descriptor

    def _make(self, what: str, folder: int, name: str) -> None:
        item = 1 + max(e.item for e in [*self.events, Event("", 0)])
        self._names[folder][name] = item
        self._names[item] = {}
        self.events.append(Event(what, folder, name, item=item))

    def _write(self, descriptor: int, data: Any) -> int:
        written: int = self._real["write"](descriptor, data)
        if descriptor in self._opened:
            given = bytes(data[:written])
            self.events.append(Event("write", self._opened[descriptor], data=given))
        return written

    def _ftruncate(self, descriptor: int, size: int) -> None:
        self._real["ftruncate"](descriptor, size)
        if descriptor in self._opened:
            self.events.append(Event("cut", self._opened[descriptor], size=size))

    def _fsync(self, descriptor: int) -> None:
        # The real disk has nothing to outlive.
        if descriptor in self._opened:
            item = self._opened[descriptor]
            folders = {0, *(e.item for e in self.events if e.what == "make folder")}
            self.events.append(Event("sync folder" if item in folders else "sync", item))

    def _close(self, descriptor: int) -> None:
        self._opened.pop(descriptor, None)
        self._real["close"](descriptor)

    def _replace(self, path: Any, to: Any) -> None:
        self._real["replace"](path, to)
        if place := self._place(path):
            folder, name = place
            new = self._place(to)
            assert new is not None and new[0] == folder
            item = self._names[folder][new[1]] = self._names[folder].pop(name)
            self.events.append(Event("rename", folder, name, new[1], item))

    def _mkdir(self, path: Any, *mode: int, **options: Any) -> None:
        self._real["mkdir"](path, *mode, **options)
        if place := self._place(path):
            self._make("make folder", *place)

    def _unlink(self, path: Any, **options: Any) -> None:
        self._real["unlink"](path, **options)
        self._removed(path)

    def _rmdir(self, path: Any, **options: Any) -> None:
        self._real["rmdir"](path, **options)
        self._removed(path)

    def _removed(self, path: Any) -> None:
        if place := self._place(path):
            folder, name = place
            item = self._names[folder].pop(name)
            self.events.append(Event("remove", folder, name, item=item))


def after_power_cut(
    events: list[Event], cut: int, chance: random.Random | None
) -> dict[str, bytes | None]:
    """What may be there when the power fails right before event `cut`: by path contents, None of a folder.

    Args:
        chance: decides what becomes of all that was not synced; None: it is there.
    """
    events = events[:cut]
    synced = {event.of: at for at, event in enumerate(events) if event.what.startswith("sync")}
    names: dict[int, dict[str, int]] = defaultdict(dict)
    contents: dict[int, bytearray] = defaultdict(bytearray)
    length: dict[int, int] = defaultdict(int)
    # Names that were not synced changed one by one, or, as a journal has it, up to some moment.
    moment = chance.randrange(cut + 1) if chance and chance.random() < 0.5 else None
    for at, event in enumerate(events):
        lasts = chance is None or at < synced.get(event.of, -1)
        if event.what == "write":
            begin = length[event.of]
            length[event.of] += len(event.data)
            data = event.data if lasts or chance is None else _torn(event.data, chance)
            if data is not None:
                held = contents[event.of]
                held.extend(bytes(max(0, begin + len(data) - len(held))))
                held[begin : begin + len(data)] = data
        elif event.what == "cut":
            if lasts or (chance and chance.random() < 0.5):
                del contents[event.of][event.size :]
        elif event.what in ("make", "make folder", "rename", "remove"):
            changed = at < moment if moment is not None else chance and chance.random() < 0.5
            if lasts or changed:
                if names[event.of].get(event.name) == event.item:
                    del names[event.of][event.name]
                if event.what != "remove":
                    names[event.of][event.to or event.name] = event.item
    folders = {event.item for event in events if event.what == "make folder"}
    found: dict[str, bytes | None] = {}
    left = [("", 0)]
    while left:
        path, folder = left.pop()
        for name, item in names[folder].items():
            here = os.path.join(path, name)
            if item in folders:
                found[here] = None
                left.append((here, item))
            else:
                found[here] = bytes(contents[item])
    return found


def _torn(data: bytes, chance: random.Random) -> bytes | None:
    """What may be there of a write that was not synced."""
    match chance.randrange(5):
        case 0:
            return data
        case 1:
            return None
        case 2:
            return data[: chance.randrange(len(data) + 1)]
        case 3:
            return bytes(len(data))
    torn = bytearray(data)
    for begin in range(0, len(data), SECTOR):
        if chance.random() < 0.5:
            end = min(begin + SECTOR, len(data))
            torn[begin:end] = bytes(end - begin)
    return bytes(torn)


def put(found: dict[str, bytes | None], top: Path) -> None:
    """Makes files and folders as they were found."""
    for path, contents in sorted(found.items()):
        if contents is None:
            (top / path).mkdir()
        else:
            (top / path).write_bytes(contents)


def there(top: Path) -> dict[str, bytes | None]:
    """The files and folders that are there."""
    return {
        str(path.relative_to(top)): None if path.is_dir() else path.read_bytes()
        for path in top.rglob("*")
    }
