"""The options of a command, made from the fields of a dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import typer

from hotbed.cli.config import read_config
from hotbed.cli.errors import in_one_sentence
from hotbed.train.options import Kind, Option, options_of

__all__ = ["command", "made_of"]

_S = TypeVar("_S")

_CONFIG = "Options from a file, by the names below (batch-size = 512); those given here win."


def command(
    settings: type, *, config: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a function that is called with a dict of values for the dataclass `settings`, as typed.

    Args:
        config: offer --config FILE.toml, whose path the function gets as a second argument.
    """
    options = options_of(settings)
    parameters = [_parameter(option) for option in options.values()]
    if config:
        parameters.insert(1, _config_parameter(settings))

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        def called(**typed: object) -> None:
            given = {name: _value(option, typed.pop(name)) for name, option in options.items()}
            run(given, **typed)

        called.__name__, called.__doc__ = run.__name__, run.__doc__
        called.__annotations__ = {each.name: each.annotation for each in parameters}
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return called

    return decorate


def made_of(settings: Callable[..., _S], given: Mapping[str, object]) -> _S:
    """Return the settings of a command, of the values by name that its function was called with."""
    return settings(**given)


def _parameter(option: Option) -> inspect.Parameter:
    kind, is_list = option.mark(Kind), option.value_type == tuple[str, ...]
    metavar = kind and kind.metavar
    declared = (
        typer.Argument(help=option.help, metavar=metavar)
        if kind is not None and kind.is_positional
        else typer.Option(f"--{option.key}", help=option.help, metavar=metavar)
    )
    type_: Any = list[str] if is_list else option.value_type
    default = None if is_list else option.default
    if kind is not None and kind.is_positional and not option.is_optional:
        return _keyword(option.field, Annotated[type_, declared], inspect.Parameter.empty)
    shown: Any = type_ | None if default is None else type_
    return _keyword(option.field, Annotated[shown, declared], default)


def _value(option: Option, typed: object) -> object:
    if option.value_type == tuple[str, ...]:
        return tuple(typed) if isinstance(typed, list) else ()
    return typed


def _config_parameter(settings: type) -> inspect.Parameter:
    def take(ctx: typer.Context, path: str | None) -> str | None:
        if path is not None:
            with in_one_sentence():
                ctx.default_map = {**(ctx.default_map or {}), **read_config(path, settings)}
        return path

    declared = typer.Option(
        "--config", metavar="FILE.toml", is_eager=True, callback=take, help=_CONFIG
    )
    # Typer reads the callback's own annotations, which name types as strings here.
    take.__annotations__ = {"ctx": typer.Context, "path": str | None}
    return _keyword("config", Annotated[str | None, declared], None)


def _keyword(name: str, annotation: object, default: object) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=annotation,
    )
