"""State_dicts that optimizers over shared tables have loaded, by which ranks find out that they differ."""

from __future__ import annotations

import weakref

__all__ = ["digest_of_load", "note_load"]

_digests: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()


def note_load(optimizer: object, digest: str) -> None:
    """Remember the digest of the states that an optimizer has loaded."""
    _digests[optimizer] = digest


def digest_of_load(optimizer: object) -> str:
    """Return the digest of what the optimizer has loaded last; empty if there is none."""
    return _digests.get(optimizer, "")
