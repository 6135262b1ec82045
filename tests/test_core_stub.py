"""`_core.pyi`, by which mypy checks calls into the core, says what the core is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hotbed
from hotbed import _core


def names_in(body: list[ast.stmt], within: str = "") -> set[str]:
    """Dotted names with those of their arguments; how types are written varies with nanobind."""
    found = set()
    for node in body:
        if isinstance(node, ast.FunctionDef):
            given = node.args.posonlyargs + node.args.args
            found.add(f"{within}{node.name}({', '.join(a.arg for a in given)})")
        elif isinstance(node, ast.ClassDef):
            found |= names_in(node.body, f"{within}{node.name}.")
        elif isinstance(node, (ast.AnnAssign, ast.Assign)):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            found.add(within + ast.unparse(target))
    return found


def test_the_stub_lists_the_core() -> None:
    stubgen = pytest.importorskip("nanobind.stubgen", reason="nanobind makes the stub")
    generator = stubgen.StubGen(_core, include_docstrings=False)
    generator.put(_core)
    committed = Path(hotbed.__file__).with_name("_core.pyi").read_text()
    told = names_in(ast.parse(committed).body)
    assert told == names_in(ast.parse(generator.get()).body), "make stub writes it anew"
    assert "Table.find(self, arg0, arg1, arg2)" in told and "read_rows(table, ids, n)" in told
