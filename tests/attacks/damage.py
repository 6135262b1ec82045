"""What can be done to the files of a checkpoint: damage that shows, and enemies whose checksums are right."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoint.saved_models import DENSE, MANIFEST, ROWS, replace_file, rewrite, seal

Change = Callable[[Path, Path, random.Random], None]


def any_file(path: Path, chance: random.Random) -> Path:
    return chance.choice(sorted(path.iterdir()))


def flip(path: Path, _: Path, chance: random.Random) -> None:
    file = any_file(path, chance)
    data = bytearray(file.read_bytes())
    for _time in range(chance.choice((1, 1, 2, 50))):
        at = chance.randrange(len(data))
        data[at] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def cut(path: Path, _: Path, chance: random.Random) -> None:
    file = any_file(path, chance)
    data = file.read_bytes()
    file.write_bytes(
        data[: chance.randrange(len(data) + 1)] + b"\0" * chance.choice((0, 0, 8, 999))
    )


def swap(path: Path, other: Path, chance: random.Random) -> None:
    file = any_file(path, chance)
    shutil.copy(chance.choice((other / file.name, any_file(other, chance))), file)


def shift(path: Path, _: Path, chance: random.Random) -> None:
    file = any_file(path, chance)
    data = file.read_bytes()
    at, size = chance.randrange(len(data)), chance.randrange(1, 40)
    part = chance.choice((b"", b"\0" * size, data[:size], chance.randbytes(size)))
    file.write_bytes(data[:at] + part + data[at + size :])


def lose(path: Path, _: Path, chance: random.Random) -> None:
    file = any_file(path, chance)
    file.unlink()
    how = chance.randrange(4)
    if how == 1:
        file.mkdir()
    elif how == 2:
        file.symlink_to("../outside.safetensors")
    elif how == 3:
        file.symlink_to("/dev/zero")


# -- with checksums that are right ---------------------------------------------------------------------

VALUES: list[Any] = [
    None, True, -1, 0, 1, 2, 2**31, 2**53, 2**63, 10**30, 1e308, -0.5, "", "F32", "dlrm", "../outside",
    "a\0b", "x" * 5000, [], [[]], [2**40, 2**40], {}, {"kind": "Table"}, {"kind": "Uniform"}, float("nan"),
]  # fmt: skip


def spoil(value: Any, chance: random.Random) -> Any:
    """The same JSON with another value somewhere."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(sorted(value))
        changed = dict(value)
        how = chance.random()
        if how < 0.1:
            del changed[key]
        elif how < 0.2:
            changed[chance.choice(("x", "../outside", "kind", ""))] = changed.pop(key)
        else:
            changed[key] = spoil(value[key], chance)
        return changed
    if isinstance(value, list) and value and chance.random() < 0.8:
        at = chance.randrange(len(value))
        return [*value[:at], spoil(value[at], chance), *value[at + chance.randint(0, 2) :]]
    return chance.choice(VALUES)


def manifest(path: Path, _: Path, chance: random.Random) -> None:
    contents = json.loads((path / MANIFEST).read_text())
    for _time in range(chance.randint(1, 3)):
        contents = spoil(contents, chance)
        if not isinstance(contents, dict):
            contents = {"format": "hotbed checkpoint", "version": 1, "files": contents}
    seal(path / MANIFEST, contents)


def name_outside(path: Path, _: Path, chance: random.Random) -> None:
    name = chance.choice(
        (
            "../outside.safetensors",
            str(path.parent / "outside.safetensors"),
            "../../outside.safetensors",
            "..",
            ".",
            "",
            "/dev/zero",
        )
    )
    rewrite(path, lambda contents: contents["files"][chance.randrange(2)].update(name=name))


def header(path: Path, _: Path, chance: random.Random) -> None:
    part = chance.choice((DENSE, ROWS))
    data = (path / part).read_bytes()
    length = int.from_bytes(data[:8], "little")
    if chance.random() < 0.3:
        length = chance.choice((0, 1, length - 1, length + 1, len(data), 2**32, 2**63, 2**64 - 1))
        replace_file(path, part, length.to_bytes(8, "little") + data[8:])
        return
    entries = spoil(json.loads(data[8 : 8 + length]), chance)
    text = json.dumps(entries).encode()
    replace_file(path, part, len(text).to_bytes(8, "little") + text + data[8 + length :])


def numbers(path: Path, _: Path, chance: random.Random) -> None:
    """Flipped bits that nobody can tell: keys, ids, weights."""
    part = chance.choice((DENSE, ROWS))
    data = bytearray((path / part).read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    for _time in range(chance.randint(1, 20)):
        data[chance.randrange(begin, len(data))] = chance.choice((0, 1, 127, 128, 255))
    replace_file(path, part, bytes(data))


CHECKED: list[Change] = [flip, cut, swap, shift, lose, name_outside]
UNTOLD: list[Change] = [manifest, header, numbers]
"""What may give another model that can be loaded."""


def contents_of(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and not file.is_symlink()
    }
