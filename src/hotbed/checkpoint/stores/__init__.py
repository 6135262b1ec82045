"""Where checkpoints lie: on a file system of this machine, or on object storage."""

from __future__ import annotations

from hotbed.checkpoint.stores.local import LOCAL
from hotbed.checkpoint.stores.protocol import NewFolder, Reader, Store

__all__ = ["NewFolder", "Reader", "Store", "store_of"]


def store_of(path: str) -> Store:
    """Return the store that has a path."""
    return LOCAL
