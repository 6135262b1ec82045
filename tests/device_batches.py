"""Random planes and features for the sparse GPU kernels, and what they should compute, naively."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from devices import DEVICE
from torch import Tensor

NO_SLOT = -(2**63)


def planes(specs: Sequence[tuple[int, int, torch.dtype]], seed: int = 0) -> list[Tensor]:
    """(rows, dim, dtype) each."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(rows, dim, generator=generator).to(dtype).to(DEVICE)
        for rows, dim, dtype in specs
    ]


def random_feature(
    planes: Sequence[Tensor],
    table: int,
    bags: int,
    combiner: str,
    *,
    fixed: int = 0,
    weighted: bool = False,
    padding: bool = False,
    scratch: int = 0,
    hot: float = 0.0,
    seed: int = 0,
) -> Any:
    """A FeatureSlots: jagged where `fixed` is 0; a share `hot` of the positions takes one slot."""
    from hotbed.ops.gpu.pool import FeatureSlots

    generator = torch.Generator().manual_seed(seed)
    rows, dim = planes[table].shape
    offsets = None
    if fixed:
        n = bags * fixed
    else:
        lengths = torch.randint(0, 6, (bags,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        n = int(offsets[-1])
    slots = torch.randint(0, max(rows, 1), (n,), generator=generator)
    slots[torch.rand(n, generator=generator) < hot] = rows // 2
    extra: dict[str, Any] = {}
    if padding:
        slots[torch.rand(n, generator=generator) < 0.2] = NO_SLOT
        extra["padding_slot"] = 1
    if scratch:
        missing = torch.rand(n, generator=generator) < 0.3
        names = -1 - torch.randint(0, scratch, (n,), generator=generator)
        slots = torch.where(missing & (slots >= 0), names, slots)
        drawn = torch.randn(scratch, dim, generator=generator)
        extra["scratch"] = drawn.to(planes[table].dtype).to(DEVICE)
    if weighted:
        extra["weights"] = (torch.rand(n, generator=generator) + 0.1).to(DEVICE)
    return FeatureSlots(
        table=table,
        slots=slots.to(DEVICE),
        combiner=combiner,
        offsets=None if offsets is None else offsets.to(DEVICE),
        fixed=fixed or 1,
        **extra,
    )


def positions_of(feature: Any) -> list[list[int]]:
    """The positions of each of its vectors, padding left out (combiner none: one, or none, each)."""
    slots = feature.slots.tolist()

    def counts(slot: int) -> bool:
        if slot < 0 and (feature.scratch is None or slot == NO_SLOT):
            return False
        return feature.combiner == "none" or slot != feature.padding_slot

    if feature.combiner == "none":
        edges = list(range(len(slots) + 1))
    elif feature.offsets is not None:
        edges = feature.offsets.tolist()
    else:
        edges = list(range(0, len(slots) + 1, feature.fixed))
    return [
        [p for p in range(begin, end) if counts(slots[p])]
        for begin, end in zip(edges[:-1], edges[1:], strict=True)
    ]


def row_of(planes: Sequence[Tensor], feature: Any, position: int) -> Tensor:
    """The row that a position reads, in float64."""
    slot = int(feature.slots[position])
    rows = planes[feature.table] if slot >= 0 else feature.scratch
    return rows[slot if slot >= 0 else -1 - slot].double().cpu()


def divisor_of(feature: Any, positions: Sequence[int]) -> float:
    """What the sum of a bag is divided by; 0 for a bag that gives zeros."""
    weights = [1.0 if feature.weights is None else float(feature.weights[p]) for p in positions]
    if feature.combiner == "mean":
        return sum(weights)
    if feature.combiner == "sqrtn":
        return float(sum(w * w for w in weights)) ** 0.5
    return 1.0


def pooled(planes: Sequence[Tensor], feature: Any) -> Tensor:
    """(bags, dim) float64: the definition."""
    dim = planes[feature.table].shape[1]
    out = torch.zeros(feature.bags, dim, dtype=torch.float64)
    for bag, positions in enumerate(positions_of(feature)):
        for p in positions:
            weighted = feature.weights is not None and feature.combiner != "none"
            weight = float(feature.weights[p]) if weighted else 1.0
            out[bag] += weight * row_of(planes, feature, p)
        divisor = divisor_of(feature, positions)
        out[bag] = out[bag] / divisor if divisor else 0.0
    return out


def gradient_rows(
    planes: Sequence[Tensor], features: Sequence[Any], grads: Sequence[Tensor | None]
) -> list[dict[int, Tensor]]:
    """For each table, the float64 gradient row of each slot in use: the definition."""
    found: list[dict[int, Tensor]] = [{} for _ in planes]
    for feature, grad in zip(features, grads, strict=True):
        for bag, positions in enumerate(positions_of(feature)):
            divisor = divisor_of(feature, positions)
            for p in positions:
                slot = int(feature.slots[p])
                if slot < 0 or slot == feature.padding_slot:
                    continue
                weighted = feature.weights is not None and feature.combiner != "none"
                scale = float(feature.weights[p]) if weighted else 1.0
                scale = scale / divisor if divisor else 0.0
                row = found[feature.table].setdefault(
                    slot, torch.zeros(planes[feature.table].shape[1], dtype=torch.float64)
                )
                if grad is not None:
                    row += scale * grad[bag].double().cpu()
    return found
