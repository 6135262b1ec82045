"""Everything that Hotbed's modules name in __all__, with its docstring."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

MODULES = ("", ".optim", ".nn", ".data", ".init", ".models", ".train", ".checkpoint", ".dist")
INHERITED = {"forward", "extra_repr", "check_hold", "resolve"}
"""Methods that torch calls, or another class of Hotbed's does: users do not."""


def modules() -> Iterator[ModuleType]:
    for name in MODULES:
        yield importlib.import_module("hotbed" + name)


def public() -> Iterator[tuple[str, Any]]:
    """Yield each public class, function and constant with its name; a class is followed by its members."""
    for module in modules():
        for name in module.__all__:
            thing = getattr(module, name)
            if isinstance(thing, ModuleType):
                continue
            yield f"{module.__name__}.{name}", thing
            if inspect.isclass(thing):
                for member in members(thing):
                    yield f"{module.__name__}.{name}.{member}", getattr(thing, member)


def members(cls: type) -> list[str]:
    """Return the public methods and properties that classes of Hotbed's give to a class."""
    found = {}
    for base in cls.__mro__:
        if base.__module__.startswith("hotbed"):
            for name, member in vars(base).items():
                function = getattr(member, "__func__", member)
                if inspect.isroutine(function) or isinstance(member, property):
                    # torch puts wrapped methods of its base into classes.
                    if isinstance(member, property) or base.__name__ in function.__qualname__:
                        found[name] = None
    return [name for name in found if not name.startswith("_") and name not in INHERITED]


def docstring(name: str, thing: Any) -> str:
    """Return the docstring of what `public` yields; of a constant what stands under its assignment."""
    if inspect.isclass(thing):
        return inspect.cleandoc(thing.__dict__.get("__doc__") or "")
    if inspect.isroutine(thing) or isinstance(thing, property):
        return inspect.getdoc(thing) or ""
    module, _, constant = name.rpartition(".")
    return _under_assignments(importlib.import_module(module)).get(constant, "")


def _under_assignments(module: ModuleType) -> dict[str, str]:
    """Docstrings of a module's constants, or those of the modules that it has them from."""
    found: dict[str, str] = {}
    tree = ast.parse(inspect.getsource(module))
    for node in tree.body:
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.startswith(module.__name__)
        ):
            found.update(_under_assignments(importlib.import_module(node.module)))
    for node, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            target = node.target if isinstance(node, ast.AnnAssign) else None
            if isinstance(node, ast.Assign):
                target = node.targets[0]
            if isinstance(target, ast.Name):
                found[target.id] = inspect.cleandoc(str(below.value.value))
    return found
