"""Values between ranks, beside tables: JSON, and tensors behind it. Decoding runs no code of the sender.

A message is the number of JSON bytes (int64, little-endian), the JSON in UTF-8, and the bytes of each tensor;
each begins at a multiple of 8. What JSON lacks is an object with one entry that names its kind:
``{"dict": {...}}``, ``{"tuple": [...]}``, ``{"bytes": "<hex>"}``, ``{"tensor": ["float32", [2, 3]]}``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from hotbed import _core
from hotbed.dist.errors import PeerError
from hotbed.dist.handshake import Handshake
from hotbed.dist.raw import WORD, Messenger, bytes_of, exchange, rounded
from hotbed.errors import HotbedError

__all__ = [
    "MOST_DEPTH",
    "MOST_JSON",
    "MessageError",
    "all_values",
    "decode",
    "encode",
    "serve_values",
]

MOST_DEPTH = 32
"""Containers inside each other."""
MOST_JSON = 1 << 28
"""Bytes of JSON in a message."""
_SMALL = 1 << 16
"""Bytes for which there is memory anyway."""
_MOST_SIDES = 8
_MOST_ELEMENTS = 1 << 48

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint16, torch.uint32, torch.uint64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class MessageError(HotbedError, ValueError):
    """A value has no message, or bytes are none."""


def encode(value: object) -> list[Tensor]:
    """Return (bytes,) uint8 pieces of the message.

    Args:
        value: None, bool, int, float, str, bytes, dense tensors, and lists, tuples and dicts (by str) of
            those.

    Raises:
        MessageError: it has a part of another type, or passes a limit.
    """
    tensors: list[Tensor] = []
    text = json.dumps(_plain(value, tensors, MOST_DEPTH), separators=(",", ":")).encode()
    if len(text) > MOST_JSON:
        raise MessageError(f"{len(text):,} bytes of JSON; a message has at most {MOST_JSON:,}.")
    raw = [len(text).to_bytes(WORD, "little") + text]
    pieces = [torch.frombuffer(bytearray(raw[0]), dtype=torch.uint8), *map(bytes_of, tensors)]
    return [
        piece
        for some in pieces
        for piece in (some, torch.zeros(-len(some) % WORD, dtype=torch.uint8, device="cpu"))
    ]


def _plain(value: object, tensors: list[Tensor], depth: int) -> object:
    if value is None or isinstance(value, bool | int | float | str):  # of NumPy, too
        return value
    if depth == 0:
        raise MessageError(f"A message has containers at most {MOST_DEPTH} deep inside each other.")
    if type(value) is list:
        return [_plain(item, tensors, depth - 1) for item in value]
    if type(value) is tuple:
        return {"tuple": [_plain(item, tensors, depth - 1) for item in value]}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: _plain(item, tensors, depth - 1) for key, item in value.items()}}
    if type(value) is bytes:
        return {"bytes": value.hex()}
    if isinstance(value, Tensor) and value.layout is torch.strided and value.dtype in _NAMES:
        tensors.append(value.detach().cpu())
        return {"tensor": [_NAMES[value.dtype], list(value.shape)]}
    raise MessageError(
        f"Expected None, numbers, str, bytes, dense tensors, and lists, tuples and dicts (by str) of those; "
        f"got {type(value).__qualname__}."
    )


def decode(message: Tensor) -> Any:
    """Return what `encode` was given.

    Args:
        message: (bytes,) uint8, of anybody.

    Raises:
        MessageError: it is no message, or passes a limit. Memory of at most some times its size was taken.
    """
    if len(message) < WORD:
        raise MessageError(f"A message has at least {WORD} bytes, got {len(message)}.")
    size = int.from_bytes(bytes(message[:WORD].tolist()), "little")
    if size > min(MOST_JSON, len(message) - WORD):
        raise MessageError(f"A message of {len(message):,} bytes has no {size:,} bytes of JSON.")
    try:
        words = json.loads(bytes(message[WORD : WORD + size].numpy()))
    except (ValueError, RecursionError) as error:
        raise MessageError(f"The JSON of a message cannot be read: {error}.") from None
    tensors = _Tensors(message, rounded(WORD + size))
    value = _decoded(words, tensors, MOST_DEPTH)
    if tensors.begin != len(message):
        raise MessageError(
            f"A message has {len(message) - tensors.begin:,} bytes that are no tensor's."
        )
    return value


def _decoded(value: object, tensors: _Tensors, depth: int) -> object:
    if not isinstance(value, list | dict):
        return value
    if depth == 0:
        raise MessageError(f"A message has containers at most {MOST_DEPTH} deep inside each other.")
    match value:
        case list(items):
            return [_decoded(item, tensors, depth - 1) for item in items]
        case {"tuple": list(items), **rest} if not rest:
            return tuple(_decoded(item, tensors, depth - 1) for item in items)
        case {"dict": dict(items), **rest} if not rest:
            return {key: _decoded(item, tensors, depth - 1) for key, item in items.items()}
        case {"bytes": str(text), **rest} if not rest:
            return _bytes_in(text)
        case {"tensor": [str(name), list(shape)], **rest} if not rest and name in _DTYPES:
            return tensors.read(_DTYPES[name], shape)
    raise MessageError("A message has an object of no known kind.")


def _bytes_in(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise MessageError("A message has bytes that are no hexadecimal numbers.") from None


class Exchanging(Messenger, Protocol):
    """`hotbed.dist.ranks.Ranks`, as far as values travel by it."""

    size: int

    def reporting(self, kind: str) -> AbstractContextManager[None]: ...
    def handshake(self, kind: str, values: Sequence[int] = ()) -> Handshake: ...


class _Tensors:
    """The bytes of a message behind its JSON.

    Attributes:
        begin: the first that no tensor has had.
    """

    def __init__(self, message: Tensor, begin: int) -> None:
        self._message, self.begin = message, begin

    def read(self, dtype: torch.dtype, shape: list[object]) -> Tensor:
        """Copy the next tensor."""
        sides = list(_sides(shape))
        count = math.prod(sides)
        # Sides of 2^62 beside a 0 are none either, as torch multiplies them.
        if math.prod(side or 1 for side in sides) > _MOST_ELEMENTS:
            raise MessageError("A message has a tensor of more elements than memory has.")
        end = self.begin + count * dtype.itemsize
        if rounded(end) > len(self._message):
            raise MessageError(
                f"A message of {len(self._message):,} bytes lacks those of a tensor."
            )
        raw = self._message[self.begin : end].clone()
        self.begin = rounded(end)
        if dtype is torch.bool:  # any other byte would be a third value
            return (raw != 0).view(sides)
        return raw.view(dtype).view(sides)


def _sides(shape: list[object]) -> Iterator[int]:
    if len(shape) > _MOST_SIDES:
        raise MessageError(
            f"A message has a tensor of {len(shape)} dimensions, more than {_MOST_SIDES}."
        )
    for side in shape:
        if type(side) is not int or not 0 <= side <= _MOST_ELEMENTS:
            raise MessageError("A message has a tensor whose shape is none.")
        yield side


def all_values(ranks: Exchanging, kind: str, value: object) -> list[Any]:
    """Return the value of each rank. Called by all ranks.

    Args:
        kind: of `handshake.KINDS`, for errors.
        value: of the types that `encode` takes.

    Raises:
        MessageError: `value` is of another type.
        PeerError: what another rank sends is larger than free memory, or no message.
    """
    with ranks.reporting(kind):
        pieces = encode(value)
    return _exchanged(ranks, ranks.handshake(kind, [sum(map(len, pieces))]), pieces)


def serve_values(ranks: Exchanging, opened: Handshake) -> list[object]:
    """Return the values that the others tell each other, where this rank has none.

    Args:
        opened: the handshake of `all_values`, in which this rank takes part as one without batches.
    """
    return _exchanged(ranks, opened, [])


def _exchanged(ranks: Exchanging, opened: Handshake, pieces: list[Tensor]) -> list[object]:
    """Return the values of the ranks that tell one."""
    kind, sizes = opened.kind, opened.values[:, 0].tolist()
    free = max(_SMALL, _core.available_memory())
    for rank, size in enumerate(sizes):
        if not 0 <= size <= free:
            raise PeerError(
                f"Rank {rank} announces {size:,} bytes for {kind}, and {free:,} are free here."
            )
    received = exchange(ranks, kind, [pieces] * ranks.size, sizes)
    return [
        _value_of_rank(kind, rank, message)
        for rank, message in enumerate(received)
        if not opened.ended[rank]
    ]


def _value_of_rank(kind: str, rank: int, message: Tensor) -> Any:
    try:
        return decode(message)
    except MessageError as error:
        raise PeerError(f"Rank {rank} sent no readable message for {kind}: {error}") from None
