"""Peers are compared at equal work: the same weights and batches must give the same results."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from benchmarks.peers.fbgemm import Fbgemm
from benchmarks.peers.hotbed_tables import HotbedTables
from benchmarks.peers.keys import keys_of, read_in_parts
from benchmarks.peers.served_rows import BundleRows, FbgemmRows, MappedBags, RowFiles
from benchmarks.peers.torch_bags import TorchBags
from benchmarks.peers.torch_dlrm import COLUMNS, TorchDlrm, TwoAdams, Vocabulary
from benchmarks.workload import Workload

STEPS = 5
LR = 0.01
PAIRS = [
    (peer, optimizer)
    for optimizer in ("sgd", "rowwise_adagrad", "adagrad", "adam")
    for peer in (Fbgemm, TorchBags)
    if peer.lacks(optimizer) is None
]


@pytest.mark.parametrize(("bag", "ragged"), [(1, False), (4, False), (4, True)])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("peer", "optimizer"), PAIRS)
def test_peers_do_the_same_work(
    peer: type, optimizer: str, dynamic: bool, bag: int, ragged: bool
) -> None:
    work = Workload(tables=3, rows=40, dim=8, batch=16, bag=bag, ragged=ragged)
    assert not ragged or {0, 2 * bag} <= {*work.lengths.flatten().tolist()}
    ours = HotbedTables(work, optimizer, LR, dynamic=dynamic)
    theirs = peer(work, optimizer, LR)
    for contender in (ours, theirs):
        contender.build()
    vectors = torch.cat(list(ours.forward(0).values()), dim=1)
    outputs = theirs.forward(0)
    expected = outputs if isinstance(outputs, torch.Tensor) else torch.cat(outputs, dim=1)
    torch.testing.assert_close(vectors, expected, rtol=1e-6, atol=1e-7)
    for i in range(STEPS):
        ours.step(i)
        theirs.step(i)
    # SparseAdam adds eps before the bias correction, Hotbed's Adam (like torch.optim.Adam) after
    # it: an update of a component with a tiny gradient differs by 32 eps / |gradient| of lr.
    tolerance = 1e-5 if optimizer == "adam" else 1e-6
    for table in range(work.tables):
        before = work.initial_weights(table)
        assert not torch.equal(theirs.weights(table), before)
        torch.testing.assert_close(
            ours.weights(table), theirs.weights(table), rtol=1e-4, atol=tolerance
        )


@pytest.mark.parametrize("threads", [1, 3])
def test_stores_are_read_in_parts_and_answer_in_order(threads: int) -> None:
    ids = np.random.default_rng(0).permutation(100)[:31]
    records = np.arange(100, dtype="<u4").view(np.uint8).reshape(100, 4)
    stored = dict(
        zip(keys_of(np.arange(100)), (record.tobytes() for record in records), strict=True)
    )
    asked: list[list[bytes]] = []

    def get(keys: list[bytes]) -> list[bytes]:
        asked.append(keys)
        return [stored[key] for key in keys]

    with ThreadPoolExecutor(3) as pool:
        found = read_in_parts(ids, 4, get, threads, pool)
    assert np.array_equal(found, records[ids])
    assert len(asked) == threads and all(part == sorted(part) for part in asked)


def test_the_torch_dlrm_learns() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 5, (26, 64), generator=generator) * 1_000_003
    batch = {
        "dense": torch.randn(64, 13, generator=generator),
        "label": (ids[0] == 0).float(),
        **dict(zip(COLUMNS, ids, strict=True)),
    }
    vocabulary = Vocabulary([batch])
    mapped = vocabulary(batch)
    assert all(np.array_equal(vocabulary.ids[c][mapped[c]], batch[c]) for c in COLUMNS)
    model = TorchDlrm(vocabulary.rows(), dim=4)
    optimizer = TwoAdams(model, lr=1e-2)
    losses = []
    for _ in range(40):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(mapped), batch["label"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize("form", ["float32", "int8", "int4"])
@pytest.mark.parametrize("ragged", [False, True])
def test_peers_read_the_same_rows(form: str, ragged: bool) -> None:
    work = Workload(tables=3, rows=40, dim=16, batch=16, bag=4, ragged=ragged)
    files = RowFiles(work, form)
    ours, theirs = BundleRows(files), MappedBags(files) if form == "float32" else FbgemmRows(files)
    if form != "float32" and FbgemmRows.lacks():
        pytest.skip(str(FbgemmRows.lacks()))
    for contender in (ours, theirs):
        contender.build()
    vectors = np.concatenate(ours.forward(1), axis=1)
    found = theirs.forward(1)
    expected = found if isinstance(found, torch.Tensor) else torch.cat(found, dim=1)
    assert vectors.std() > 0
    # FBGEMM keeps scales as halves, by 2 ** -11 of them off, and of int8 there are 255.
    tolerance = {"float32": 1e-7, "int8": 2e-4, "int4": 1e-6}[form]
    np.testing.assert_allclose(vectors, expected.numpy(), atol=tolerance, rtol=0)
    for contender in (ours, theirs):
        contender.drop()
