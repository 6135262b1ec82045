"""Arrays in files, mapped into memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hotbed.serve.bundle import BundleError

__all__ = ["found_in", "mapped"]


def mapped(path: str, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[np.generic]:
    """Return the array of a .npy file, mapped into memory; nobody may write to it.

    Raises:
        BundleError: it is damaged, or of another dtype or shape.
        OSError: it cannot be read.
    """
    try:
        found: NDArray[np.generic] = np.load(path, mmap_mode="r" if 0 not in shape else None)
    except (ValueError, EOFError) as error:
        raise BundleError(f"{path} is damaged: {error}") from error
    if found.shape != shape or found.dtype != dtype or not found.flags.c_contiguous:
        raise BundleError(
            f"{path} is damaged: expected {np.dtype(dtype)} of shape {shape}, got {found.dtype} of shape "
            f"{found.shape}."
        )
    return found


def found_in(
    known: NDArray[np.int64], ids: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return where (n,) ids lie in `known`, which rise, and a mask of those that do."""
    if not len(known):
        return np.zeros(len(ids), np.int64), np.zeros(len(ids), np.bool_)
    at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    return at, known[at] == ids
