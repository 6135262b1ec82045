"""Settings of models written as text, as on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType, UnionType
from typing import get_args, get_origin, get_type_hints

from hotbed.errors import TableError
from hotbed.models.settings import ModelSettings

__all__ = ["settings_from_text"]


def settings_from_text(kind: type[ModelSettings], texts: Sequence[str]) -> dict[str, object]:
    """Return settings by name, of texts such as "layers=3", "hidden=256,128" or "one_row=true".

    Raises:
        TableError: a text is none of these, its name is no setting's, or its value not of the setting's type.
    """
    hints, settings = get_type_hints(kind), {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in hints:
            raise TableError(
                f"Setting {text!r}: write NAME=VALUE, the name one of {', '.join(hints)}."
            )
        try:
            settings[name] = _value_of(hints[name], value)
        except ValueError:
            raise TableError(
                f"Setting {name!r} is {value!r}; it must be {_described(hints[name])}."
            ) from None
    return settings


def _value_of(hint: object, text: str) -> object:
    if get_origin(hint) in (UnionType, tuple):
        (inner, *_) = (each for each in get_args(hint) if each not in (NoneType, ...))
        if get_origin(hint) is UnionType:
            return None if text == "none" else _value_of(inner, text)
        return tuple(_value_of(inner, part) for part in text.split(",") if part)
    if hint is bool:
        return {"true": True, "false": False}[text] if text in ("true", "false") else int("none")
    return hint(text) if isinstance(hint, type) else text


def _described(hint: object) -> str:
    if get_origin(hint) is tuple:
        of_numbers = int in get_args(hint)
        return f"{'numbers' if of_numbers else 'names'} with commas between"
    names = {"bool": "true or false", "int": "an integer", "float": "a number"}
    return names.get(getattr(hint, "__name__", ""), "as documented")
