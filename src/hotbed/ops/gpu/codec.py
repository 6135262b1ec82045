"""Codecs of rows: float32 to float16, bfloat16 or int8 with a scale a row, and back.

The bits are those of the CPU (csrc/kernels/codec.hpp, `hotbed.ops.codec`), NaN included, on every card.
Shapes: R rows, d columns.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.errors import InputError
from hotbed.ops.gpu.variants import Variant, launch, require_gpu

__all__ = ["decode_half", "decode_int8", "encode_half", "encode_int8", "variants"]

_BLOCK = 1024
_TILE = 2048  # elements of an int8 program: its columns times its rows
_COLUMNS = (64, 1024)
_HALVES = (torch.float16, torch.bfloat16)


def encode_half(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds float32 values of any shape to float16 or bfloat16, to nearest even.

    Raises:
        InputError: `values` are not float32 on a GPU, or `dtype` is another.
    """
    _expect("encode_half", values, torch.float32)
    if dtype not in _HALVES:
        raise InputError(f"encode_half: dtype is {dtype}. Pass torch.float16 or torch.bfloat16.")
    values = values.contiguous()
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    n = values.numel()
    variant = _half_variant(True, dtype, n % 16 == 0)
    launch(variant, (triton.cdiv(n, _BLOCK),), values=values, out=out.view(torch.int16), n=n)
    return out


def decode_half(values: Tensor) -> Tensor:
    """float16 or bfloat16 values of any shape → float32, exactly.

    Raises:
        InputError: `values` are of another dtype, or not on a GPU.
    """
    _expect("decode_half", values, *_HALVES)
    values = values.contiguous()
    out = torch.empty(values.shape, dtype=torch.float32, device=values.device)
    n = values.numel()
    variant = _half_variant(False, values.dtype, n % 16 == 0)
    launch(variant, (triton.cdiv(n, _BLOCK),), values=values.view(torch.int16), out=out, n=n)
    return out


def encode_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """float32 rows (R, d) → int8 codes (R, d) in [-127, 127], and float32 scales (R,).

    A row's scale is its largest magnitude over 127, a code its value over the scale, rounded to
    nearest even; so a decoded value is off by at most half the scale (and rounding). Rows whose
    scale would be less than float32's smallest normal number are zeros with scale 0. A row with a
    NaN or an infinity gets the scale NaN and decodes to NaN.

    Raises:
        InputError: `rows` are not float32 of two dimensions on a GPU.
    """
    _expect("encode_int8", rows, torch.float32, dims=2)
    rows = rows.contiguous()
    count, dim = rows.shape
    codes = torch.empty(rows.shape, dtype=torch.int8, device=rows.device)
    scales = torch.zeros(count, dtype=torch.float32, device=rows.device)
    if rows.numel():
        variant = _int8_variant(True, dim)
        grid = (triton.cdiv(count, variant.constants["ROWS"]),)
        launch(variant, grid, rows=rows, codes=codes, scales=scales, count=count, dim=dim)
    return codes, scales


def decode_int8(codes: Tensor, scales: Tensor) -> Tensor:
    """int8 codes (R, d) times float32 scales (R,) → float32 (R, d).

    Raises:
        InputError: the shapes or dtypes do not fit, or the tensors are not on a GPU.
    """
    _expect("decode_int8", codes, torch.int8, dims=2)
    _expect("decode_int8", scales, torch.float32, dims=1)
    require_gpu("decode_int8", codes, scales)
    if scales.shape[0] != codes.shape[0]:
        raise InputError(
            f"decode_int8: {codes.shape[0]} rows with {scales.shape[0]} scales. Pass one a row."
        )
    codes, scales = codes.contiguous(), scales.contiguous()
    count, dim = codes.shape
    rows = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    if rows.numel():
        variant = _int8_variant(False, dim)
        grid = (triton.cdiv(count, variant.constants["ROWS"]),)
        launch(variant, grid, rows=rows, codes=codes, scales=scales, count=count, dim=dim)
    return rows


def variants() -> list[Variant]:
    """Every variant of the codecs."""
    halves = [
        _half_variant(encode, dtype, wide)
        for encode in (True, False)
        for dtype in _HALVES
        for wide in (True, False)
    ]
    dims = [dim for columns in _COLUMNS for dim in (columns, columns - 1)]
    return halves + [_int8_variant(encode, dim) for encode in (True, False) for dim in dims]


@cache
def _half_variant(encode: bool, dtype: torch.dtype, wide: bool) -> Variant:
    full, half = "*fp32", "*i16"
    return Variant(
        kernel=encode_half_kernel if encode else decode_half_kernel,
        types={
            "values": full if encode else half,
            "out": half if encode else full,
            "n": "i64",
        },
        constants={"BRAIN": dtype == torch.bfloat16, "WIDE": wide, "BLOCK": _BLOCK},
        aligned=("values", "out"),
    )


def _int8_variant(encode: bool, dim: int) -> Variant:
    columns = next((c for c in _COLUMNS if dim <= c), _COLUMNS[-1])
    return _listed_int8_variant(encode, columns, dim % 16 == 0)


