"""Values that all ranks exchange beside tables: any that `codec` encodes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hotbed import _core
from hotbed.dist.codec import MessageError, decode, encode
from hotbed.dist.errors import PeerError

__all__ = ["all_values"]

_SMALL = 1 << 16
"""Bytes for which there is memory anyway."""


def all_values(ranks: Any, kind: str, value: Any) -> list[Any]:
    """Return the value of each rank. Called by all ranks.

    Args:
        kind: of `opening.KINDS`, for errors.
        value: of the types that `encode` takes.

    Raises:
        MessageError: `value` is of another type.
        PeerError: what another rank sends is larger than free memory, or no message.
    """
    with ranks.telling(kind):
        pieces = encode(value)
    sizes = ranks.agree(kind, [sum(map(len, pieces))]).numbers[:, 0].tolist()
    free = max(_SMALL, _core.available_memory())
    for rank, size in enumerate(sizes):
        if not 0 <= size <= free:
            raise PeerError(
                f"Rank {rank} announces {size:,} bytes for {kind}, and {free:,} are free here."
            )
    received = ranks.exchange(kind, [pieces] * ranks.size, sizes)
    return [_decoded(kind, rank, message) for rank, message in enumerate(received)]


def _decoded(kind: str, rank: int, message: Tensor) -> Any:
    try:
        return decode(message)
    except MessageError as error:
        raise PeerError(f"Rank {rank} sent no readable message for {kind}: {error}") from None
