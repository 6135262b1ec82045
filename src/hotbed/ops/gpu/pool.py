"""Gather and pool: slots → rows → one vector a bag, for all features of a collection.

Twin of csrc/batch/pool.cpp. Features that move equally wide values share a launch, whatever their dims,
combiners, offsets and weights. Each bag is summed in float32 in the order of its positions, so the
result has the bits of the core's.

Shapes: a feature has n positions in B bags; its table's plane is (rows, dim).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.errors import InputError
from hotbed.ops.gpu.rows import (
    KINDS,
    NO_SLOT,
    Launch,
    address_of,
    at32,
    at64,
    line_split,
    load_values,
    only_if,
    spread,
    store_values,
    upload,
    vector_length,
    width_class,
    width_of,
)
from hotbed.ops.gpu.variants import Variant, launch, require_gpu

__all__ = ["FeatureSlots", "check_features", "pool", "pool_into", "variants"]

COMBINERS = {"sum": 0, "mean": 1, "sqrtn": 2, "none": 3}

_COPY_BLOCK, _BAG_BLOCK = 512, 128  # vectors a program
_UNROLL = 4  # rows of a bag that are on their way at once; half of it where vectors are long


@dataclass(frozen=True, kw_only=True)
class FeatureSlots:
    """One feature's batch after resolve: a slot for every position.

    Args:
        table: which of the planes it reads.
        slots: (n,) int64, contiguous. A slot -1 - k is row k of `scratch`; without scratch any
            negative slot, and with it NO_SLOT, is padding: it adds nothing, counts for nothing and
            gets no gradient.
        combiner: "sum", "mean", "sqrtn" or "none" (a vector a position).
        offsets: (B + 1,) int64, rising from 0 to n, contiguous; or None: bags of `fixed` positions.
        fixed: positions a bag where there are no offsets.
        weights: (n,) float32, contiguous: sum Σwv, mean Σwv/Σw, sqrtn Σwv/√Σw². "none" has none.
        padding_slot: a slot that is padding too; "none" copies its row all the same.
        scratch: (k, dim) rows like the plane's, for ids that have no row of their own.
    """

    table: int
    slots: Tensor
    combiner: str = "sum"
    offsets: Tensor | None = None
    fixed: int = 1
    weights: Tensor | None = None
    padding_slot: int = NO_SLOT
    scratch: Tensor | None = None

    @property
    def positions(self) -> int:
        """n."""
        return self.slots.shape[0]

    @property
    def bags(self) -> int:
        """How many vectors come out."""
        if self.combiner == "none":
            return self.positions
        if self.offsets is not None:
            return self.offsets.shape[0] - 1
        return self.positions // self.fixed

    @property
    def single(self) -> bool:
        """Whether every vector is a row as it lies in its plane, or zeros."""
        return self.combiner == "none" or (
            self.offsets is None and self.fixed == 1 and self.weights is None
        )

    @property
    def divided(self) -> bool:
        """Whether a backward needs what its bags were divided by."""
        return self.combiner in ("mean", "sqrtn") and not self.single


def pool(
    planes: Sequence[Tensor],
    features: Sequence[FeatureSlots],
    dtype: torch.dtype = torch.float32,
    inverses: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:
    """Looks features up: (bags, dim) of `dtype` for each.

    Features of as many bags are columns of one (bags, sum of dims) buffer, in their order.
    Arguments and errors are those of `pool_into`.
    """
    check_features(planes, features)
    columns: dict[int, list[int]] = {}
    for f, feature in enumerate(features):
        columns.setdefault(feature.bags, []).append(f)
    outputs: dict[int, Tensor] = {}
    for bags, members in columns.items():
        dims = [planes[features[f].table].shape[1] for f in members]
        buffer = torch.empty((bags, sum(dims)), dtype=dtype, device=planes[0].device)
        outputs.update(zip(members, buffer.split(dims, 1), strict=True))
    ordered = [outputs[f] for f in range(len(features))]
    pool_into(planes, features, ordered, inverses)
    return ordered


def pool_into(
    planes: Sequence[Tensor],
    features: Sequence[FeatureSlots],
    outputs: Sequence[Tensor],
    inverses: Sequence[Tensor | None] | None = None,
) -> None:
    """Writes the vectors of each feature into `outputs`.

    Args:
        planes: (rows, dim) contiguous float32, float16 or bfloat16, one a table.
        features: their `table` counts in `planes`.
        outputs: (bags, dim) float32, float16 or bfloat16, one a feature; columns of a wider buffer
            will do. Vectors are rounded to nearest even.
        inverses: (bags,) float32 a feature, or None: is given 1 / what a bag was divided by, 0 where
            that is 0. What `reduce` wants of the features that are `divided`.

    Raises:
        InputError: a tensor has another dtype, shape, device or layout than is said here.
    """
    inverses = inverses or [None] * len(features)
    check_features(planes, features)
    for f, (feature, out) in enumerate(zip(features, outputs, strict=True)):
        shape = (feature.bags, planes[feature.table].shape[1])
        if out.shape != shape or out.dtype not in KINDS or out.stride(1) not in (0, 1):
            raise InputError(
                f"pool: output {f} is {out.dtype} {tuple(out.shape)} of stride {out.stride()}. Pass "
                f"float32, float16 or bfloat16 {shape} whose columns lie side by side."
            )
    require_gpu("pool", *planes, *outputs)
    launches: dict[tuple[bool, int, int, int], Launch] = {}
    for feature, out, inverse in zip(features, outputs, inverses, strict=True):
        if out.numel() == 0:
            continue
        plane = planes[feature.table]
        vector = vector_length(plane.shape[1], (plane, out, feature.scratch), 16 // plane.itemsize)
        widths = width_class(plane.itemsize, vector), width_class(out.itemsize, vector)
        shared = feature.single, *widths, vector
        block = _COPY_BLOCK if feature.single else _BAG_BLOCK
        launches.setdefault(shared, Launch()).add(
            _line(plane, feature, out, inverse, vector),
            -(-feature.bags * (plane.shape[1] // vector) // block),
        )
    for shared, group in launches.items():
        lines = upload(group.lines, planes[0].device)
        launch(_variant(*shared), group.most, features=lines)


def check_features(planes: Sequence[Tensor], features: Sequence[FeatureSlots]) -> None:
    """Raises InputError unless planes and features are as `pool_into` says."""
    for t, plane in enumerate(planes):
        if plane.dim() != 2 or plane.dtype not in KINDS or not plane.is_contiguous():
            raise InputError(
                f"plane {t} is {plane.dtype} {tuple(plane.shape)} of stride {plane.stride()}. Pass "
                "contiguous rows of float32, float16 or bfloat16."
            )
    for f, feature in enumerate(features):
        plane = planes[feature.table]
        if feature.combiner not in COMBINERS:
            raise InputError(
                f"feature {f}: combiner {feature.combiner!r} is none of {', '.join(COMBINERS)}."
            )
        if feature.fixed < 1 and feature.offsets is None:
            raise InputError(f"feature {f}: bags of {feature.fixed} positions. Pass offsets.")
        wanted = [
            ("slots", feature.slots, torch.int64, (feature.positions,)),
            ("offsets", feature.offsets, torch.int64, None),
            ("weights", feature.weights, torch.float32, (feature.positions,)),
            ("scratch", feature.scratch, plane.dtype, None),
        ]
        for name, tensor, dtype, shape in wanted:
            if tensor is None:
                continue
            if (
                tensor.dtype != dtype
                or not tensor.is_contiguous()
                or shape not in (None, tensor.shape)
            ):
                raise InputError(
                    f"feature {f}: its {name} are {tensor.dtype} {tuple(tensor.shape)} of stride "
                    f"{tensor.stride()}. Pass contiguous {dtype}{'' if shape is None else shape}."
                )
            if tensor.device != plane.device:
                raise InputError(
                    f"feature {f}: its {name} lie on {tensor.device} and its table on {plane.device}. "
                    "Move them to one device."
                )


def _line(
    plane: Tensor, feature: FeatureSlots, out: Tensor, inverse: Tensor | None, vector: int
) -> list[int]:
    vectors, multiplier = line_split("pool", plane.shape[1], vector)
    return [
        vectors,
        multiplier,
        feature.bags,
        plane.data_ptr(),
        address_of(feature.scratch),
        KINDS[plane.dtype],
        feature.slots.data_ptr(),
        address_of(feature.offsets),
        feature.fixed,
        address_of(feature.weights),
        COMBINERS[feature.combiner],
        NO_SLOT if feature.combiner == "none" else feature.padding_slot,
        out.data_ptr(),
        out.stride(0) * out.itemsize,
        KINDS[out.dtype],
        address_of(inverse),
    ]


def variants() -> list[Variant]:
    """Every variant of the forward."""
    shapes = [(4, 4, 4), (4, 2, 4), (2, 4, 4), (2, 2, 4), (2, 4, 8), (2, 2, 8), (0, 0, 1)]
    return [_variant(single, *shape) for single in (True, False) for shape in shapes]


@cache
def _variant(single: bool, width: int, out_width: int, vector: int) -> Variant:
    constants = {"WIDTH": width, "OUT_WIDTH": out_width, "VECTOR": vector}
    if single:
        constants["BLOCK"] = _COPY_BLOCK
    else:
        constants.update(BLOCK=_BAG_BLOCK, UNROLL=_UNROLL if vector <= 4 else _UNROLL // 2)
    return Variant(
        kernel=pool_copy_kernel if single else pool_bags_kernel,
        types={"features": "*i64"},
        constants=constants,
        aligned=("features",),
    )


# --- Kernels. ---

# The fields of a line, in the order of `_line`.
_VECTORS, _MULTIPLIER, _BAGS, _PLANE, _SCRATCH, _KIND, _SLOTS, _OFFSETS = map(
    tl.constexpr, range(8)
)
_FIXED, _WEIGHTS, _COMBINER, _PADDING, _OUT, _OUT_STRIDE, _OUT_KIND, _INVERSE = map(
    tl.constexpr, range(8, 16)
)
_FIELDS = tl.constexpr(16)
_MEAN, _SQRTN = tl.constexpr(1), tl.constexpr(2)
_NO_SLOT = tl.constexpr(NO_SLOT)


@triton.jit
def slot_taken(slot, padding, scratch):
    """Whether a slot names a row that counts."""
    lowest = tl.where(scratch != 0, _NO_SLOT + 1, 0)
    return (slot >= lowest) & (slot != padding)


@triton.jit
def row_address(plane, scratch, slot, row_bytes):
    """Where the row of a slot begins; below 0 it lies in scratch."""
    return tl.where(slot >= 0, plane + slot * row_bytes, scratch + (-1 - slot) * row_bytes)


@triton.jit
def pool_copy_kernel(
    features,
    WIDTH: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    line = features + tl.program_id(1) * _FIELDS
    vectors = tl.load(line + _VECTORS)
    bag, column = spread(tl.program_id(0).to(tl.int64), vectors, tl.load(line + _MULTIPLIER), BLOCK)
    live = bag < tl.load(line + _BAGS)
    scratch = tl.load(line + _SCRATCH)
    slot = tl.load(at64(tl.load(line + _SLOTS)) + bag, mask=live, other=_NO_SLOT)
    taken = slot_taken(slot, tl.load(line + _PADDING), scratch)
    kind, out_kind = tl.load(line + _KIND), tl.load(line + _OUT_KIND)
    vector_bytes = VECTOR * width_of(kind, WIDTH)
    begin = row_address(tl.load(line + _PLANE), scratch, slot, vectors * vector_bytes)
    values = load_values(begin + column * vector_bytes, kind, taken, WIDTH, VECTOR)
    out = tl.load(line + _OUT) + bag * tl.load(line + _OUT_STRIDE)
    out += column * (VECTOR * width_of(out_kind, OUT_WIDTH))
    store_values(out, values, out_kind, live, OUT_WIDTH, VECTOR)


@triton.jit
def pool_bags_kernel(
    features,
    WIDTH: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    line = features + tl.program_id(1) * _FIELDS
    vectors = tl.load(line + _VECTORS)
    bag, column = spread(tl.program_id(0).to(tl.int64), vectors, tl.load(line + _MULTIPLIER), BLOCK)
    live = bag < tl.load(line + _BAGS)
    plane, scratch = tl.load(line + _PLANE), tl.load(line + _SCRATCH)
    kind, padding = tl.load(line + _KIND), tl.load(line + _PADDING)
    vector_bytes = VECTOR * width_of(kind, WIDTH)
    slots, weights = tl.load(line + _SLOTS), tl.load(line + _WEIGHTS)
    offsets, fixed = tl.load(line + _OFFSETS), tl.load(line + _FIXED)
    jagged = only_if(offsets != 0, live)
    first = tl.load(at64(offsets) + bag, mask=jagged, other=0)
    stop = tl.load(at64(offsets) + bag + 1, mask=jagged, other=0)
    even = only_if(offsets == 0, live)
    first = tl.where(even, bag * fixed, first)
    stop = tl.where(even, bag * fixed + fixed, stop)

    sums = tl.zeros([BLOCK, VECTOR], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for k in range(0, tl.max(stop - first, 0), UNROLL):
        for j in tl.static_range(UNROLL):
            at = first + (k + j)
            slot = tl.load(at64(slots) + at, mask=at < stop, other=_NO_SLOT)
            taken = slot_taken(slot, padding, scratch)
            weight = tl.load(at32(weights) + at, mask=only_if(weights != 0, taken), other=1.0)
            weight = tl.where(taken, weight, 0.0)
            begin = row_address(plane, scratch, slot, vectors * vector_bytes)
            address = begin + column * vector_bytes
            sums += weight[:, None] * load_values(address, kind, taken, WIDTH, VECTOR)
            total += weight
            squares += weight * weight

    combiner = tl.load(line + _COMBINER)
    divisor = tl.where(combiner == _MEAN, total, 1.0)
    divisor = tl.where(combiner == _SQRTN, tl.sqrt_rn(squares), divisor)
    empty = divisor == 0
    divisor = tl.where(empty, 1.0, divisor)
    divisors = tl.broadcast_to(divisor[:, None], [BLOCK, VECTOR])
    values = tl.where(empty[:, None], 0.0, tl.div_rn(sums, divisors))
    out_kind = tl.load(line + _OUT_KIND)
    out = tl.load(line + _OUT) + bag * tl.load(line + _OUT_STRIDE)
    out += column * (VECTOR * width_of(out_kind, OUT_WIDTH))
    store_values(out, values, out_kind, live, OUT_WIDTH, VECTOR)
    inverse = tl.load(line + _INVERSE)
    one = tl.full([BLOCK], 1.0, tl.float32)
    tl.store(
        at32(inverse) + bag,
        tl.where(empty, 0.0, tl.div_rn(one, divisor)),
        mask=only_if(inverse != 0, live & (column == 0)),
    )
