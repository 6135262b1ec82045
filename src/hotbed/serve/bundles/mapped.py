"""Arrays in files, mapped into memory."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hotbed.serve.bundles.bundle import BundleError

__all__ = ["found_in", "mapped", "new_mapped"]


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


def new_mapped(path: str, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[np.generic]:
    """Make a .npy file. Returns its array, which is to be written to.

    Raises:
        OSError: there is no room for it, or another fault of files.
    """
    if 0 in shape:  # nothing to map
        np.save(path, np.empty(shape, dtype))
        return np.empty(shape, dtype)
    made: NDArray[np.generic] = np.lib.format.open_memmap(path, "w+", np.dtype(dtype), shape)
    with open(path, "r+b") as file:
        # Else a full disk would end the process when it writes to memory.
        os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    return made


def found_in(
    known: NDArray[np.int64], ids: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return where (n,) ids lie in `known`, which rise, and a mask of those that do."""
    if not len(known):
        return np.zeros(len(ids), np.int64), np.zeros(len(ids), np.bool_)
    at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    return at, known[at] == ids
