import gzip
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import hotbed._core as _core
from hotbed.data import CATEGORIES, CriteoLog, synthetic_clicks, write_criteo_tsv
from hotbed.data.synthetic import CRITEO_TABLE_ROWS, _PlantedModel

SMALL = [50 + i for i in range(26)]


def column(batches, name):
    return torch.cat([batch[name] for batch in batches])


def naive_auc(score, label):
    """The share of (click, no click) pairs in the right order, a tie counting half."""
    difference = score[label == 1][:, None] - score[label == 0][None, :]
    return float(((difference > 0) + 0.5 * (difference == 0)).mean())


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("suffix", [".tsv", ".tsv.gz"])
def test_the_written_log_reads_back_as_the_batches(tmp_path, suffix, labels):
    path = tmp_path / f"log{suffix}"
    auc = write_criteo_tsv(path, 9_000, seed=3, labels=labels)
    made = synthetic_clicks(9_000, 1_000, seed=3)
    assert made.auc == auc
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == (suffix == ".tsv.gz")
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    read = list(CriteoLog(path, 1_000, labels=labels))
    batches = list(made)
    assert len(read) == len(batches) == len(made) == 9
    for a, b in zip(read, batches, strict=True):
        assert list(b) == ["label", "dense", *CATEGORIES]
        assert all(torch.equal(a[name], b[name]) for name in CATEGORIES)
        assert not labels or torch.equal(a["label"], b["label"])
        torch.testing.assert_close(a["dense"], b["dense"], rtol=2e-7, atol=0)


def test_rows_do_not_depend_on_the_batch_size_but_on_the_seed():
    whole = next(iter(synthetic_clicks(100, 100, seed=1)))
    parts = list(synthetic_clicks(100, 33, seed=1))
    assert [len(b["label"]) for b in parts] == [33, 33, 33, 1]
    assert all(torch.equal(column(parts, name), whole[name]) for name in whole)
    other = next(iter(synthetic_clicks(100, 100, seed=2)))
    assert not torch.equal(other["C3"], whole["C3"])
    assert torch.equal(next(iter(synthetic_clicks(60, 60, seed=1)))["C3"], whole["C3"][:60])


def test_click_rate_and_expected_auc_are_those_of_the_draw():
    model = _PlantedModel(0, 1.05, CRITEO_TABLE_ROWS, 0.25)
    made = model.rows(0, 12_000)
    assert abs(made.label.mean() - 0.25) < 0.015
    assert abs(naive_auc(made.logit, made.label) - model.auc) < 0.015
    assert 0.79 < model.auc < 0.85
    rare = _PlantedModel(0, 1.05, CRITEO_TABLE_ROWS, 0.03)
    assert abs(rare.rows(0, 20_000).label.mean() - 0.03) < 0.006


