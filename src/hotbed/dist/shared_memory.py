"""Messages between processes of one machine: each rank writes to memory of its own, and the others read there."""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

from hotbed.dist.wire import Wire, block

__all__ = ["SharedMemory"]

_SMALLEST = 1 << 20
_LINE = 64
"""Bytes, at whose multiples messages begin."""
_TOKEN = 16


class SharedMemory:
    """`Wire`. A rank has two pieces of memory, for every other exchange one: when it writes to one again, all
    have begun the exchange after, and so are done with what was there.

    The memory has no name, and goes with the last process that has it.
    """

    def __init__(self, group: Any, rank: int, own: list[_Memory], others: list[list[_Memory]]) -> None:
        """`others`: of each rank; of this one, none."""
        self._group, self._rank = group, rank
        self._own, self._others = own, others
        self._at = 0
        self._begins: list[int] = []

    @classmethod
    def between(
        cls, group: Any, rank: int, tell: Callable[[Any], list[Any]]
    ) -> Wire | None:
        """None where they do not all see each other's memory, as on several machines. Called by all ranks.

        Args:
            tell: gives what each rank says.
        """
        token = secrets.token_bytes(_TOKEN)
        own: list[_Memory] = []
        said = None
        try:
            own = [_Memory.made(token) for _ in range(2)]
            said = os.getpid(), [memory.descriptor for memory in own], token
        except (OSError, AttributeError):  # no such memory on this system
            pass
        others: list[list[_Memory]] = []
        seen = True
        for source, of_rank in enumerate(tell(said)):
            others.append([])
            if of_rank is None:
                seen = False
            elif source != rank:
                process, descriptors, expected = of_rank
                try:
                    others[-1] = [_Memory.of(process, d, expected) for d in descriptors]
                except OSError:
                    seen = False
        if not all(tell(seen)):
            return None
        return cls(group, rank, own, others)

    def take(self, sizes: Sequence[int]) -> list[Tensor]:
        self._begins, end = [], 0
        for size in sizes:
            self._begins.append(end)
            end += -(-size // _LINE) * _LINE
        memory = self._own[self._at]
        memory.hold(end)
        return [memory.bytes[b : b + size] for b, size in zip(self._begins, sizes, strict=True)]

    def send(self, sizes: Sequence[int], word: int) -> tuple[list[Tensor], list[int]]:
        said = torch.tensor([word, self._own[self._at].size, *self._begins])
        told = [torch.empty_like(said) for _ in sizes]
        torch_dist.all_gather(told, said, group=self._group)
        messages = []
        for source, (of_rank, size) in enumerate(zip(told, sizes, strict=True)):
            if source == self._rank:
                messages.append(block(0))
                continue
            memory, begin = self._others[source][self._at], int(of_rank[2 + self._rank])
            memory.map(int(of_rank[1]))  # it may have grown
            messages.append(memory.bytes[begin : begin + size])
        self._at ^= 1
        return messages, [int(of_rank[0]) for of_rank in told]


class _Memory:
    """Memory of this or another process.

    Attributes:
        descriptor: of it.
        size: bytes that are mapped here.
        bytes: (size,) uint8.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self.map(os.fstat(descriptor).st_size)

    @classmethod
    def made(cls, token: bytes) -> _Memory:
        """Of this process. It begins with the token, until it is written to."""
        descriptor = os.memfd_create("hotbed", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _SMALLEST)
        made = cls(descriptor)
        made.bytes[:_TOKEN] = torch.frombuffer(bytearray(token), dtype=torch.uint8)
        return made

    @classmethod
    def of(cls, process: int, descriptor: int, token: bytes) -> _Memory:
        """Of another one.

        Raises:
            OSError: it is not there.
        """
        opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        if os.pread(opened, _TOKEN, 0) != token:
            os.close(opened)
            raise OSError("another process has this number here")
        return cls(opened)

    def hold(self, size: int) -> None:
        """Has room for so many bytes."""
        if size > self.size:
            room = 1 << (size - 1).bit_length()
            os.ftruncate(self.descriptor, room)
            self.map(room)

    def map(self, size: int) -> None:
        """Sees so many bytes of it."""
        if size != getattr(self, "size", 0):
            self.size = size
            self.bytes = torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)
