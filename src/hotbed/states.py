"""Optimizer states of a table by id: copied out, put back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hotbed import _core
from hotbed.errors import OptimizerError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hotbed.handles import LiveTable

__all__ = ["copy_states", "write_states", "reset_states"]


def _order(live: LiveTable) -> tuple[Tensor, Tensor]:
    """(ids rising, their slots)."""
    ids = live.ids()
    if live.spec.rows is not None:
        return ids, ids
    ids, slots = ids.sort()
    return ids, slots


def copy_states(live: LiveTable) -> dict[str, Tensor]:
    """``{"ids": (rows,) rising, state: (rows, dim or 1), ...}`` as of the last step.

    Raises:
        OptimizerError: the copy would not fit in memory.
    """
    rule = live.rule
    states = [_core.state(live.core, k) for k in range(len(live.core.state_names))]
    needed = sum(s.numel() * s.element_size() for s in states) + 16 * len(live)
    free = _core.available_memory()
    if needed > free:
        raise OptimizerError(
            f"Table {live.name!r}: a state_dict would copy {needed} bytes of optimizer state and "
            f"{free} are free; it is meant for tables that fit twice in memory."
        )
    ids, slots = _order(live)
    copies = [torch.empty_like(s) for s in states]
    rule.read(slots.data_ptr(), len(slots), 0, [c.data_ptr() for c in copies])
    return {"ids": ids.clone(), **dict(zip(live.core.state_names, copies, strict=True))}


def reset_states(live: LiveTable) -> None:
    """Gives all rows the first values of their states."""
    options, initial = live.rule.options, live.rule.initial_accumulator_value
    for k, (_, _, first) in enumerate(_core.state_planes(options, initial)):
        _core.state(live.core, k).fill_(first)


def check_states(live: LiveTable, states: Mapping[str, Any]) -> None:
    """Raises OptimizerError unless write_states() can take them."""
    wanted = live.core.state_names
    ids = states.get("ids")
    absent = [name for name in ("ids", *wanted) if not isinstance(states.get(name), Tensor)]
    if absent or ids is None:
        raise OptimizerError(
            f"Table {live.name!r}: the loaded optimizer state lacks {', '.join(absent)}; it has "
            f"{', '.join(map(str, states)) or 'nothing'}. It comes from another kind of optimizer, or "
            "from another option such as amsgrad or momentum."
        )
    for k, name in enumerate(wanted):
        shape = (len(ids), _core.state(live.core, k).shape[1])
        if tuple(states[name].shape) != shape:
            raise OptimizerError(
                f"Table {live.name!r}: the loaded state {name} has shape "
                f"{tuple(states[name].shape)}, expected {shape}."
            )
    if live.spec.rows is not None and len(ids):
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= live.spec.rows:
            raise OptimizerError(
                f"Table {live.name!r}: the loaded optimizer state has id "
                f"{low if low < 0 else high}, which is outside [0, {live.spec.rows})."
            )


def write_states(live: LiveTable, states: Mapping[str, Tensor], *, insert: bool) -> None:
    """Puts states back by id. Ids without a row get one if `insert`, else they are left out."""
    ids = states["ids"].to(torch.int64).contiguous()
    slots = torch.empty_like(ids)
    find = live.core.find_or_insert if insert else live.core.find
    find(ids.data_ptr(), len(ids), slots.data_ptr())
    kept = slots >= 0
    everything = bool(kept.all())
    values = []
    for name in live.core.state_names:
        state = states[name].to(live.spec.compute_dtype)
        values.append((state if everything else state[kept]).contiguous())
    if not everything:
        slots = slots[kept]
    live.rule.write_states(slots.data_ptr(), len(slots), [v.data_ptr() for v in values])
