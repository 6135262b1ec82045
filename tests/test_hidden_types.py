"""How often an annotation says `Any`, and who reads attributes that are private to another."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "hotbed"
MOST = {"": 59, "dist": 41}
"""`Any` in annotations and aliases, by folder; "": of all others. JSON, torch's parameter groups, Triton's
kernels, what a user's model gives, and the like have no type of ours. Lower it when some go."""

OF_TORCH = {
    # Sparse gradients that are not coalesced: the public ones would copy, or refuse.
    *("_indices", "_values", "_nnz", "_sparse_coo_tensor_with_dims_and_tensors"),
    "_version",  # torch's count of writes
    # Hooks and parametrizations, before a layer is taken over.
    *("_forward_hooks", "_forward_pre_hooks", "_parameters"),
    # Hooks that want to see a gradient.
    *("_backward_hooks", "_post_accumulate_grad_hooks"),
    *("_apply", "_load_from_state_dict", "_save_to_state_dict", "_metadata"),  # nn.Module's own
    *("_make_subclass", "_foreach_mul_"),
}
"""Attributes of torch's for which it has no public ones. Those below `torch._C` go by that."""
OF_TUPLES = {"_asdict", "_replace", "_fields"}


def trees(*, dist: bool = True) -> Iterator[tuple[Path, ast.Module]]:
    for file in PACKAGE.rglob("*.py"):
        path = file.relative_to(PACKAGE)
        if dist or path.parts[0] != "dist":
            yield path, ast.parse(file.read_text(encoding="utf-8"))


def types_in(tree: ast.Module) -> Iterator[ast.expr]:
    """Annotations of parameters, results and variables, and the values of aliases."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            yield node.returns
    yield from (node.value for node in tree.body if isinstance(node, ast.Assign))


def count_any(tree: ast.Module) -> int:
    found = 0
    for expression in types_in(tree):
        for node in ast.walk(expression):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found += len(re.findall(r"\bAny\b", node.value))
            found += isinstance(node, ast.Name) and node.id == "Any"
            found += isinstance(node, ast.Attribute) and node.attr == "Any"
    return found


def test_annotations_name_types() -> None:
    counts = dict.fromkeys(MOST, 0)
    for path, tree in trees():
        counts["dist" if path.parts[0] == "dist" else ""] += count_any(tree)
    assert all(counts[folder] <= most for folder, most in MOST.items()), counts


def test_every_place_of_any_counts() -> None:
    source = "T = list[Any]\ndef f(a: Any, *b: dict[str, Any]) -> Any:\n    c: typing.Any = a\n"
    assert count_any(ast.parse(source)) == 5
    assert count_any(ast.parse("def f(a: 'Any', b: AnyStr) -> None: ...")) == 1


def own_names(kind: ast.ClassDef) -> set[str]:
    """Names of attributes and methods that a class gives its instances."""
    names = {node.name for node in kind.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(kind):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            names.add(node.attr)
    return names


def private_reads(tree: ast.AST, known: frozenset[str] = frozenset()) -> Iterator[str]:
    """`x._name` where neither x nor the class in which that stands has made it. `known`: of that class."""
    for node in ast.iter_child_nodes(tree):
        inside = frozenset(own_names(node)) if isinstance(node, ast.ClassDef) else known
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            text = ast.unparse(node)
            owner = text.removesuffix(f".{node.attr}")
            of_torch = node.attr in OF_TORCH or "torch._C" in text
            if owner not in ("self", "cls", "super()") and not of_torch and node.attr not in known:
                yield text
        yield from private_reads(node, inside)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OF_TUPLES


def test_nobody_reads_private_attributes_of_another_class() -> None:
    """Another instance of the same class may; `dist` does so far."""
    found = {
        str(path): reads for path, tree in trees(dist=False) if (reads := [*private_reads(tree)])
    }
    assert found == {}


def test_private_reads_are_found() -> None:
    source = (
        "class A:\n"
        "    def __init__(self): self._own = 1\n"
        "    def same(self, other): return other._own, self._given, other._strange\n"
        "def f(a): return a._own, a.b._c.d, torch._C._x, a._replace(b=1), a.__dict__\n"
    )
    assert [*private_reads(ast.parse(source))] == ["other._strange", "a._own", "a.b._c"]
