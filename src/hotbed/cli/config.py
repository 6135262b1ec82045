"""Options from a TOML file: the names of the long options, without their dashes."""

from __future__ import annotations

import difflib

from hotbed.errors import HotbedError
from hotbed.files import read_toml
from hotbed.train.options import options_of


class ConfigError(HotbedError, ValueError):
    """A TOML file of options that cannot be honoured; the message names file and key."""


def read_config(path: str, settings: type) -> dict[str, object]:
    """The options in a TOML file, checked against the fields of the dataclass `settings`.

    Raises:
        ConfigError: no such file, not TOML, an unknown key or a value of the wrong type.
    """
    read = read_options(path, "--config")
    known = {option.key: option for option in options_of(settings).values()}
    options = {}
    for key, value in read.items():
        name = key.replace("_", "-")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}."
            raise ConfigError(f"{path}: unknown key {key!r}; {hint}")
        options[known[name].field] = _checked(path, key, value, known[name].value_type)
    return options


def read_options(path: str, option: str) -> dict[str, object]:
    """Return the contents of a TOML file, which `option` names.

    Raises:
        ConfigError: no such file, or not TOML.
    """
    try:
        return read_toml(path)
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}.") from None
    except ValueError as error:  # of numbers of too many digits, too
        raise ConfigError(f"{path} is not TOML: {error}.") from None


def _checked(path: str, key: str, value: object, kind: object) -> object:
    if kind == tuple[str, ...]:
        value = [value] if isinstance(value, str) else value
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return value
        wanted = "a string or a list of strings"
    elif kind is bool:
        if isinstance(value, bool):
            return value
        wanted = "true or false"
    elif kind is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        wanted = "a number"
    elif kind is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        wanted = "an integer"
    else:
        if isinstance(value, str):
            return value
        wanted = "a string"
    raise ConfigError(f"{path}: key {key!r} is {value!r}; it must be {wanted}.")