@cache
def _listed_int8_variant(encode: bool, columns: int, wide: bool) -> Variant:
    return Variant(
        kernel=encode_int8_kernel if encode else decode_int8_kernel,
        types={
            "rows": "*fp32",
            "codes": "*i8",
            "scales": "*fp32",
            "count": "i64",
            "dim": "i64",
        },
        constants={"ROWS": _TILE // columns, "COLUMNS": columns, "WIDE": wide},
        aligned=("rows", "codes", "scales"),
    )


def _expect(what: str, tensor: Tensor, *dtypes: torch.dtype, dims: int | None = None) -> None:
    if tensor.dtype not in dtypes or (dims is not None and tensor.dim() != dims):
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        shaped = "" if dims is None else f" of {dims} dimension{'s' if dims > 1 else ''}"
        raise InputError(
            f"{what}: got {tensor.dtype} of shape {tuple(tensor.shape)}. Pass {wanted}{shaped}."
        )
    require_gpu(what, tensor)


# --- Kernels. ---


@triton.jit
def half_bits(values, BRAIN: tl.constexpr):
    """float32 → the bits of float16, or of bfloat16 (BRAIN), as int16; to nearest even."""
    bits = values.to(tl.uint32, bitcast=True)
    rest = bits & 0x7FFFFFFF
    is_nan = rest > 0x7F800000
    if BRAIN:
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        half = tl.where(is_nan, (bits >> 16) | 0x40, rounded)
    else:
        # A card writes one NaN for all.
        rounded = values.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
        half = tl.where(is_nan, ((bits >> 16) & 0x8000) | 0x7E00 | ((rest >> 13) & 0x3FF), rounded)
    return half.to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def half_values(half, BRAIN: tl.constexpr):
    """The bits of float16, or of bfloat16 (BRAIN), as int16 → float32."""
    bits = half.to(tl.uint16, bitcast=True).to(tl.uint32)
    if BRAIN:
        full = bits << 16
    else:
        sign, rest = (bits & 0x8000) << 16, bits & 0x7FFF
        exact = half.to(tl.float16, bitcast=True).to(tl.float32).to(tl.uint32, bitcast=True)
        full = tl.where(rest > 0x7C00, sign | 0x7FC00000 | ((rest & 0x3FF) << 13), exact)
    return full.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["n"])
def encode_half_kernel(
    values, out, n: tl.int64, BRAIN: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    if WIDE:
        n = n // 16 * 16  # says that 16 elements are inside together
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, half_bits(tl.load(values + at, mask=at < n), BRAIN), mask=at < n)


@triton.jit(do_not_specialize=["n"])
def decode_half_kernel(
    values, out, n: tl.int64, BRAIN: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    if WIDE:
        n = n // 16 * 16  # says that 16 elements are inside together
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, half_values(tl.load(values + at, mask=at < n), BRAIN), mask=at < n)


@triton.jit(do_not_specialize=["count", "dim"])
def encode_int8_kernel(
    rows,
    codes,
    scales,
    count: tl.int64,
    dim: tl.int64,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    if WIDE:
        dim = dim // 16 * 16  # says that rows begin at multiples of 16
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    largest = tl.zeros([ROWS], tl.float32)
    finite = tl.full([ROWS], 1, tl.int32)
    for begin in range(0, dim, COLUMNS):
        inside = (row < count)[:, None] & (begin + column < dim)[None, :]
        at = row[:, None] * dim + (begin + column)[None, :]
        magnitude = tl.abs(tl.load(rows + at, mask=inside, other=0.0))
        # A maximum may lose a NaN, so what is not finite is looked for apart.
        finite &= tl.min((magnitude < float("inf")).to(tl.int32), 1)
        largest = tl.maximum(largest, tl.max(magnitude, 1))
    scale = tl.div_rn(largest, tl.full([ROWS], 127.0, tl.float32))
    scale = tl.where(scale < 1.1754943508222875e-38, 0.0, scale)
    divisor = tl.where((scale > 0) & (finite != 0), scale, 1.0)
    usable = (scale > 0) & (finite != 0)
    for begin in range(0, dim, COLUMNS):
        inside = (row < count)[:, None] & (begin + column < dim)[None, :]
        at = row[:, None] * dim + (begin + column)[None, :]
        values = tl.load(rows + at, mask=inside, other=0.0)
        values = tl.where(usable[:, None], values, 0.0)
        quotient = tl.div_rn(values, tl.broadcast_to(divisor[:, None], [ROWS, COLUMNS]))
        # Adding 1.5 * 2^23 leaves no bits behind the point: to nearest even.
        rounded = (quotient + 12582912.0) - 12582912.0
        tl.store(codes + at, rounded.to(tl.int8), mask=inside)
    tl.store(scales + row, tl.where(finite != 0, scale, float("nan")), mask=row < count)


@triton.jit(do_not_specialize=["count", "dim"])
def decode_int8_kernel(
    rows,
    codes,
    scales,
    count: tl.int64,
    dim: tl.int64,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    if WIDE:
        dim = dim // 16 * 16  # says that rows begin at multiples of 16
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    scale = tl.load(scales + row, mask=row < count, other=0.0)
    for begin in range(0, dim, COLUMNS):
        inside = (row < count)[:, None] & (begin + column < dim)[None, :]
        at = row[:, None] * dim + (begin + column)[None, :]
        code = tl.load(codes + at, mask=inside, other=0).to(tl.float32)
        tl.store(rows + at, code * scale[:, None], mask=inside)
