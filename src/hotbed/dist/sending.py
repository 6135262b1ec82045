"""Messages that the core writes and reads, sent as codecs encode them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from hotbed.dist.beside import Beside
from hotbed.dist.errors import LocalFault
from hotbed.dist.layout import Layout
from hotbed.dist.machines import Within, of_all
from hotbed.dist.ranks import Ranks
from hotbed.dist.raw import Messenger
from hotbed.dist.row_codecs.travel import Travel

__all__ = [
    "RowsComing",
    "addresses",
    "among",
    "begin_rows",
    "send_gradients",
    "send_rows",
    "send_written",
]

_Sizes = tuple[list[int], list[int]]
"""Bytes of the messages to each rank, and from it."""
_Counts = Callable[[int, int], int]
"""Rows of a requester and a shard."""
_Writes = Callable[[list[Tensor]], None]
"""Writes the messages to each rank to this memory, as the core has them."""


def among(layout: Layout, messenger: Messenger, *, tells_all: bool = False) -> Messenger:
    """Return what sends messages among the ranks of a layout. `tells_all`: all ranks raise a fault; else it
    may be these alone, and they raise it on all in a later exchange."""
    if layout.members is None:
        return messenger
    return Within(messenger, layout.members, layout.suffix, tells_all=tells_all)


def send_rows(
    ranks: Ranks,
    what: str,
    layout: Layout,
    counts: _Counts,
    in_core: _Sizes,
    write: _Writes,
) -> list[Tensor]:
    """Send rows, or vectors, to those who ask for them. Return what came, as the core reads it. Called by all
    ranks. An error on one is raised on all.

    Args:
        what: travels, ``"rows"`` as they are stored or ``"vectors"``.
        in_core: as the core has them.
    """
    if layout.stored[0] and not layout.can_fail:
        return send_written(among(layout, ranks), what, in_core, write)
    travel = Travel(layout, layout.row_codecs, counts, stored=what == "rows")
    received: list[Tensor] = []
    fault: Exception | None = None
    messages = _send_encoded(among(layout, ranks), what, travel, in_core, write)
    try:
        received = travel.decode(messages, in_core[1])
    except Exception as error:
        fault = error
    if layout.can_fail:  # the others would go on to a forward, whose batch this rank does not keep
        ranks.vote("a lookup", fault=fault)
    elif fault is not None:
        raise fault
    return received


class RowsComing(NamedTuple):
    """Rows on their way."""

    wait: Callable[[], list[Tensor]]
    """Returns the messages that come."""
    decode: Callable[[list[Tensor]], list[Tensor]]
    """Returns them as the core reads them."""


def begin_rows(
    beside: Beside, layout: Layout, counts: _Counts, in_core: _Sizes, write: _Writes
) -> RowsComing:
    """Begin to do as `send_rows`, with rows as they are stored. Called by all ranks.

    Raises:
        Exception: of `write` or a codec, on this rank alone; what the others get says nothing.
    """
    travel = Travel(layout, layout.row_codecs, counts, stored=True)
    as_stored, (outgoing, coming) = layout.stored[0], in_core
    if not as_stored:
        outgoing, coming = travel.sizes(sent=True), travel.sizes(sent=False)
    members, fault = layout.members or range(beside.size), None
    every = beside.reserve(of_all(outgoing, members, beside.size))
    messages = [every[member] for member in members]
    try:
        buffers = messages if as_stored else travel.buffers(in_core[0])
        write(buffers)
        if not as_stored:
            travel.encode(buffers, messages)
    except Exception as error:
        fault = error
    end = beside.begin(of_all(coming, members, beside.size))
    if fault is not None:
        raise fault

    def wait() -> list[Tensor]:
        received = end()
        return [received[member] for member in members]

    return RowsComing(wait, lambda came: came if as_stored else travel.decode(came, in_core[1]))


def send_gradients(
    ranks: Messenger,
    layout: Layout,
    counts: _Counts,
    of_tables: tuple[Sequence[bool], Sequence[int]],
    in_core: _Sizes,
    write: _Writes,
) -> list[Tensor]:
    """Send gradients to the owners of their rows, and return the messages that came, as the core reads them.
    Called by all ranks.

    Args:
        of_tables: `chosen` and `seeds`, as of `KeptLookup.give`, of each of the core's tables.
        in_core: as the core has them.

    Raises:
        Exception: codecs could not encode them here, and all ranks raise; or they could not decode what came,
            which this rank alone knows.
    """
    if layout.stored[1]:
        return send_written(among(layout, ranks), "gradients", in_core, write)
    travel = Travel(layout, layout.gradient_codecs, counts, True, False, *of_tables)
    messages = _send_encoded(among(layout, ranks), "gradients", travel, in_core, write)
    return travel.decode(messages, in_core[1])


def _send_encoded(
    ranks: Messenger,
    what: str,
    travel: Travel,
    in_core: _Sizes,
    write: _Writes,
) -> list[Tensor]:
    """Return the messages that came, not yet decoded. An error before they are sent goes along as a fault, so
    that all ranks raise."""
    outgoing, coming = in_core
    fault: Exception | None = None
    try:
        sizes = travel.sizes(sent=True)
        coming = travel.sizes(sent=False)
    except Exception as error:  # on all ranks, as sizes depend on nothing else
        sizes, coming, fault = *in_core, error

    def encode(messages: list[Tensor]) -> None:
        buffers = travel.buffers(outgoing)
        write(buffers)
        travel.encode(buffers, messages)

    return send_written(ranks, what, (sizes, coming), encode, fault)


def send_written(
    ranks: Messenger,
    what: str,
    sizes: tuple[list[int], list[int]],
    write: Callable[[list[Tensor]], None],
    fault: Exception | None = None,
) -> list[Tensor]:
    """Send what `write` writes to this memory, and return the messages that came. An error of it, or `fault`,
    goes along, so that all ranks raise. So do all where `write` raises a LocalFault, whose rank sends it.

    Args:
        sizes: bytes of the messages to each rank, and from it.
    """
    outgoing, coming = sizes
    messages = ranks.reserve(outgoing)
    try:
        if fault is None:
            write(messages)
    except LocalFault:
        pass
    except Exception as error:
        fault = error
    return ranks.send(what, coming, fault)


def addresses(messages: Sequence[Tensor]) -> list[int]:
    """Return where they are, for the core."""
    return list(map(Tensor.data_ptr, messages))
