import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotbed.train import RunningAuc, auc, logloss

rows = st.lists(st.tuples(st.integers(-4, 4), st.booleans()), min_size=1, max_size=60)


def pairs_auc(scores, labels):
    """Every pair looked at."""
    wins = count = 0.0
    for s, y in zip(scores, labels, strict=True):
        for t, z in zip(scores, labels, strict=True):
            if y and not z:
                count += 1
                wins += 1.0 if s > t else 0.5 if s == t else 0.0
    return wins / count if count else math.nan


@given(rows)
def test_auc_is_the_share_of_ordered_pairs(rows):
    scores = [float(s) for s, _ in rows]
    labels = [y for _, y in rows]
    expected = pairs_auc(scores, labels)
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
        found = auc(torch.tensor(scores).to(dtype), torch.tensor(labels, dtype=torch.float32))
        assert found == pytest.approx(expected, abs=1e-12, nan_ok=True)


@given(rows)
def test_logloss_is_the_mean_of_minus_log_likelihoods(rows):
    logits = torch.tensor([float(s) for s, _ in rows])
    labels = torch.tensor([float(y) for _, y in rows])
    terms = [
        -math.log(1 / (1 + math.exp(-s if y else s)))
        for s, y in zip(logits.tolist(), labels.tolist(), strict=True)
    ]
    assert logloss(logits, labels) == pytest.approx(sum(terms) / len(terms), abs=1e-12)


def test_extremes():
    assert math.isnan(auc(torch.empty(0), torch.empty(0)))
    assert math.isnan(logloss(torch.empty(0), torch.empty(0)))
    assert math.isnan(auc(torch.tensor([1.0, 2.0]), torch.ones(2)))
    assert logloss(torch.tensor([1e4, -1e4]), torch.tensor([1.0, 0.0])) == 0
    assert logloss(torch.tensor([1e4]), torch.tensor([0.0])) == 1e4
    score = torch.arange(100_000)
    assert auc(score, (score >= 50_000).float()) == 1
    assert auc(score, (score < 50_000).float()) == 0


def test_scores_that_are_no_numbers_have_no_auc():
    labels = torch.tensor([0.0, 0.0, 1.0, 1.0])
    scores = torch.tensor([1.0, math.nan, 2.0, 3.0])
    assert math.isnan(auc(scores, labels)) and math.isnan(logloss(scores, labels))


@pytest.mark.parametrize("figure", [auc, logloss])
def test_as_many_scores_as_labels(figure):
    scores, labels = torch.tensor([[1.0], [2.0], [0.5]]), torch.tensor([0.0, 1.0, 1.0])
    assert figure(scores, labels) == figure(scores[:, 0], labels)
    for fewer in (labels[:2], labels[:1]):
        with pytest.raises(ValueError, match="Expected as many .* as labels; got"):
            figure(scores, fewer)


def test_the_running_auc_is_near_the_exact_one():
    generator = np.random.default_rng(0)
    label = torch.from_numpy((generator.random(20_000) < 0.25).astype(np.float32))
    logit = torch.from_numpy(generator.normal(size=20_000).astype(np.float32)) + label
    running = RunningAuc(keep=1.0)
    assert math.isnan(running.value())
    for z, y in zip(logit.split(500), label.split(500), strict=True):
        running.update(z, y)
    assert running.value() == pytest.approx(auc(logit, label), abs=1e-3)


def test_the_running_auc_forgets():
    running = RunningAuc(keep=0.5)
    label = torch.tensor([0.0, 1.0])
    for _ in range(20):
        running.update(torch.tensor([3.0, -3.0]), label)
    assert running.value() == pytest.approx(0)
    for _ in range(20):
        running.update(torch.tensor([-3.0, 3.0]), label)
    assert running.value() > 0.999


def test_the_running_auc_takes_infinite_logits():
    running = RunningAuc()
    running.update(torch.tensor([-math.inf, math.inf]), torch.tensor([0.0, 1.0]))
    assert running.value() == 1