def test_a_simple_model_learns_what_was_planted():
    """Logistic regression over small tables comes near the planted model on later rows."""
    log = synthetic_clicks(40_000, 500, table_rows=SMALL)
    index = {}
    weight = torch.zeros(26 * 100, requires_grad=True)
    dense = torch.nn.Linear(13, 1)
    optimizer = torch.optim.Adam([weight, *dense.parameters()], lr=0.01)
    scores, labels = [], []
    for number, batch in enumerate(log):
        rows = [
            [index.setdefault((name, i), len(index)) for i in batch[name].tolist()]
            for name in CATEGORIES
        ]
        logit = weight[torch.tensor(rows)].sum(0) + dense(batch["dense"])[:, 0]
        if number >= 70:
            scores.append(logit.detach())
            labels.append(batch["label"])
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logit, batch["label"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    auc = naive_auc(torch.cat(scores).numpy(), torch.cat(labels).numpy())
    assert log.auc - 0.05 < auc < log.auc + 0.03


def test_ids_follow_the_power_law_and_are_scattered():
    batches = list(synthetic_clicks(65_536, 8_192, table_rows=[1_000_000] * 26))
    ids = column(batches, "C1").numpy()
    counts = Counter(ids.tolist())
    # For r = ((k+1)**g - 1) / ((n+1)**g - 1) ranks up to k have been drawn with chance r.
    gamma, n = -0.05, 1_000_000
    expected = [((k + 1) ** gamma - 1) / ((n + 1) ** gamma - 1) for k in range(1, 6)]
    top = np.cumsum([count for _, count in counts.most_common(5)]) / len(ids)
    np.testing.assert_allclose(top, expected, atol=0.006)
    assert 22_000 < len(counts) < 23_500
    assert ids.min() >= 0 and ids.max() < 2**32
    frequent = np.array([i for i, _ in counts.most_common(200)])
    assert frequent.max() > 2**31 and len(np.unique(frequent >> 26)) > 40


def test_missing_values_and_small_tables():
    batches = list(synthetic_clicks(4_096, 4_096, table_rows=SMALL))
    batch = batches[0]
    for name, rows in zip(CATEGORIES, SMALL, strict=True):
        distinct = batch[name].unique()
        assert len(distinct) <= rows + 1
    assert abs(float((batch["C22"] == -1).float().mean()) - 1500 / 2048) < 0.05
    assert not (batch["C1"] == -1).any()
    assert batch["dense"].min() == 0 and batch["dense"].isfinite().all()
    assert (_PlantedModel(0, 1.05, SMALL, 0.25).rows(0, 4_096).integers[:, 1] < 0).any()


@pytest.mark.parametrize("alpha", [0, 1, 2.5])
def test_other_exponents(alpha):
    made = list(synthetic_clicks(8_192, 8_192, alpha=alpha, table_rows=[10] * 26))[0]
    counts = sorted(Counter(made["C1"].tolist()).values(), reverse=True)
    k = np.arange(1, 12)
    if alpha == 1:
        cumulative = np.log(k) / np.log(11)
    else:
        cumulative = (k ** (1.0 - alpha) - 1) / (11 ** (1.0 - alpha) - 1)
    shares = np.diff(cumulative) * 8_192
    np.testing.assert_allclose(counts, sorted(shares, reverse=True), atol=130)


def test_all_ranks_scatter_to_different_words():
    model = _PlantedModel(0, 1.05, [2**32] * 26, 0.25)
    ranks = np.arange(0, 200_000, dtype=np.uint64)[None, :].repeat(26, axis=0)
    scattered = model._scattered(ranks)
    assert all(len(np.unique(scattered[k])) == 200_000 for k in range(26))
    assert len(np.unique(scattered[:, 0])) == 26


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_make_every_batch_once_in_order():
    log = synthetic_clicks(50, 8, seed=5)
    loaded = list(DataLoader(log, batch_size=None, num_workers=2))
    assert all(
        torch.equal(a[name], b[name])
        for a, b in zip(loaded, log, strict=True)
        for name in ("label", "C7")
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -1}, "alpha is -1"),
        ({"alpha": float("nan")}, "alpha is nan"),
        ({"table_rows": [5]}, "table_rows has 1 entries"),
        ({"table_rows": [5] * 25 + [0]}, "table_rows of C26 is 0"),
        ({"click_rate": 1.0}, "click_rate is 1.0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"rows": -1}, "rows is -1"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        synthetic_clicks(**{"rows": 10, **options})


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(_core, "criteo_format", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_criteo_tsv(tmp_path / "a.tsv", 10)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="rows is -5"):
        write_criteo_tsv(tmp_path / "a.tsv", -5)


def test_an_empty_log_can_be_written(tmp_path):
    write_criteo_tsv(tmp_path / "a.tsv.gz", 0)
    assert gzip.decompress((tmp_path / "a.tsv.gz").read_bytes()) == b""
    assert list(CriteoLog(tmp_path / "a.tsv.gz")) == [] == list(synthetic_clicks(0))
