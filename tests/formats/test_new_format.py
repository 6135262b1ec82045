"""A new format of tables is one file."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from formats.format_tables import imported, refused, run, same

import hotbed.formats
from hotbed.formats import kinds

LINES = """
import torch
from hotbed.formats.tables import FileTable, FormatError, Found, Hints


class Lines:
    hints = ()
    endings = (".lines",)

    def is_in(self, folder: str) -> bool:
        return False

    def read(self, path: str, hints: Hints) -> Found:
        with open(path) as file:
            rows = [[float(number) for number in line.split()] for line in file]
        if len({len(row) for row in rows}) != 1:
            raise FormatError(f"{path}: its lines have different lengths.")
        weights = torch.tensor(rows)
        chunks = lambda: iter([(torch.arange(len(rows)), weights)])
        count = len(rows)
        return Found([FileTable("lines", count, count, len(rows[0]), torch.float32, chunks)], {})


FORMAT = Lines()
"""


@pytest.fixture
def with_lines(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "kinds"
    folder.mkdir()
    (folder / "lines.py").write_text(LINES)
    kinds.__path__.append(str(folder))
    importlib.reload(hotbed.formats)
    yield tmp_path
    kinds.__path__.remove(str(folder))
    importlib.reload(hotbed.formats)


def test_a_module_in_the_folder_is_a_format(with_lines: Path) -> None:
    path = with_lines / "rows.lines"
    path.write_text("1 2 3\n4 5 6\n")
    found = imported(path, with_lines / "run")
    same(found, {"lines": (torch.arange(2), torch.tensor([[1.0, 2, 3], [4, 5, 6]]))})
    same(imported(path, with_lines / "named", "--format", "lines"), found)
    path.write_text("1 2 3\n4 5\n")
    assert "lines have different lengths" in refused("import", path, "--to", with_lines / "no")
    # It reads, and does not write.
    said = refused("dump", with_lines / "run", "--to", with_lines / "out", "--format", "lines")
    assert "no format 'lines'" in said


def test_the_help_names_every_format() -> None:
    code, said = run("import", "--help")
    assert code == 0
    assert all(name in said for name in hotbed.formats.READERS)
