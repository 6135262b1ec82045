"""The scenarios `exchange` and `scale`, with two processes."""

import shutil

import pytest
import torch
from dist.worlds import run

from benchmarks import exchange, exchange_bags, link, worlds
from benchmarks.machine import OtherWork
from benchmarks.peers.gloo_bytes import GlooBytes
from benchmarks.peers.hotbed_ranks import HotbedRanks
from benchmarks.peers.torchrec_tables import TorchRec
from benchmarks.workload import Workload

ROWS, DIM, BATCH = 50, 8, 32


def _differences(rank, world, optimizer, how=None):
    work = Workload(2, ROWS, DIM, world * BATCH, 5 if how else 1).share(rank, world)
    if how:
        contenders = exchange_bags.contenders(work, how, optimizer)
    else:
        contenders = exchange.contenders(work, optimizer)
    differences, first = {}, None
    for contender in contenders:
        if isinstance(contender, GlooBytes) or contender.name == "hotbed, one process":
            continue
        contender.build()
        for i in range(3):
            for phase in contender.phases().values():
                phase(i)
        if isinstance(contender, TorchRec):
            found = list(contender.own_shards())
        else:
            found = [(t, (0, 0), contender.weights(t)) for t in range(work.tables)]  # type: ignore[attr-defined]
        first = first or [weights for _, _, weights in found]
        differences[contender.name] = max(
            float(
                (shard - first[t][row : row + len(shard), column : column + shard.shape[1]])
                .abs()
                .max()
            )
            for t, (row, column), shard in found
        )
        contender.drop()
    return differences


def _same_steps(rank, world, optimizer):
    found = _differences(rank, world, optimizer)
    ours = {f"hotbed{over}, {how}-wise" for over in ("", " over gloo") for how in exchange.HOW}
    assert ours <= set(found)
    assert max(found.values()) < 1e-5, found


@pytest.mark.process
@pytest.mark.parametrize("optimizer", exchange.OPTIMIZERS)
def test_contenders_do_the_same_steps(optimizer):
    run(2, _same_steps, optimizer)


def _same_steps_with_bags(rank, world, how):
    found = _differences(rank, world, "adagrad", how)
    assert {f"hotbed, {how}-wise", f"hotbed over gloo, {how}-wise"} <= set(found)
    assert max(found.values()) < 1e-5, found


@pytest.mark.process
@pytest.mark.parametrize("how", exchange_bags.HOW)
def test_contenders_with_bags_do_the_same_steps(how):
    run(2, _same_steps_with_bags, how)


def _few_bytes(rank, world, how):
    work = Workload(2, ROWS, DIM, world * BATCH, 1).share(rank, world)
    model = HotbedRanks(work, "adagrad", 0.01, how)
    gloo = GlooBytes(model)
    model.build()
    gloo.build()
    for phase in gloo.phases().values():
        phase(0)
    found = exchange._figures(model)
    assert 1 <= found["bytes sent over the least"] < 1.05
    assert found["handshakes"] >= 2 and found["ms until the first message"] > 0


@pytest.mark.process
@pytest.mark.parametrize("how", exchange.HOW)
def test_bytes_sent_are_hardly_more_than_the_least(how):
    run(2, _few_bytes, how)


def _summed(rank, world, factor):
    number = torch.tensor([rank * factor])
    torch.distributed.all_reduce(number)
    return rank, world, int(number), torch.get_num_threads()


@pytest.mark.process
def test_ranks_return_what_they_find():
    assert worlds.run(2, _summed, 5) == [(0, 2, 5, 1), (1, 2, 5, 1)]


def _fails(rank, world):
    if rank:
        raise ValueError("a rank's own words")
    torch.distributed.barrier()


@pytest.mark.process
def test_what_a_rank_raises_is_told():
    with pytest.raises(RuntimeError, match="a rank's own words"):
        worlds.run(2, _fails)


def test_ranks_have_shares_of_one_batch():
    whole = Workload(2, ROWS, DIM, 8, 1)
    parts = [whole.share(rank, 2) for rank in range(2)]
    assert (parts[1].ids[:, :, 0] == whole.ids[:, :, 4]).all() and parts[0].batch == 4
    assert parts[0].unique_rows <= whole.unique_rows


def test_other_work_is_what_no_rank_took():
    with OtherWork() as other:
        sum(range(10_000))
    assert len(other.seconds) == 3
    assert exchange.other_work([[4.0, 10.0, 1.0], [4.0, 10.0, 2.0]]) == pytest.approx(0.1)


def test_a_link_that_cannot_be_made_says_why(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else name)
    with pytest.raises(link.LinkError, match="there is no tc"), link.ports(2, "1gbit"):
        pass
