"""Messages between processes of one machine: each rank writes to its own memory, the others read."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hotbed import _core
from hotbed.dist.errors import Gone
from hotbed.dist.raw import WORD
from hotbed.dist.wire import Wire

__all__ = ["Member", "SharedMemory"]

_LINE = 64
"""Bytes, at whose multiples messages begin."""
_MOST_GATHERED = 1 << 14
"""Bytes of numbers that are gathered by it."""
_NUMBERS, _MESSAGES = 0, 1 << 32
_SMALLEST = 1 << 20
_TOKEN = 16
_GATHERED = _LINE + _TOKEN + 2 * WORD
"""Where what is gathered begins, behind the counter, the token and two headings."""
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
_NAME = "hotbed"
_OWN = 0o600
"""Mode of the file: only processes of this user may open it."""
_WHY = {
    _core.Waited.too_long: "it kept the others waiting for too long",
    _core.Waited.ended: "it has ended",
    _core.Waited.exited: "it has left",
}


class SharedMemory:
    """`Wire`. Each rank has a counter, of what it has gathered, and raises it when its numbers are there. Of
    what it writes to it has two pieces, in turns: when it writes to one again, all have begun to gather after
    that, and so are done with what was there.

    The memory has no name, and goes with the last process that has it.
    """

    def __init__(
        self, gloo: Wire, rank: int, seconds: float, members: Mapping[int, Member]
    ) -> None:
        """
        Args:
            gloo: for what is too large to be gathered.
            rank: of this process; one of `members`.
            seconds: timeout.
            members: by rank, rising. Messages are in their order.
        """
        self._gloo, self._rank, self._seconds = gloo, rank, seconds
        self._members, self._own = members, members[rank]
        self._at = list(members).index(rank)
        self._gathered = self._sent = 0
        self._begins: list[int] = []

    def reserve(self, sizes: Sequence[int]) -> list[Tensor]:
        self._begins, end = [], 0
        for size in sizes:
            self._begins.append(end)
            end += -(-size // _LINE) * _LINE
        memory = self._own.messages[self._sent % 2]
        memory.hold(end)
        return [memory.bytes[b : b + size] for b, size in zip(self._begins, sizes, strict=True)]

    def send(
        self, sizes: Sequence[int], word: int, heard_by: Sequence[int] | None = None
    ) -> tuple[list[Tensor], list[int]]:
        at = self._sent % 2
        said = torch.tensor([word, self._own.messages[at].size, *self._begins], device="cpu")
        reported = self._gather(_MESSAGES, said).tolist()
        received = []
        every = zip(self._members.items(), sizes, reported, strict=True)
        for (source, member), size, (_, whole, *begins) in every:
            if source == self._rank:
                received.append(_NOTHING)
                continue
            memory, begin = member.messages[at], begins[self._at]
            memory.map(whole)  # it may have grown
            received.append(memory.bytes[begin : begin + size])
        self._sent += 1
        return received, [first for first, *_ in reported]

    def gather(self, own: Tensor) -> Tensor:
        if own.nbytes > _MOST_GATHERED:
            return self._gloo.gather(own)
        return self._gather(_NUMBERS, own)

    def _gather(self, what: int, own: Tensor) -> Tensor:
        """`what`: is gathered; a rank that gathers something else is out of step."""
        at = self._gathered % 2
        self._gathered += 1
        heading = what + own.nbytes
        self._own.headings[at] = heading
        self._own.numbers(at, own)[:] = own
        _core.raise_counter(self._own.counter, self._gathered)
        found = []
        for rank, member in self._members.items():
            if rank == self._rank:
                found.append(own)
                continue
            wait = member.counter, self._gathered, self._seconds, member.process
            came = _core.wait_for_counter(*wait)
            if came != _core.Waited.raised:
                raise Gone(f"rank {rank}: {_WHY[came]}")
            if int(member.headings[at]) != heading:
                raise Gone(f"rank {rank}: it does something else than rank {self._rank}")
            found.append(member.numbers(at, own))
        return torch.stack(found)

    def leave(self) -> None:
        _core.leave_counter(self._own.counter)
        self._gloo.leave()


class Member:
    """A rank.

    Attributes:
        address: by which other processes find it.
        process: a descriptor of its process; -1: it is this one.
        counter: address of a number, which tells how often it has gathered.
        headings: (2,) what it gathered the last time, and the time before.
        messages: memory for them.
    """

    def __init__(self, address: object, process: int, memories: Sequence[_Memory]) -> None:
        self.address: Any = address
        self.process = process
        self._control, *self.messages = memories
        self.counter = self._control.bytes.data_ptr()
        self.headings = self._control.bytes[_LINE + _TOKEN : _GATHERED].view(torch.int64)
        if process >= 0:
            weakref.finalize(self, os.close, process)

    @classmethod
    def offered(cls) -> Member | None:
        """Return this process; None: the system has no such memory."""
        try:
            return cls.made()
        except (OSError, AttributeError):
            return None

    @classmethod
    def seen(cls, address: object) -> Member | None:
        """Return another process; None: it cannot be seen from here, as on another machine."""
        try:
            return cls.of(address)
        except (OSError, AttributeError):
            return None

    @classmethod
    def made(cls) -> Member:
        """This process.

        Raises:
            OSError, AttributeError: the system has no such memory.
        """
        memories = [_Memory.made() for _ in range(3)]
        token = secrets.token_bytes(_TOKEN)
        memories[0].bytes[_LINE : _LINE + _TOKEN] = torch.frombuffer(
            bytearray(token), dtype=torch.uint8
        )
        descriptors = [memory.descriptor for memory in memories]
        os.close(os.pidfd_open(os.getpid()))  # others will watch it so
        return cls((os.getpid(), descriptors, token), -1, memories)

    @classmethod
    def of(cls, address: object) -> Member:
        """Another one.

        Raises:
            OSError, AttributeError: it cannot be seen from here.
        """
        match address:
            case (int(number), [int(), int(), int()] as descriptors, bytes(token)):
                pass
            case _:
                raise OSError("it is no address")
        memories = [_Memory.of(number, descriptor) for descriptor in descriptors]
        if bytes(memories[0].bytes[_LINE : _LINE + _TOKEN].tolist()) != token:
            raise OSError("another process has this number here")
        return cls(address, os.pidfd_open(number), memories)

    def numbers(self, at: int, like: Tensor) -> Tensor:
        """(n,) numbers of the last time, or the time before."""
        begin = _GATHERED + at * _MOST_GATHERED
        return self._control.bytes[begin : begin + like.nbytes].view(like.dtype)


class _Memory:
    """Memory of this or another process.

    Attributes:
        descriptor: of it.
        size: bytes that are mapped here.
        bytes: (size,) uint8.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.size = descriptor, 0
        weakref.finalize(self, os.close, descriptor)
        self.map(os.fstat(descriptor).st_size)

    @classmethod
    def made(cls) -> _Memory:
        """Make the shared memory of this process."""
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(descriptor, _OWN)
            os.ftruncate(descriptor, _SMALLEST)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor)

    @classmethod
    def of(cls, process: int, descriptor: int) -> _Memory:
        """Map the memory of another process.

        Raises:
            OSError: it is not there, or its owner could cut it, which would end whoever reads it.
        """
        path = f"/proc/{process}/fd/{descriptor}"
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            raise OSError("another process has this number here")
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        sealed = fcntl.fcntl(opened, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if not sealed or os.fstat(opened).st_size < _SMALLEST:
            os.close(opened)
            raise OSError("it is too small, or could become so")
        return cls(opened)

    def hold(self, size: int) -> None:
        """Has room for so many bytes."""
        if size > self.size:
            room = 1 << (size - 1).bit_length()
            os.ftruncate(self.descriptor, room)
            self.map(room)

    def map(self, size: int) -> None:
        """Sees so many bytes of it."""
        if size != self.size:
            self.size = size
            self.bytes = torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)
