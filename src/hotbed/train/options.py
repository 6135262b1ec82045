"""Options of a command, declared once: the fields of a dataclass.

A field has a type, a default, and a docstring under it, which is its help. What else there is to say stands
in its annotation: ``host: Annotated[str | None, SIZE] = None``.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from types import NoneType
from typing import Annotated, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

__all__ = ["FILE", "FOLDER", "SAME_RUN", "SIZE", "Kind", "OneOf", "Option", "options_of"]

_A = TypeVar("_A")


class Kind(NamedTuple):
    """The meaning of an option's text."""

    metavar: str
    """Its name in the help."""
    is_path: bool = True
    owns: Callable[[str], bool] | None = None
    """For a folder in which the command keeps files: True for their names, relative to it."""
    is_positional: bool = False


FILE = Kind("FILE")
"""A file that the command writes."""
FOLDER = Kind("DIR")
SIZE = Kind("SIZE", is_path=False)


class OneOf(NamedTuple):
    """The texts that an option may be; ``{choices}`` in its docstring stands for them."""

    choices: Collection[str]

    def __str__(self) -> str:
        return ", ".join(self.choices)


class Mark(enum.Enum):
    """Properties of an option that its type does not show."""

    SAME_RUN = enum.auto()
    """A run that goes on must have the value with which it began."""


SAME_RUN = Mark.SAME_RUN


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a command."""

    field: str
    """Its name in Python."""
    value_type: object
    """str, int, float, bool, or tuple[str, ...] for one that may be given several times."""
    is_optional: bool
    """True if its value may be None."""
    default: object
    """None where a value must be given."""
    help: str
    marks: tuple[object, ...]

    @property
    def key(self) -> str:
        """Its name in a TOML file and, after two dashes, on the command line."""
        return self.field.rstrip("_").replace("_", "-")

    def mark(self, kind: type[_A]) -> _A | None:
        """The first of its marks that is of this kind, or None."""
        return next((mark for mark in self.marks if isinstance(mark, kind)), None)


def options_of(settings: type) -> dict[str, Option]:
    """The options that the dataclass `settings` declares, by field, in its order."""
    hints, docstrings = get_type_hints(settings, include_extras=True), dict(_docstrings(settings))
    return {
        field.name: _option(field, hints[field.name], docstrings)
        for field in dataclasses.fields(settings)
    }


def _option(field: dataclasses.Field[object], hint: object, docstrings: dict[str, str]) -> Option:
    kind, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    is_optional = NoneType in get_args(kind)
    if is_optional:
        (kind,) = {*get_args(kind)} - {NoneType}
    default = None if field.default is dataclasses.MISSING else field.default
    text = docstrings.get(field.name, "")
    for mark in marks:
        if isinstance(mark, OneOf):
            *most, last = mark.choices
            text = text.replace("{choices}", f"{', '.join(most)} or {last}" if most else last)
    return Option(
        field=field.name,
        value_type=kind,
        is_optional=is_optional,
        default=default,
        help=text,
        marks=tuple(marks),
    )


def _docstrings(settings: type) -> Iterator[tuple[str, str]]:
    """Fields and the docstrings under them, each in one line. Python keeps those in the source only."""
    module = ast.parse(inspect.getsource(sys.modules[settings.__module__]))
    for node in module.body:
        if isinstance(node, ast.ClassDef) and node.name == settings.__name__:
            for field, below in zip(node.body, node.body[1:], strict=False):
                match field, below:
                    case (
                        ast.AnnAssign(target=ast.Name(id=name)),
                        ast.Expr(value=ast.Constant(value=str(text))),
                    ):
                        yield name, " ".join(text.split())
