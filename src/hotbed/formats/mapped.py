"""Numbers in files as arrays: mapped into memory, so that they need none of their own."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["Numbers", "into", "mapped", "numbers_in", "refusal_to_map", "synced"]

_NAMES = (
    "float16",
    "float32",
    "float64",
    *(f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64)),
)
_DTYPES = {np.dtype(name): getattr(torch, name) for name in _NAMES}


class Numbers:
    """A NumPy array of any byte and axis order, as a tensor of this machine where it is read."""

    def __init__(self, array: np.ndarray) -> None:
        self._array, self.shape = array, array.shape
        self.dtype: torch.dtype | np.dtype = _DTYPES.get(array.dtype.newbyteorder("="), array.dtype)

    def __getitem__(self, rows: slice) -> Tensor:
        some = self._array[rows]
        return torch.from_numpy(np.array(some, some.dtype.newbyteorder("="), order="C"))


def numbers_in(path: str, dtype: np.dtype, shape: tuple[int, ...], offset: int = 0) -> Numbers:
    """The numbers from `offset` on of a file that has as many bytes at least."""
    if not math.prod(shape):
        return Numbers(np.empty(shape, dtype))
    return Numbers(np.memmap(path, dtype, "r", offset, shape))


def mapped(path: str, dtype: torch.dtype, shape: Sequence[int], header: bytes = b"") -> Tensor:
    """Makes a file of a header and numbers: the tensor that writes into it. See `into`.

    Raises:
        OSError: there is a file, or no room for one.
    """
    with open(path, "xb") as file:
        file.write(header)
    return into(path, dtype, shape, len(header))


def into(path: str, dtype: torch.dtype, shape: Sequence[int], offset: int) -> Tensor:
    """The tensor that writes into a file, from a multiple of 8 bytes on.

    Raises:
        OSError: there is no room for it.
    """
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(*shape, dtype=dtype)
    with open(path, "r+b") as file:
        # Else a full disk would end the process when it writes to memory.
        os.posix_fallocate(file.fileno(), offset, size)
    return (
        torch.from_numpy(np.memmap(path, np.uint8, "r+", offset, (size,))).view(dtype).view(*shape)
    )


def refusal_to_map(path: str, error: Exception) -> str:
    """Why a file could not be mapped, of an error that torch or safetensors raised; empty if it is about
    something else."""
    if not any(said in str(error) for said in ("unable to mmap", os.strerror(errno.ENOMEM))):
        return ""
    return (
        f"{path} has {os.stat(path).st_size:,} bytes, and the system maps no file of that size into memory. "
        "Write its tables to several smaller files, or let it: sysctl vm.overcommit_memory=1."
    )


def synced(path: str) -> None:
    """Returns when the disk has a file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
