"""Codecs of rows, on the device that the rows lie on.

Shapes: R rows, d columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hotbed import _core
from hotbed.errors import InputError
from hotbed.tables import CORE_DTYPES

__all__ = ["decode", "encode"]

_HALVES = (torch.float16, torch.bfloat16)


def encode(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """float32 rows → codes of `dtype`, and the rows' scales where `dtype` is int8.

    float16 and bfloat16 round to nearest even. An int8 code times its row's scale, which is the
    row's largest magnitude over 127, is off by at most half the scale. Rows whose scale would be
    less than float32's smallest normal number are zeros with scale 0; one with a NaN or an
    infinity gets the scale NaN and decodes to NaN. The bits are the same on every device.

    Args:
        rows: (R, d) float32; any shape for float16 and bfloat16.
        dtype: torch.float16, torch.bfloat16 or torch.int8.

    Returns:
        Codes of the shape of `rows`, and float32 (R,) or None.

    Raises:
        InputError: the rows' dtype or shape, or `dtype`, is another.
    """
    if dtype not in (*_HALVES, torch.int8):
        raise InputError(
            f"encode: dtype is {dtype}. Pass torch.float16, torch.bfloat16 or torch.int8."
        )
    if rows.dtype != torch.float32 or (dtype == torch.int8 and rows.dim() != 2):
        raise InputError(
            f"encode: got {rows.dtype} of shape {tuple(rows.shape)}. Pass float32 rows (R, d)."
        )
    if rows.device.type != "cpu":
        from hotbed.ops.gpu import codec

        return (
            codec.encode_int8(rows)
            if dtype == torch.int8
            else (codec.encode_half(rows, dtype), None)
        )
    rows = rows.detach().contiguous()
    if dtype == torch.int8:
        return _encode_int8(rows)
    codes = torch.empty(rows.shape, dtype=dtype)
    _core.encode_values(CORE_DTYPES[dtype].value, rows.data_ptr(), rows.numel(), codes.data_ptr())
    return codes, None


def decode(codes: Tensor, scales: Tensor | None = None) -> Tensor:
    """Codes → float32 of the same shape; int8 codes (R, d) need their scales (R,).

    Raises:
        InputError: the codes' dtype is another, or the scales are missing or do not fit.
    """
    if codes.dtype not in (*_HALVES, torch.int8):
        raise InputError(
            f"decode: got {codes.dtype}. Pass torch.float16, torch.bfloat16 or torch.int8."
        )
    if (codes.dtype == torch.int8) != (scales is not None):
        raise InputError(f"decode: {codes.dtype} {'without' if scales is None else 'with'} scales.")
    if codes.device.type != "cpu":
        from hotbed.ops.gpu import codec

        return codec.decode_half(codes) if scales is None else codec.decode_int8(codes, scales)
    if scales is not None:
        if codes.dim() != 2 or scales.shape != codes.shape[:1]:
            raise InputError(
                f"decode: codes of shape {tuple(codes.shape)} with scales of shape "
                f"{tuple(scales.shape)}. Pass (R, d) and (R,)."
            )
        return codes.float() * scales[:, None]
    codes = codes.detach().contiguous()
    values = torch.empty(codes.shape)
    _core.decode_values(
        CORE_DTYPES[codes.dtype].value, codes.data_ptr(), codes.numel(), values.data_ptr()
    )
    return values


def _encode_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    if rows.numel() == 0:
        return rows.to(torch.int8), rows.new_zeros(len(rows))
    count, dim = rows.shape
    form, scale = _core.WireForm.int8, torch.float32.itemsize
    packed = torch.empty((count, _core.wire_row_bytes(form, dim)), dtype=torch.uint8)
    addresses = rows.data_ptr(), packed.data_ptr()
    _core.encode_pieces([(form, CORE_DTYPES[rows.dtype], count, dim, *addresses, False, 0)])
    scales = packed[:, :scale].reshape(-1).view(torch.float32)
    return packed[:, scale:].contiguous().view(torch.int8), scales
