"""The synthetic benchmark: its model against one of torch's parts, and what it counts."""

import numpy as np
import pytest
import torch

from benchmarks import synthetic
from benchmarks.synthetic_models import SyntheticModel, TableGroup, synthetic_model

SMALL = SyntheticModel(
    "toy", (TableGroup(2, 20, 4, (1, 3)), TableGroup(3, 5, 2)), (8, 4), numerical=3
)


def test_equals_torchs_layers():
    torch.manual_seed(0)
    network = synthetic.Network(SMALL)
    batch = synthetic.drawn(SMALL, 16, 0)
    bags = {
        one.table: network.embeddings.lookup(one.table, torch.arange(one.rows))
        for one in network.inputs
    }
    parts = [bags[one.table][batch[one.name]].sum(1) for one in network.inputs]
    x = torch.cat([*parts, batch["numerical"]], 1)
    assert x.shape == (16, SMALL.mlp_input)
    for position, layer in enumerate(network.mlp.layers):
        x = layer(x).relu() if position < 2 else layer(x)
    torch.testing.assert_close(network(batch), x.squeeze(1))


def test_batches_have_the_shapes_of_the_inputs():
    batch = synthetic.drawn(SMALL, 7, 3)
    inputs = synthetic.described_tables(SMALL)[1]
    assert len(inputs) == SMALL.inputs == 7
    for one in inputs:
        ids = batch[one.name]
        assert ids.shape == (7, one.hotness) and ids.dtype == torch.int64
        assert 0 <= ids.min() and ids.max() < one.rows
    assert batch["numerical"].shape == (7, 3) and set(batch["label"].tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize(("width", "stride"), [(12, 4), (13, 4), (14, 4), (15, 4), (3, 7), (1, 1)])
def test_averages_over_neighbouring_columns(width, stride):
    """As a window of `stride` that starts before the first column by half of what is missing."""
    x = torch.randn(3, width, dtype=torch.float64)
    count = -(-width // stride)
    begin = -((count * stride - width) // 2)
    expected = [
        x[:, max(0, at) : at + stride].mean(1)
        for at in range(begin, begin + count * stride, stride)
    ]
    torch.testing.assert_close(synthetic.averaged(x, stride), torch.stack(expected, 1))


def test_counts_the_bytes_of_a_step():
    model = SyntheticModel("toy", (TableGroup(1, 4, 2, (1, 2)),), (4,), 1)
    batch = {"0.0 x 1": torch.tensor([[0], [1]]), "0.0 x 2": torch.tensor([[1, 1], [3, 1]])}
    ids, vectors = 8 * 6, 2 * 4 * 2 * 2 * 2
    rows = 3 * 4 * (2 + 2 * (2 + 2))  # read, then read and written with their state
    assert synthetic.step_bytes(model, [batch], "adagrad") == ids + vectors + rows


@pytest.mark.parametrize("optimizer", synthetic.OPTIMIZERS)
def test_runs(optimizer):
    report = synthetic.run(
        quick=True, progress=lambda text: None, optimizer=optimizer, most_rows=100
    )
    assert report.figures["tables"] == 55 and report.figures["inputs"] == 58
    assert np.isfinite(report.figures["loss"]) and report.rows[0]["median_ms"] > 0


def test_refuses_what_memory_cannot_hold():
    with pytest.raises(SystemExit, match="colossal.*--most-rows"):
        synthetic._check_memory(synthetic_model("colossal"), "adam", torch.device("cpu"))
