"""Messages between ranks, over Gloo and through shared memory."""

from __future__ import annotations

import fcntl
import gc
import os
import random
import stat
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from dist.test_sharded import batch_of, collection, loss_of, plan_of
from dist.worlds import run, shared_files

import hotbed as hb
from hotbed import _core
from hotbed.dist import shared_memory
from hotbed.dist.errors import Gone
from hotbed.dist.mixed_wire import MixedWire
from hotbed.dist.ranks import Ranks
from hotbed.dist.raw import rounded
from hotbed.dist.shared_memory import SharedMemory
from hotbed.dist.wire import Gloo, Wire
from hotbed.trace import Trace


def message(source: int, to: int, number: int, size: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(source + 10 * to + 100 * number)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=chance)


def messages(rank: int, world: int, shared: bool, local: int | None = None) -> None:
    ranks = Ranks(shared_memory=shared, local_world_size=local)
    wire = ranks._wire
    kinds = {None: SharedMemory, world: SharedMemory, 1: Gloo}
    assert isinstance(wire, kinds.get(local, MixedWire) if shared and world > 1 else Gloo)
    messages_of(wire, rank, world)


def messages_of(wire: Wire, rank: int, world: int) -> None:
    chance = random.Random(world)
    for number in range(60):
        most = 3 << 20 if number == 40 else chance.choice([1, 9, 5000])
        sizes = [
            [chance.randint(0, most) if a != b else 0 for b in range(world)] for a in range(world)
        ]
        for to, room in enumerate(wire.reserve(sizes[rank])):
            assert room.data_ptr() % 8 == 0 or not len(room)
            room.copy_(message(rank, to, number, sizes[rank][to]))
        received, words = wire.send([of_rank[rank] for of_rank in sizes], 7 * number + rank)
        assert words == [7 * number + r for r in range(world)]
        numbers = torch.arange(chance.choice([1, 1032, 3000]))
        told = wire.gather(numbers * rank)
        assert torch.equal(told, torch.stack([numbers * r for r in range(world)]))
        if rank == number % world:
            torch.randn(100, 100).inverse()  # the others are ahead, and write what comes next
        for source, some in enumerate(received):
            assert torch.equal(some, message(source, rank, number, sizes[source][rank]))
            assert some.data_ptr() % 8 == 0 or not len(some)


@pytest.mark.process
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_messages_of_any_size_come_as_they_were_sent(world: int, shared: bool) -> None:
    run(world, messages, shared)


@pytest.mark.process
@pytest.mark.parametrize(("world", "local"), [(2, 1), (4, 2), (4, 4), (6, 3)])
def test_messages_come_by_shared_memory_inside_machines_alone(world: int, local: int) -> None:
    run(world, messages, True, local)


def other_machines(rank: int, world: int, local_sizes: list[int | None], match: str) -> None:
    with pytest.raises(hb.dist.PlanError, match=match):
        hb.distribute(collection(), "auto", local_world_size=local_sizes[rank])


@pytest.mark.process
def test_machines_that_cannot_be_are_refused() -> None:
    run(2, other_machines, [2, None], "local_world_size=")
    run(2, other_machines, [3, 3], "does not divide the 2 ranks")
    run(1, other_machines, [0], "not 0")


def out_of_step_on_a_machine(rank: int, world: int) -> None:
    wire: Any = Ranks(local_world_size=2)._wire
    if rank < 2:
        return
    with pytest.raises(Gone, match=f"rank {5 - rank}: it does something else than rank {rank}"):
        if rank == 2:
            wire._of_machine.gather(torch.arange(3))
        else:
            wire._of_machine.reserve([0] * 2)
            wire._of_machine.send([0] * 2, 0)


@pytest.mark.process
def test_ranks_of_a_machine_are_named_by_their_numbers_among_all() -> None:
    run(4, out_of_step_on_a_machine)


