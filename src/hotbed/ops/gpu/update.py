"""Optimizer steps over the slots of a batch: planes of weights and states in, the same planes out.

Twin of csrc/rules/update.cpp: every rule and option, with the bits of the core (of `ftrl` with a power
other than -1/2, whose logarithm is the card's, to a last bit). Weights are float32, or float16 and
bfloat16 rounded stochastically; states are float32. The gradient rows come from memory, or are
summed on the way from the batch's terms ("fused"), which saves writing and reading them.

A step is taken or not as one: a kernel before may have set `apply` to 0 on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from hotbed import _core
from hotbed.errors import InputError
from hotbed.ops.gpu.rows import (
    KINDS,
    Launch,
    address_of,
    double_bits,
    line_split,
    programs,
    upload,
    vector_length,
    width_class,
)
from hotbed.ops.gpu.rules import COLUMN_RULES, NUMBERS, ROW_RULES, numbers_of, rule_of
from hotbed.ops.gpu.terms import Terms
from hotbed.ops.gpu.update_kernels import row_rates_kernel, update_kernel
from hotbed.ops.gpu.variants import Variant, launch, require_gpu

__all__ = ["DevicePlanes", "Launched", "RowsToUpdate", "renumber", "update", "variants"]

_BLOCK = 128  # vectors a program updates at a time
_UNROLL = 4
_ROWS, _COLUMNS = 16, 16  # of a row rule: columns as the core adds them, 16 running sums a row


@dataclass(frozen=True, kw_only=True)
class DevicePlanes:
    """The planes of a table on the device, and how its rows are rounded.

    Args:
        weights: (rows, dim) contiguous float32, float16 or bfloat16.
        states: float32, contiguous, (rows, dim) or (rows, 1), in the order of `_core.state_planes`.
        ids: (rows,) int64, the id of every slot; None: it is the slot. For rounding.
        last_step: (rows,) int64, set to the step for rows that are updated; or None.
        key: the table's key, of 64 bits.
    """

    weights: Tensor
    states: Sequence[Tensor] = ()
    ids: Tensor | None = None
    last_step: Tensor | None = None
    key: int = 0


@dataclass(frozen=True, kw_only=True)
class RowsToUpdate:
    """One table's share of a step.

    Args:
        planes: of the table.
        options, hyper, step: of the rule; `step` counts from 1.
        table: which of the tables of `terms`, if the gradient is summed on the way.
        slots: (n,) int64, each at most once.
        grads: (n, dim) float32, contiguous; None: they are the sums of `terms`.
        bounds: (2,) int64 on the device: slots[bounds[0]] is the first to update, bounds[1] is one
            behind the last, and grads[0] belongs to the first. None: all.
    """

    planes: DevicePlanes
    options: _core.RuleOptions
    hyper: _core.Hyperparameters
    step: int
    table: int = 0
    slots: Tensor
    grads: Tensor | None = None
    bounds: Tensor | None = None

    @classmethod
    def of_index(
        cls,
        terms: Terms,
        table: int,
        planes: DevicePlanes,
        options: _core.RuleOptions,
        hyper: _core.Hyperparameters,
        step: int,
        grads: Tensor | None = None,
    ) -> RowsToUpdate:
        """The slots of a table of a batch; `grads` as `reduce` gives them, or None: fused."""
        starts = terms.index.table_starts
        return cls(
            planes=planes,
            options=options,
            hyper=hyper,
            step=step,
            table=table,
            slots=terms.index.slots,
            grads=grads,
            bounds=starts[table : table + 2],
        )


@dataclass(frozen=True, kw_only=True)
class Launched:
    """The lines of one launch of `update`, a line a share."""

    lines: Tensor
    rule: str
    shares: tuple[RowsToUpdate, ...]


def update(
    tables: Sequence[RowsToUpdate], terms: Terms | None = None, apply: Tensor | None = None
) -> list[Launched]:
    """Takes one step of all tables, one launch for those of one rule, width of weights and vectors.

    Returns the lines of each launch, for `renumber`.

    Args:
        tables: each table at most once.
        terms: of the batch, after `sum_chunks`, where the gradient of some table is fused.
        apply: (1,) int32; where it is 0 nothing is changed.

    Raises:
        InputError: a tensor has another dtype, shape, device or layout than is said, or the gradient
            of a row rule is fused: its first sum is over whole rows.
    """
    launches: dict[tuple[str, int, int], Launch] = {}
    members: dict[tuple[str, int, int], list[RowsToUpdate]] = {}
    row_launches: dict[tuple[str, int, int], Launch] = {}
    kept: list[Tensor] = []  # what lines point into
    for share in tables:
        rule = rule_of(share.options, share.hyper)
        most = _check(share, rule, terms)
        weights = share.planes.weights
        if most == 0 or weights.numel() == 0:
            continue
        dim = weights.shape[1]
        wide = [s for s in share.planes.states if s.shape[1] == dim]
        vector = vector_length(dim, [weights, share.grads, *wide])
        if share.grads is None and terms is not None:
            vector = min(vector, terms.vectors[share.table])
        bounds = share.bounds
        if bounds is None:
            (bounds,) = upload([[0, most]], weights.device)
            kept.append(bounds)
        shared = rule, width_class(weights.itemsize, vector), vector
        rates = None
        if rule in ROW_RULES:
            rates = torch.empty(most, device=weights.device)
            kept.append(rates)
        line = _line(share, rule, vector, bounds, rates, apply)
        if rates is not None:
            row_launches.setdefault(shared, Launch()).add(line, -(-most // _ROWS))
        blocks = -(-most * (dim // vector) // _BLOCK)
        launches.setdefault(shared, Launch()).add(line, blocks)
        members.setdefault(shared, []).append(share)
    if not launches:
        return []
    device = tables[0].planes.weights.device
    launched = []
    for shared, group in launches.items():
        lines = upload(group.lines, device)
        launched.append(Launched(lines=lines, rule=shared[0], shares=tuple(members[shared])))
        rows = row_launches.get(shared)
        if rows is not None:
            grid = programs(rows.blocks, device), len(group.lines)
            launch(_rates_variant(*shared), grid, lines=lines)
        launch(
            _update_variant(*shared),
            (programs(group.blocks, device), len(group.lines)),
            lines=lines,
            header=lines if terms is None else terms.header,
        )
    return launched


def renumber(
    launched: Launched,
    steps: Sequence[tuple[_core.RuleOptions, _core.Hyperparameters, int]],
) -> bool:
    """Gives the lines of a recorded launch the numbers of another step, one of each share.

    False, with nothing written: these numbers take another kernel.
    """
    if any(rule_of(options, hyper) != launched.rule for options, hyper, _ in steps):
        return False
    numbers = [_numbers(*step) for step in steps]
    launched.lines[:, -len(numbers[0]) :].copy_(upload(numbers, launched.lines.device))
    return True


def _check(share: RowsToUpdate, rule: str, terms: Terms | None) -> int:
    """The most rows that the share may have."""
    weights, grads = share.planes.weights, share.grads
    rows, dim = weights.shape
    planes = _core.state_planes(share.options)
    wanted: list[tuple[str, Tensor, torch.dtype, tuple[int, ...]]] = [
        (
            "weights",
            weights,
            weights.dtype if weights.dtype in KINDS else torch.float32,
            (rows, dim),
        )
    ]
    if len(share.planes.states) != len(planes):
        raise InputError(
            f"update: the rule {share.options.rule.name} has the states "
            f"{', '.join(p[0] for p in planes) or 'none'}, and {len(share.planes.states)} were given."
        )
    for state, (name, one, _) in zip(share.planes.states, planes, strict=True):
        wanted.append((f"state {name}", state, torch.float32, (rows, 1 if one else dim)))
    for name, plane in (("ids", share.planes.ids), ("last_step", share.planes.last_step)):
        if plane is not None:
            wanted.append((name, plane, torch.int64, (rows,)))
    wanted.append(("slots", share.slots, torch.int64, tuple(share.slots.shape)))
    if share.bounds is not None:
        wanted.append(("bounds", share.bounds, torch.int64, (2,)))
    most = share.slots.shape[0]
    if grads is not None:
        most = grads.shape[0]
        wanted.append(("gradient", grads, torch.float32, (most, dim)))
    elif terms is None or rule in ROW_RULES:
        raise InputError(
            f"update: the rule {rule} needs gradient rows. Pass grads, as reduce gives them."
        )
    else:
        most = terms.index.table_positions[share.table]
    for name, tensor, dtype, shape in wanted:
        if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise InputError(
                f"update: the {name} are {tensor.dtype} {tuple(tensor.shape)} of stride "
                f"{tensor.stride()}. Pass contiguous {dtype} {shape}."
            )
    require_gpu("update", *(tensor for _, tensor, _, _ in wanted))
    return most


def _line(
    share: RowsToUpdate,
    rule: str,
    vector: int,
    bounds: Tensor,
    rates: Tensor | None,
    apply: Tensor | None,
) -> list[int]:
    planes = share.planes
    # A row rule moves its one value a row first; what is left are states of whole rows.
    wide, narrow = list(planes.states), []
    if rule in ROW_RULES:
        wide, narrow = wide[: COLUMN_RULES[rule]], wide[COLUMN_RULES[rule] :]
    key = planes.key if planes.key < 2**63 else planes.key - 2**64
    return [
        *line_split("update", planes.weights.shape[1], vector),
        planes.weights.data_ptr(),
        KINDS[planes.weights.dtype],
        *_padded([address_of(state) for state in wide], 3),
        *_padded([address_of(state) for state in narrow], 2),
        share.slots.data_ptr(),
        bounds.data_ptr(),
        address_of(share.grads),
        address_of(rates),
        address_of(apply),
        address_of(planes.ids),
        address_of(planes.last_step),
        key,
        *_numbers(share.options, share.hyper, share.step),
    ]


def _numbers(options: _core.RuleOptions, hyper: _core.Hyperparameters, step: int) -> list[int]:
    """The end of a line: what differs from step to step."""
    numbers = [double_bits(number) for number in numbers_of(options, hyper, step)]
    return [step, *_padded(numbers, NUMBERS)]


def _padded(values: list[int], length: int) -> list[int]:
    return values + [0] * (length - len(values))


def variants() -> list[Variant]:
    """Every variant of an update."""
    shapes = [(4, 4), (2, 4), (0, 1)]
    updates = [_update_variant(rule, *shape) for rule in COLUMN_RULES for shape in shapes]
    rates = [_rates_variant(rule, *shape) for rule in ROW_RULES for shape in shapes]
    return [*updates, *rates]


@cache
def _update_variant(rule: str, width: int, vector: int) -> Variant:
    return Variant(
        kernel=update_kernel,
        types={"lines": "*i64", "header": "*i64"},
        constants={
            "RULE": rule,
            "STATES": COLUMN_RULES[rule],
            "RATED": rule in ROW_RULES,
            "WIDTH": width,
            "VECTOR": vector,
            "BLOCK": _BLOCK,
            "UNROLL": _UNROLL if vector > 1 else _UNROLL // 2,
        },
    )


@cache
def _rates_variant(rule: str, width: int, vector: int) -> Variant:
    return Variant(
        kernel=row_rates_kernel,
        types={"lines": "*i64"},
        constants={
            "RULE": rule,
            "WIDTH": width,
            "VECTOR": vector,
            "ROWS": _ROWS,
            "COLUMNS": _COLUMNS,
        },
    )
