"""What Hotbed says: articles before names, words that stand twice, and names that are there."""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import hotbed

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(Path(hotbed.__file__).parent.rglob("*.py"))
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
# But kernels, whose modules import Triton.
PUBLIC = re.compile(r"\b(?:hotbed|hb)\.(?!ops\.gpu\.)(\w+(?:\.\w+)*)")
TWICE = re.compile(r"\b([a-z]+) \1\b", re.IGNORECASE)
ARTICLE = re.compile(r"\b(an?) (?:(\0)|\W*(\w+))", re.IGNORECASE)
# Letters and beginnings that are not spoken as they are written.
LIKE_A_CONSONANT = re.compile(r"one|uni|us|eu|u$|ufs|ut")
LIKE_A_VOWEL = re.compile(r"hour|honest|[aefhilmnorsx]$|mlp|ftrl|sgd|rmsprop|ssd|xla|nn$|11|18|8")


def texts(source: str) -> Iterator[tuple[int, str]]:
    """The strings of a source but docstrings, pieces joined; a value that is filled in is a NUL."""
    inner = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr):
            inner.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            inner.update(map(id, node.values))
            parts = (p.value if isinstance(p, ast.Constant) else "\0" for p in node.values)
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in inner:
                yield node.lineno, node.value


def faults(text: str) -> list[str]:
    text = re.sub(r"\s+", " ", text)
    found = [match[0] for match in TWICE.finditer(text)]
    for match in ARTICLE.finditer(text):
        article, filled, word = match[1].lower(), match[2], (match[3] or "").lower()
        vowel = word[:1] in "aeiou" and not LIKE_A_CONSONANT.match(word)
        vowel = vowel or LIKE_A_VOWEL.match(word) is not None
        if filled or (article == "an") != vowel:
            found.append(match[0])
    return found


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("nothing for to to work on", 1),
        ("the states of a \0", 1),
        ("a Adagrad", 1),
        ("an SGD, a unit, an 8-bit code, a NUL", 0),
        ("a SGD", 1),
        ("an tensor", 1),
    ],
)
def test_faults_are_found(text: str, count: int) -> None:
    assert len(faults(text)) == count


def test_messages_have_none() -> None:
    assert len(SOURCES) > 50
    said = [
        f"{path.name}:{line}: {fault!r}"
        for path in SOURCES
        for line, text in texts(path.read_text(encoding="utf-8"))
        for fault in faults(text)
    ]
    assert not said


def is_there(name: str) -> bool:
    """Whether ``hotbed.<name>`` is an attribute or a module."""
    try:
        pkgutil.resolve_name(f"hotbed.{name}")
    except (AttributeError, ImportError):
        return False
    return True


def test_what_is_prescribed_is_there() -> None:
    assert is_there("optim.Adam") and is_there("ops.codec") and not is_there("colocate")
    said = [(path, text) for path in SOURCES for _, text in texts(path.read_text(encoding="utf-8"))]
    said += [(path, path.read_text(encoding="utf-8")) for path in PAGES]
    names = {(path.name, match[1]) for path, text in said for match in PUBLIC.finditer(text)}
    assert len(names) > 50
    assert sorted(pair for pair in names if not is_there(pair[1])) == []
