"""How long a function may be, and how many parameters it may have."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src"
LINES, PARAMETERS = 60, 10
AS_IN_TORCH = {"embedding.Embedding.__init__", "embedding_bag.EmbeddingBag.__init__"}
"""Constructors that have torch's parameters."""


def functions(node: ast.AST, name: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            inner = f"{name}.{child.name}"
            if isinstance(child, ast.FunctionDef):
                yield inner, child
            yield from functions(child, inner)
        elif isinstance(child, ast.stmt):
            yield from functions(child, name)


def is_kernel(function: ast.FunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(each) for each in function.decorator_list)


def test_functions_are_short() -> None:
    """Docstrings do not count; kernels may have more of both, as nothing else can be passed to them."""
    long, wide = [], []
    for file in SOURCES.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for name, function in functions(tree, file.stem):
            if is_kernel(function):
                continue
            body = function.body[1:] if ast.get_docstring(function) else function.body
            if body and (body[-1].end_lineno or 0) - body[0].lineno + 1 > LINES:
                long.append(name)
            arguments = function.args
            given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            if len(given) > PARAMETERS and name not in AS_IN_TORCH:
                wide.append(name)
    assert not long and not wide
