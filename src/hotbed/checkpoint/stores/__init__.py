"""Where checkpoints lie: on a file system of this machine, or on object storage."""

from __future__ import annotations

import re

from hotbed.checkpoint.errors import CheckpointError
from hotbed.checkpoint.stores.local import LOCAL
from hotbed.checkpoint.stores.protocol import NewFolder, Reader, Store

__all__ = ["NewFolder", "Reader", "Store", "store_of"]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_LOST_SLASH = re.compile(r"(s3a?|gs|gcs|memory):/(?!/)")


def store_of(path: str) -> Store:
    """Return the store that has a path: that of the scheme of ``scheme://...``, else this machine's.

    Raises:
        CheckpointError: the packages that the scheme needs are missing, or it is unknown.
    """
    if _URL.match(path) is None:
        if _LOST_SLASH.match(path) is not None:
            raise CheckpointError(
                f"{path} has lost a slash, as URLs do in a pathlib.Path. Give it as a str."
            )
        return LOCAL
    from hotbed.checkpoint.stores.remote import remote_store

    return remote_store(path)
