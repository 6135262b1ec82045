"""Names that docstrings, comments and pages give in full exist."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"src": "*.py", "tests": "*.py", "tools": "*.py", "benchmarks": "*.py", "docs": "*.md"}
FILES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
    *(path for folder, kind in FOLDERS.items() for path in sorted((ROOT / folder).rglob(kind))),
]
NAME = re.compile(r"`((?:hotbed|hb)(?:\.\w+)+)[`(\[]")


def missing(text: str) -> list[str]:
    """Return the names in backticks that cannot be imported, nor reached by attributes from a module."""
    found = []
    for name in dict.fromkeys(NAME.findall(text)):
        try:
            pkgutil.resolve_name(re.sub(r"^hb\b", "hotbed", name))
        except (ImportError, AttributeError):
            found.append(name)
    return found


def test_names_in_backticks_exist() -> None:
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in FILES}
    assert {path: gone for path, text in texts.items() if (gone := missing(text))} == {}


def test_a_name_that_is_gone_is_found() -> None:
    gone = "hb.dist.Plan.gone"
    text = f"`hotbed.dist.Plan`, `{gone}`, ``hotbed.distribute(model)``, `hotbed_table`"
    assert missing(text) == [gone]
