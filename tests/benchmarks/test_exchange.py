"""The scenarios `exchange` and `scale`, with two processes."""

import shutil

import pytest
import torch

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


@pytest.mark.process
@pytest.mark.parametrize("optimizer", exchange.OPTIMIZERS)
def test_contenders_do_the_same_steps(optimizer):
    for found in worlds.run(2, _differences, optimizer):
        ours = {f"hotbed{over}, {how}-wise" for over in ("", " over gloo") for how in exchange.HOW}
        assert ours <= set(found)
        assert max(found.values()) < 1e-5, found


@pytest.mark.process
@pytest.mark.parametrize("how", exchange_bags.HOW)
def test_contenders_with_bags_do_the_same_steps(how):
    for found in worlds.run(2, _differences, "adagrad", how):
        assert {f"hotbed, {how}-wise", f"hotbed over gloo, {how}-wise"} <= set(found)
        assert max(found.values()) < 1e-5, found


def _figures(rank, world, how):
    work = Workload(2, ROWS, DIM, world * BATCH, 1).share(rank, world)
    model = HotbedRanks(work, "adagrad", 0.01, how)
    gloo = GlooBytes(model)
    model.build()
    gloo.build()
    for phase in gloo.phases().values():
        phase(0)
    return exchange._figures(model)


@pytest.mark.process
@pytest.mark.parametrize("how", exchange.HOW)
def test_bytes_sent_are_hardly_more_than_the_least(how):
    for found in worlds.run(2, _figures, how):
        assert 1 <= found["bytes sent over the least"] < 1.05
        assert found["handshakes"] >= 2 and found["ms until the first message"] > 0


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
