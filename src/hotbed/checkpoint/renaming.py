"""Names of a checkpoint as a model has them: with other prefixes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hotbed.checkpoint.errors import CheckpointError

__all__ = ["Renaming", "hint"]

_OF_WRAPPERS = ("_orig_mod.", "module.")
"""Parts of names by which torch.compile and DistributedDataParallel wrap a module."""


class Renaming:
    """Replaces the prefix of a name, the longest one that fits."""

    def __init__(self, prefixes: Mapping[str, str] | None) -> None:
        """`prefixes`: as saved → in the model."""
        given: object = {} if prefixes is None else prefixes
        if not isinstance(given, Mapping) or not all(
            isinstance(part, str) for pair in given.items() for part in pair
        ):
            raise CheckpointError(
                f"rename must be a dict of prefixes as saved to prefixes in the model, got {given!r}."
            )
        self.given = dict(given)
        self._prefixes: list[tuple[str, str]] = sorted(
            given.items(), key=lambda pair: -len(pair[0])
        )

    def __call__(self, name: str) -> str:
        for prefix, other in self._prefixes:
            if name.startswith(prefix):
                return other + name[len(prefix) :]
        return name

    def of_module(self, name: str) -> str:
        """The name of a module, which has no dot behind it; that of a whole model is empty."""
        return self(f"{name}." if name else "").removesuffix(".")

    def of_all(self, names: Iterable[str]) -> dict[str, str]:
        """Name in the model → name as saved.

        Raises:
            CheckpointError: two would have one name.
        """
        found: dict[str, str] = {}
        for name in names:
            if (other := found.setdefault(self(name), name)) != name:
                raise CheckpointError(
                    f"rename gives {other!r} and {name!r} of the checkpoint the same name, {self(name)!r}."
                )
        return found

    def refuse_unused(self, names: Iterable[str]) -> None:
        """Raises CheckpointError where no name as saved begins with a prefix."""
        saved = list(names)
        for prefix, _ in self._prefixes:
            if not any(name.startswith(prefix) for name in saved):
                raise CheckpointError(
                    f"rename has the prefix {prefix!r}, with which no name in the checkpoint begins. It has "
                    f"{', '.join(saved[:3]) or 'none'}{', ...' if len(saved) > 3 else ''}."
                )


def hint(missing: Iterable[str], unexpected: Iterable[str]) -> str:
    """A sentence on the `rename` that gives a name that is missing to one that was saved; or none."""
    saved = set(unexpected)
    for own in missing:
        for wrapper in _OF_WRAPPERS:
            at = own.find(wrapper)
            if at >= 0 and own[:at] + own[at + len(wrapper) :] in saved:
                return f" Did you mean rename={{{own[:at]!r}: {own[: at + len(wrapper)]!r}}}?"
            starts = [0, *(at + 1 for at, letter in enumerate(own) if letter == ".")]
            for at in starts:
                if own[:at] + wrapper + own[at:] in saved:
                    return f" Did you mean rename={{{own[:at] + wrapper!r}: {own[:at]!r}}}?"
    return ""
