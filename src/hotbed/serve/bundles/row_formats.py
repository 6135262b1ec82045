"""How rows are stored in a bundle: as they are, or in few bits with a scale and an offset a row."""

from __future__ import annotations

import abc
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["ROW_FORMATS", "RowFormat", "Stored"]


class Stored(NamedTuple):
    """Some rows as they are stored."""

    rows: Tensor
    """(n, columns)"""
    scales: Tensor | None
    """(n, 2): scale and offset."""


class RowFormat(abc.ABC):
    """How rows are stored."""

    name: ClassVar[str]
    dtype: ClassVar[npt.DTypeLike]
    scale_dtype: ClassVar[npt.DTypeLike | None] = None

    def columns(self, dim: int) -> int:
        """Return how many numbers of `dtype` a row takes."""
        return dim

    @abc.abstractmethod
    def encoded(self, rows: Tensor) -> Stored:
        """Return (n, dim) finite rows, float32, as they are stored."""

    @abc.abstractmethod
    def decoded(self, stored: Stored, dim: int) -> Tensor:
        """Return the (n, dim) rows, float32, that are read."""


class _Floats(RowFormat):
    of_torch: ClassVar[torch.dtype]

    def encoded(self, rows: Tensor) -> Stored:
        return Stored(rows.to(self.of_torch), None)

    def decoded(self, stored: Stored, dim: int) -> Tensor:
        return stored.rows.float()


class Float32(_Floats):
    """Rows as they are; those of narrower types lose nothing."""

    name, dtype, of_torch = "float32", np.float32, torch.float32


class Float16(_Floats):
    """Rows rounded to half precision."""

    name, dtype, of_torch = "float16", np.float16, torch.float16


class _FewBits(RowFormat):
    """Numbers from 0 to `most`: a row is ``offset + scale * numbers``, as in FBGEMM's rowwise formats. The
    offset is its least number, and the scale takes `most` to its largest."""

    dtype = np.uint8
    most: ClassVar[int]
    of_scales: ClassVar[torch.dtype]

    def encoded(self, rows: Tensor) -> Stored:
        least, largest = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
        scales = torch.cat([(largest - least) / self.most, least], 1).to(self.of_scales)
        scale, offset = scales[:, :1].float(), scales[:, 1:].float()
        # Where all numbers of a row are equal, the offset is each.
        divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
        numbers = ((rows - offset) / divisor).round_().clamp_(0, self.most)
        return Stored(self.packed(numbers.to(torch.uint8)), scales)

    def decoded(self, stored: Stored, dim: int) -> Tensor:
        assert stored.scales is not None
        scale, offset = stored.scales[:, :1].float(), stored.scales[:, 1:].float()
        return self.unpacked(stored.rows, dim).float() * scale + offset

    def packed(self, numbers: Tensor) -> Tensor:
        return numbers

    def unpacked(self, stored: Tensor, dim: int) -> Tensor:
        return stored


class Int8(_FewBits):
    """A byte a number, and eight a row."""

    name, scale_dtype, most, of_scales = "int8", np.float32, 255, torch.float32


class Int4(_FewBits):
    """Two numbers a byte, the first in the lower half, and four bytes a row."""

    name, scale_dtype, most, of_scales = "int4", np.float16, 15, torch.float16

    def columns(self, dim: int) -> int:
        return (dim + 1) // 2

    def packed(self, numbers: Tensor) -> Tensor:
        even = torch.nn.functional.pad(numbers, (0, numbers.shape[1] % 2))
        return even[:, ::2] | (even[:, 1::2] << 4)

    def unpacked(self, stored: Tensor, dim: int) -> Tensor:
        both = torch.stack([stored & 15, stored >> 4], 2)
        return both.reshape(stored.shape[0], 2 * stored.shape[1])[:, :dim]


ROW_FORMATS: dict[str, RowFormat] = {
    each.name: each for each in (Float32(), Float16(), Int8(), Int4())
}
"""By their names."""
