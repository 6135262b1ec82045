"""The handshake that opens an exchange: what ranks do together, and the values that each sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from hotbed.dist.declarations import Declaration, differences
from hotbed.dist.errors import LocalFault, PeerError, mark_known_to_all
from hotbed.dist.exchanged_values import KeptLookup
from hotbed.dist.waiting import AtOwners

__all__ = [
    "BY_ENDED",
    "BY_HOSTS",
    "CLOSE",
    "ENDED",
    "KINDS",
    "MERGE",
    "Handshake",
    "advice",
    "exchange_in_words",
    "raise_fault",
    "refuse_absent",
    "refuse_other_tables",
    "refuse_others",
    "refuse_sizes",
]

ENDED = "nothing any more"
MERGE = "a merge of gradients"
CLOSE = "the end of the work of memory hosts"
BY_ENDED = (
    ENDED,
    "the end",
    "a lookup",
    "a step",
    "a sum of gradients",
    "a norm of gradients",
    "a change of gradients",
    MERGE,
    "a lookup of rows",
    "a look for infinities",
)
"""What ranks do together in which a rank takes part that has no batches any more,"""
BY_HOSTS = (
    "dense states",
    "an assignment",
    "a deletion of rows",
    "a search for ids",
    "a count of rows",
    "a copy of rows",
    "a checkpoint",
    "figures",
    CLOSE,
)
"""and in which memory hosts do, too."""
FORWARD = "a forward"
KINDS = (*BY_ENDED, *BY_HOSTS, "a distribution", "a reset of rows", "a load of rows", FORWARD)

_TEXT = 2000
"""Bytes of a fault's text."""
_MOST_NAMES = 3
"""Tables that are named."""

_SAME_ORDER = (
    "All ranks must look up and step the same tables in the same order; loaders of other lengths end "
    "together with hotbed.dist.even(loader)."
)
_ADVICE = {
    "a copy of rows": "rows() and state_dict() of a distributed model, and of its optimizer, are called by "
    "all ranks: take them out of `if rank == 0`, or save with hotbed.save(path, model, optimizer, step=n), "
    "which all ranks call, too.",
    "a checkpoint": "hotbed.save() and hotbed.load() are called by all ranks, which write and read together: "
    "take them out of `if rank == 0`.",
    "a count of rows": "count() is called by all ranks, or with local=True.",
    "a lookup of rows": "lookup() is called by all ranks, or with local=True.",
    "an assignment": "assign() is called by all ranks, or with local=True.",
    "a load of rows": "load_state_dict() is called by all ranks, with the same state_dict.",
    "a reset of rows": "reset_parameters() of a distributed layer is called by all ranks.",
    "a deletion of rows": "erase() is called by all ranks, or with local=True.",
}
"""By kinds of exchange, that goes first of which is named first."""


class Handshake(NamedTuple):
    """Exchange that all ranks agree on."""

    kind: str
    tables: tuple[int, ...]
    """Numbers of the tables concerned."""
    values: Tensor
    """(ranks, n) int64: what each says beside it; of a rank that has ended, zeros."""
    ended: list[bool]
    """Which ranks have no batches any more, or never have one, as they are memory hosts."""
    waiting: list[KeptLookup]
    """Lookups that waited when it was opened, which `Ranks.waiting` may have let go since."""
    declared: int
    """Digest of what those with batches declare; 0: nothing."""
    clipped: dict[int, list[AtOwners]]
    """By number of a table with a gradient at its owners what each rank with batches says of it."""
    holds_back: bool
    """True if a memory host holds back rows of the next batch, and those that it has sent ahead."""


def exchange_in_words(kind: str, sequence: int, names: Sequence[str] | int) -> str:
    """Return in words what an opening message is for.

    Args:
        names: of the tables concerned, or how many they are.
    """
    tables = f" of {names} tables" if names else ""
    if not isinstance(names, int):
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        named = ", ".join(map(repr, names[:_MOST_NAMES]))
        tables = f" of table{'s' * (len(names) > 1)} {named}{more}" if names else ""
    return f"{kind}{tables} (exchange {sequence})"


def advice(kinds: Sequence[str]) -> str:
    """Return the remedy for ranks that are in different kinds of exchange, or for one that is alone."""
    return next((_ADVICE[kind] for kind in _ADVICE if kind in kinds), _SAME_ORDER)


