"""`EmbeddingCollection` among threads, checkpoints, autocast, defaults and other modules."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from mixed_tables import assert_equal_grads, batch, grads_of, loss_of, mixed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_twins import dense_grad

import hotbed as hb
from hotbed import _core

ids = torch.tensor


def test_bits_do_not_depend_on_threads_or_instruction_set(
    set_threads: Callable[[int], None],
) -> None:
    size = 5000  # enough that work is split
    found = []
    best = _core.isa()
    try:
        for isa in ("base", "avx2", "avx512"):
            if not _core.use_isa(isa):
                continue
            for threads in (1, 2, 3):
                set_threads(threads)
                collection = mixed()
                outputs = collection(batch(size))
                loss_of(outputs).backward()
                found.append((outputs, grads_of(collection)))
    finally:
        _core.use_isa(best)
    assert len(found) >= 3
    for outputs, grads in found[1:]:
        for name, out in outputs.items():
            assert torch.equal(out, found[0][0][name]), name
        assert_equal_grads(grads, found[0][1])


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    collection, plain = mixed(), mixed()
    start = torch.zeros((), requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return loss_of(collection(batch())) + x

    loss = checkpoint(run, start, use_reentrant=reentrant)
    assert isinstance(loss, Tensor)
    want = loss_of(plain(batch()))
    assert loss.item() == want.item()
    loss.backward()
    want.backward()
    assert_equal_grads(grads_of(collection), grads_of(plain))
    assert torch.equal(collection.rows("user").values, plain.rows("user").values)


def test_evaluation_on_several_threads() -> None:
    collection = mixed()
    collection(batch(50))
    collection.eval()
    want = {seed: collection(batch(50, seed)) for seed in range(8)}

    def evaluate(seed: int) -> bool:
        with torch.no_grad():
            found = [collection(batch(50, seed)) for _ in range(20)]
        return all(torch.equal(f[k], v) for f in found for k, v in want[seed].items())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(evaluate, want))


def test_autocast_leaves_rows_their_type() -> None:
    collection = mixed()
    dense = nn.Linear(5, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = collection(batch())
        assert out["browsed"].dtype == torch.float32 and out["tag"].dtype == torch.float64
        hidden = dense(out["browsed"])
        assert hidden.dtype == torch.bfloat16
    hidden.float().sum().backward()
    assert dense_grad(collection.parameter("item")).dtype == torch.float32


def test_torch_func_is_refused() -> None:
    collection, inputs = mixed(), batch()

    def loss(scale: Tensor) -> Tensor:
        return loss_of(collection(inputs)) * scale

    for transformed, scale in ((torch.func.grad(loss), 1.0), (torch.func.vmap(loss), [1.0, 2.0])):
        with pytest.raises(hb.TableError, match="torch.func cannot go through tables"):
            transformed(torch.tensor(scale))
    assert collection.count("user") == 0


def test_two_collections_in_one_model() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = mixed(0), mixed(1)

        def forward(self, x: dict[str, Any]) -> Tensor:
            return loss_of(self.one(x)) * loss_of(self.two(x))

    model = Model()
    model(batch()).backward()
    assert len(list(model.parameters())) == 8
    assert all(p.grad is not None for p in model.parameters())
    tables = [c.table(name) for c in (model.one, model.two) for name in c.tables]
    stored = sum(len(table) * table.spec.dim for table in tables)
    assert sum(p.numel() for p in model.parameters()) == stored < 2**20


def test_the_widest_tables_have_handles_whose_bytes_can_be_counted() -> None:
    collection = hb.EmbeddingCollection([hb.Table("wide", 2**22), hb.Table("slim", 1)], seed=0)
    out = collection({"wide": ids([-(2**63)]), "slim": ids([2**63 - 1])})
    (out["wide"].sum() + out["slim"].sum()).backward()
    assert collection.parameter("wide").grad.shape == collection.parameter("wide").shape


def test_a_default_device_or_dtype_changes_nothing() -> None:
    want = mixed()
    loss_of(want(batch())).backward()
    with torch.device("meta"):
        collection = mixed()
    inputs = batch()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            outputs = collection(inputs)
            loss = loss_of(outputs)
            loss.backward()
            grads = grads_of(collection)
            collection.load_state_dict(collection.state_dict())
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(v.device.type == "cpu" for v in outputs.values())
    assert_equal_grads(grads, grads_of(want))