def partly_seen(rank: int, world: int) -> None:
    """Rank 2 sees nobody, and nobody sees it."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.delattr(os, "memfd_create")
        ranks: Any = Ranks()
    assert isinstance(ranks._wire, Gloo if rank == 2 else MixedWire)
    messages_of(ranks._wire, rank, world)


@pytest.mark.process
def test_a_rank_that_no_other_sees_uses_gloo_alone() -> None:
    run(3, partly_seen)


def unseen(rank: int, world: int, what: str) -> None:
    gc.collect()  # what earlier tests in this process have left
    before = shared_files()
    with pytest.MonkeyPatch.context() as patch:
        made = None
        if rank == 1 and what != "no such memory":
            with pytest.MonkeyPatch.context() as making:
                if what == "unsealed":
                    making.setattr(fcntl, "F_SEAL_SHRINK", 0)
                if what == "too small":
                    making.setattr(shared_memory, "_SMALLEST", 1 << 17)
                made = shared_memory.Member.made()
            process, files, token = made.address
            told: dict[str, Any] = {
                "other machine": (2**22 + 1, files, token),  # more than the number of any process
                "other process": (process, files, b"another token..."),
                "other file": (process, [0, 1, 2], token),
                "fewer files": (process, files[:2], token),
                "no address": {"process": process},
            }
            made.address = told.get(what, made.address)
            patch.setattr(shared_memory.Member, "made", lambda one=made: one)
        if rank == 1 and what == "no such memory":
            patch.delattr(os, "memfd_create")
        own = collection()
        hb.distribute(own, plan_of(own, "row", world))
    ranks: Any = own.table("item").place.ranks
    assert isinstance(ranks._wire, Gloo)
    del made
    assert shared_files() == before
    optimizer = hb.optim.SGD(own.parameters(), lr=0.1)
    loss_of(own(batch_of(0, slice(rank, rank + 3))), 1).backward()
    optimizer.step()


@pytest.mark.process
@pytest.mark.parametrize(
    "what",
    [
        *("other machine", "other process", "other file", "fewer files", "no address"),
        *("no such memory", "unsealed", "too small"),
    ],
)
def test_ranks_that_do_not_see_each_other_use_gloo(what: str) -> None:
    run(2, unseen, what)


def test_memory_is_open_to_its_user_and_never_cut() -> None:
    for memory in (made := shared_memory.Member.made())._control, *made.messages:
        assert stat.S_IMODE(os.fstat(memory.descriptor).st_mode) == 0o600
        memory.hold((2 << 20) + 1)
        assert os.fstat(memory.descriptor).st_size == memory.size == 4 << 20
        with pytest.raises(PermissionError):
            os.ftruncate(memory.descriptor, 1 << 20)
        with pytest.raises(PermissionError):
            fcntl.fcntl(memory.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_memory_of_another_user_is_not_seen() -> None:
    member = shared_memory.Member.made()
    child = os.fork()
    if child == 0:
        try:
            os.setresuid(65534, 65534, 65534)
            shared_memory.Member.of(member.address)
        except OSError:
            os._exit(7)  # as where ranks use Gloo
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def goes(rank: int, world: int) -> None:
    gc.collect()  # what earlier tests in this process have left
    before = shared_files()
    for _ in range(3):
        ranks: Any = Ranks()
        assert shared_files() > before
        torch_dist.barrier()
        del ranks
        assert shared_files() == before


@pytest.mark.process
def test_memory_goes_with_the_ranks() -> None:
    run(2, goes)


def forks(rank: int, world: int) -> None:
    own = collection()
    hb.distribute(own, plan_of(own, "row", world))
    optimizer = hb.optim.SGD(own.parameters(), lr=0.1)
    loss_of(own(batch_of(0, slice(rank, rank + 3))), 1).backward()
    if rank == 0:
        child = os.fork()
        if child == 0:
            try:
                own(batch_of(0, slice(0, 3)))
            except hb.dist.PeerError as error:
                os._exit("A forked process takes no part" not in str(error))
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
    optimizer.step()
    assert own.count("item") == 61


@pytest.mark.process
def test_a_forked_process_is_no_rank() -> None:
    run(2, forks)


def traced(rank: int, world: int) -> None:
    own = collection()
    hb.distribute(own, plan_of(own, "row", world))
    optimizer = hb.optim.SGD(own.parameters(), lr=0.1)
    with Trace() as trace:
        loss_of(own(batch_of(0, slice(rank, rank + 3))), 1).backward()
        optimizer.step()
    counts = {name: count for name, (count, _) in trace.totals().items()}
    sent = {"send ids": 1, "send rows": 1, "send gradients": 1}
    assert {"handshake": 3, **sent}.items() <= counts.items()


@pytest.mark.process
def test_messages_are_in_a_trace() -> None:
    run(2, traced)


def test_sizes() -> None:
    assert [rounded(size) for size in (0, 1, 8, 9)] == [0, 8, 8, 16]
    assert _core.block(0).numel() == 0
    assert (_core.block(13).dtype, _core.block(13).shape, _core.block(13).data_ptr() % 64) == (
        torch.uint8,
        (13,),
        0,
    )


def out_of_step(rank: int, world: int) -> None:
    ranks = Ranks(timeout=30)
    wire = ranks._wire
    assert isinstance(wire, SharedMemory)
    wire.gather(torch.arange(3))
    with pytest.raises(Gone, match="something else"):
        if rank:
            wire.gather(torch.arange(3))
        else:
            wire.reserve([0] * world)
            wire.send([0] * world, 0)
    with pytest.raises(Gone, match="something else"):
        wire.gather(torch.arange(3 + rank))


@pytest.mark.process
def test_a_rank_out_of_step_is_found_out() -> None:
    run(2, out_of_step)