def refuse_others(
    said: Mapping[int, tuple[int, int, int, int]],
    mine: int,
    names: Mapping[int, Sequence[str] | int],
    declared: Declaration | None,
    gather: Callable[[Tensor], Tensor],
) -> NoReturn:
    """Raises where ranks are out of step, or declare something else. Called by all ranks.

    Args:
        said: of each rank that has batches (kind, sequence, digest of what it declares, count of values).
        mine: that of this rank, or of one that speaks for it.
        names: of tables, for `exchange_in_words`.
        declared: what this rank declares; None: nothing.
        gather: as `Ranks` gathers integers.

    Raises:
        PeerError, HotbedError: always.
    """
    calls = {rank: one[:2] for rank, one in said.items()}
    if len(set(calls.values())) == 1 and len({digest for _, _, digest, _ in said.values()}) > 1:
        texts = _texts("" if declared is None else declared.text, gather)
        of_ranks = {rank: texts[rank] for rank in said}
        error = PeerError(differences(of_ranks)) if declared is None else declared.refusal(of_ranks)
        mark_known_to_all(error)
        raise error
    other = next(rank for rank in said if said[rank] != said[mine])
    at, here = (
        exchange_in_words(KINDS[said[rank][0]], said[rank][1], names[rank])
        for rank in (other, mine)
    )
    if at == here:
        at, here = (
            f"{text} with {said[rank][3]} values" for text, rank in ((at, other), (here, mine))
        )
    advised = advice([KINDS[said[rank][0]] for rank in (other, mine)])
    raise PeerError(f"Rank {other} is at {at} while rank {mine} is at {here}. {advised}")


def _texts(own: str, gather: Callable[[Tensor], Tensor]) -> list[str]:
    """One of each rank."""
    raw = own.encode()
    sizes = gather(torch.tensor([len(raw)], device="cpu")).flatten().tolist()
    every = gather(
        torch.tensor(list(raw.ljust(max(sizes), b"\0")), dtype=torch.uint8, device="cpu")
    )
    return [bytes(some[:n].tolist()).decode() for some, n in zip(every, sizes, strict=True)]


def refuse_absent(kind: str, ended: Sequence[bool], hosts: Sequence[int]) -> None:
    """Raise PeerError where a rank that has ended, or a memory host, takes no part in a kind of exchange."""
    if kind in BY_ENDED:
        return
    left = [rank for rank, has in enumerate(ended) if has and rank not in hosts]
    if left:
        raise PeerError(
            f"Rank {left[0]} has no batches any more and waits in Join, where it cannot take part in {kind}. "
            "Do that when all have left Join."
        )
    if any(ended) and kind not in BY_HOSTS:
        raise PeerError(
            f"Rank {hosts[0]} is a memory host, which takes no part in {kind}. Read it "
            "from a checkpoint with hotbed.load(), or do it before hotbed.distribute."
        )


def refuse_other_tables(
    tables: Sequence[tuple[int, ...]], ended: Sequence[bool], speaks: int
) -> None:
    """Raise PeerError where a rank that has batches asks for other tables than the rank `speaks`."""
    for rank, other in enumerate(tables):
        if not ended[rank] and other != tables[speaks]:
            raise PeerError(
                f"Rank {rank} asks for other tables than rank {speaks}. All ranks must look up and step "
                "the same tables in the same order."
            )


def raise_fault(
    faults: Sequence[int],
    own: BaseException | None,
    gather: Callable[[Tensor], Tensor],
    size: int,
) -> NoReturn:
    """Raises the fault of a rank on all. Called by all ranks, or by those alone that have heard of it.

    Args:
        faults: 1 for each rank that has one; of fewer than `size` ranks where the others have heard nothing.
        own: of this one.
        gather: as `Ranks` gathers integers.

    Raises:
        LocalFault: another rank has it, and not all have heard of it.
        PeerError: another rank has it, and this one has none.
        BaseException: `own`.
    """
    if len(faults) < size:
        raise own or LocalFault("A rank of this machine could not go on.")
    reported = gather(_as_text(own))
    if own is not None:
        mark_known_to_all(own)
        raise own
    rank = faults.index(1)
    text = bytes(reported[rank].tolist()).rstrip(b"\0").decode(errors="replace")
    error = PeerError(f"Rank {rank} could not go on: {text}")
    mark_known_to_all(error)
    raise error


def refuse_sizes(what: str, messages: Sequence[Tensor], sizes: Sequence[int]) -> None:
    """Raise PeerError where a message that came from a rank is not as long as it was to be."""
    for rank, (message, size) in enumerate(zip(messages, sizes, strict=True)):
        if len(message) != size:
            raise PeerError(
                f"Rank {rank} sent {len(message)} bytes of {what} where it had announced {size}."
            )


def _as_text(error: BaseException | None) -> Tensor:
    """(n,) uint8 of what an error says, and of None; as long for all."""
    raw = (
        b""
        if error is None
        else f"{type(error).__name__}: {error}".encode(errors="backslashreplace")
    )
    return torch.tensor(list(raw[:_TEXT].ljust(_TEXT, b"\0")), dtype=torch.uint8, device="cpu")
