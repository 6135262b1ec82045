"""Click logs drawn from a known model, in the shape of Criteo's.

Every number is a pure function of (seed, row, column), by the finalizer of SplitMix64 (Steele, Lea,
Flood, OOPSLA 2014), so any range of rows can be made on its own and comes out the same.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

import hotbed._core as _core
from hotbed.arrays import integer
from hotbed.data.arguments import Checked, one_or_more, real, seed_of, whole
from hotbed.data.criteo import MISSING_ID
from hotbed.data.criteo_lines import CATEGORIES, DENSE, Batch
from hotbed.errors import InputError
from hotbed.files import appearing
from hotbed.paths import path_text
from hotbed.text import brief

# Distinct values in the columns C1..C26 of the full Kaggle 2014 log.
CRITEO_TABLE_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]
_Words = NDArray[np.uint64]

_SAMPLE_ROWS = 1 << 16
_SAMPLE_START = 1 << 48  # rows that no log reaches, kept for calibration
_MISSING_INTEGER = np.iinfo(np.int64).min
# Shares of missing values, in 1/2048, as in real logs: most columns few, some half.
_DENSE_MISSING = (900, 0, 430, 430, 50, 450, 80, 0, 80, 900, 80, 1500, 430)
_CATEGORY_MISSING = (0, 0, 70, 70, 0, 250, 0, 0, 0, 0, 0, 70, 0) + (
    *(0, 0, 70, 0, 0, 900, 900, 70, 1500, 0, 70, 900, 900),
)
# Purposes that separate the streams of one row.
_ID, _INTEGER, _LABEL, _WEIGHT, _SCATTER, _SLOPE = range(6)


class _Rows(NamedTuple):
    label: NDArray[np.uint8]
    integers: _Ints  # (n, 13)
    ids: _Ints  # (26, n)
    logit: _Floats  # (n,)


def synthetic_clicks(
    rows: int,
    batch_size: int = 512,
    *,
    seed: int = 0,
    alpha: float = 1.05,
    table_rows: Sequence[int] = CRITEO_TABLE_ROWS,
    click_rate: float = 0.25,
) -> SyntheticClicks:
    """Rows of a planted model as batches, shaped as those of `CriteoLog`.

    Ids follow a power law: for r uniform in [0, 1) and g = 1 - alpha the rank is
    floor((r * ((n + 1)**g - 1) + 1)**(1 / g)) - 1, as in the synthetic benchmarks of NVIDIA's
    distributed-embeddings; alpha 0 is uniform. A bijection of 32-bit words scatters ranks, so the
    value of an id says nothing about its frequency. Some values are missing.

    The logit of a click is the sum of a latent weight for each (column, id), of a slope for each
    dense column, and of a bias that sets the click rate; the label is drawn from it.

    Args:
        rows: how many.
        batch_size: rows a batch.
        seed: of everything: ids, the planted model, labels; 0 <= seed < 2**64.
        alpha: exponent of the power law, at least 0.
        table_rows: distinct ids of each of the 26 columns, 1 to 2**32.
        click_rate: expected share of clicks, in (0, 1).
    """
    return SyntheticClicks(rows, batch_size, _PlantedModel(seed, alpha, table_rows, click_rate))


def write_criteo_tsv(
    path: str | os.PathLike[str],
    rows: int,
    seed: int = 0,
    *,
    alpha: float = 1.05,
    table_rows: Sequence[int] = CRITEO_TABLE_ROWS,
    click_rate: float = 0.25,
    labels: bool = True,
) -> float:
    """Write the rows of `synthetic_clicks` as a Criteo log; gzip if `path` ends in ``.gz``.

    The file appears when it is complete. With ``labels=False`` the lines lack the first column.

    Returns:
        Expected AUC of the planted model, which a perfect model would reach.
    """
    rows = whole("rows", rows)
    path = path_text(path)
    if not path:
        raise InputError("path is empty; name the file to write.")
    model = _PlantedModel(seed, alpha, table_rows, click_rate)
    name = os.path.basename(path)
    with (
        appearing(path) as part,
        open(part, "wb") as plain,
        # A gzip file names its contents; by itself it would take the name of the part.
        gzip.GzipFile(name, "wb", 1, plain) if name.endswith(".gz") else plain as file,
    ):
        for at in range(0, rows, 8192):
            made = model.rows(at, min(at + 8192, rows))
            label = made.label if labels else None
            file.write(_core.criteo_format(label, made.integers, made.ids))
    return model.auc


class SyntheticClicks(IterableDataset[Batch]):
    """Generated clicks, iterable again and again, with the same batches.

    In DataLoader workers every batch is made once, in the same order as without workers.
    """

    rows = Checked(whole)
    batch_size = Checked(one_or_more)

    def __init__(self, rows: int, batch_size: int, model: _PlantedModel) -> None:
        self.rows = rows
        self.batch_size = batch_size
        self._model = model

    @property
    def auc(self) -> float:
        """Expected AUC of the planted model, which a perfect model would reach."""
        return self._model.auc

    def __len__(self) -> int:
        return -(-self.rows // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for number in range(first, len(self), step):
            begin = number * self.batch_size
            yield _batch(self._model.rows(begin, min(begin + self.batch_size, self.rows)))


def _batch(made: _Rows) -> Batch:
    batch = {
        "label": torch.from_numpy(made.label.astype(np.float32)),
        "dense": torch.from_numpy(_logarithm(made.integers).astype(np.float32)),
    }
    batch.update(zip(CATEGORIES, torch.from_numpy(made.ids).unbind(0), strict=True))
    return batch


def _logarithm(integers: _Ints) -> _Floats:
    logarithm: _Floats = np.log1p(np.maximum(integers, 0).astype(np.float64))
    return logarithm


def _mix(x: _Words) -> _Words:
    x = x ^ (x >> np.uint64(30))
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def _key(*parts: int) -> np.uint64:
    """A 64-bit key of some numbers."""
    word = np.zeros(1, np.uint64)
    for part in parts:
        word = _mix(word + np.uint64((part + 1) * 0x9E3779B97F4A7C15 % 2**64))
    key: np.uint64 = word[0]
    return key


def _keys(seed: int, purpose: int, columns: int) -> _Words:
    return np.array([_key(seed, purpose, c) for c in range(columns)], np.uint64)


def _uniform(words: _Words) -> _Floats:
    """(0, 1), from the upper 53 bits."""
    uniform: _Floats = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return uniform


def _bell(words: _Words) -> _Floats:
    """About standard normal: the sum of the four 16-bit pieces (variance 4 * 65536**2 / 12)."""
    pieces = np.ascontiguousarray(words).view(np.uint16).reshape(*words.shape, 4)
    total: _Floats = pieces.sum(axis=-1, dtype=np.uint32).astype(np.float64)
    return (total - 2 * 65535) * (3**0.5 / 65536)


class _PlantedModel:
    """Rows and their logits as a function of the row number."""

    def __init__(
        self, seed: int, alpha: float, table_rows: Sequence[int], click_rate: float
    ) -> None:
        seed, alpha = seed_of(seed), real("alpha", alpha)
        if not alpha >= 0:
            raise ValueError(f"alpha is {alpha}; it must be at least 0.")
        counts = _counts(table_rows)
        click_rate = real("click_rate", click_rate)
        if not 0 < click_rate < 1:
            raise ValueError(f"click_rate is {click_rate}; it must lie in (0, 1).")
        n = np.array(counts, np.float64)[:, None]
        self._table_rows = np.array(counts, np.int64)[:, None]
        self._gamma = 1 - alpha
        self._span = (n + 1) ** self._gamma - 1 if self._gamma else np.log(n + 1)
        self._id_keys = _keys(seed, _ID, 26)[:, None]
        self._integer_keys = _keys(seed, _INTEGER, 13)
        self._label_key = _key(seed, _LABEL)
        self._scatter = _keys(seed, _SCATTER, 26)[:, None] >> np.uint64(32)
        self._weight_keys = _keys(seed, _WEIGHT, 26)[:, None]
        # A column of few ids can be learned from few rows, so it carries more of the signal.
        self._scales = 0.45 / (1 + np.log10(n) / 3)
        self._slopes = 0.12 * _bell(_keys(seed, _SLOPE, 13))
        self._bias = 0.0
        logit = self.rows(_SAMPLE_START, _SAMPLE_START + _SAMPLE_ROWS).logit
        self._bias = _bias_for(logit, click_rate)
        self.auc = _expected_auc(1 / (1 + np.exp(-logit - self._bias)))

    def rows(self, begin: int, end: int) -> _Rows:
        row = np.arange(begin, end, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        words = _mix(self._id_keys + row)
        ids = self._scattered(self._ranks(_uniform(words)))
        missing = (words & np.uint64(2047)) < np.array(_CATEGORY_MISSING, np.uint64)[:, None]
        ids[missing] = MISSING_ID
        weights = _bell(_mix(self._weight_keys + ids.astype(np.uint64)))
        integers = self._integers(row)
        logit = (weights * self._scales).sum(axis=0) + _logarithm(integers) @ self._slopes
        logit += self._bias
        chance = _uniform(_mix(self._label_key + row))
        label = (chance < 1 / (1 + np.exp(-logit))).astype(np.uint8)
        return _Rows(label, integers, ids, logit)

    def _ranks(self, uniform: _Floats) -> _Words:
        if self._gamma:
            value = (uniform * self._span + 1) ** (1 / self._gamma)
        else:
            value = np.exp(uniform * self._span)
        # Rounding in the power may reach one beyond the last rank.
        return np.clip(value.astype(np.int64) - 1, 0, self._table_rows - 1).astype(np.uint64)

    def _scattered(self, rank: _Words) -> _Ints:
        """A bijection of 32-bit words: odd factors and shifted xors, keyed by column."""
        word = np.uint64(0xFFFFFFFF)
        x = rank ^ self._scatter
        x ^= x >> np.uint64(16)
        x = x * np.uint64(0x85EBCA6B) & word
        x ^= x >> np.uint64(13)
        x = x * np.uint64(0xC2B2AE35) & word
        x ^= x >> np.uint64(16)
        ids: _Ints = x.astype(np.int64)
        return ids

    def _integers(self, row: _Words) -> _Ints:
        """Counts with a long tail: log-logistic, its scale and shape differing by column."""
        words = _mix(self._integer_keys + row[:, None])
        uniform = _uniform(words)
        column = np.arange(len(DENSE))
        middle, shape = np.exp((column * 5 % 13) / 2.0), 0.4 + (column * 7 % 13) / 20
        tail = (uniform / (1 - uniform)) ** shape
        integers: _Ints = np.minimum(middle * tail, 1e9).astype(np.int64)
        integers[:, 1] -= 3  # I2 of the real log starts below 0
        missing = (words & np.uint64(2047)) < np.array(_DENSE_MISSING, np.uint64)
        integers[missing] = _MISSING_INTEGER
        return integers


def _counts(table_rows: Iterable[object]) -> list[int]:
    """Ids of each of the 26 columns."""
    try:
        given = list(table_rows)
    except TypeError:
        raise InputError(f"table_rows is {brief(table_rows)}; give a list of 26 numbers.") from None
    if len(given) != len(CATEGORIES):
        raise InputError(f"table_rows has {len(given)} entries; there are 26 columns.")
    counts = [integer(count) for count in given]
    for name, count, value in zip(CATEGORIES, counts, given, strict=True):
        if count is None or not 1 <= count <= 2**32:
            raise InputError(
                f"table_rows of {name} is {brief(value)}; it must be an integer in [1, 2**32]."
            )
    return [count for count in counts if count is not None]


def _bias_for(logit: _Floats, rate: float) -> float:
    """The number that, added to every logit, makes the mean chance `rate`; by bisection."""
    low, high = -100.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        if (1 / (1 + np.exp(np.clip(-logit - middle, -700, 700)))).mean() < rate:
            low = middle
        else:
            high = middle
    return low


def _expected_auc(chance: _Floats) -> float:
    """The AUC of scoring rows by their true chance, over the draw of labels.

    Sum over pairs i != j with chance i > chance j of p_i (1 - p_j), over the sum of all such pairs.
    """
    p = np.sort(chance)
    below = np.cumsum(1 - p) - (1 - p)
    own = (p * (1 - p)).sum()  # pairs of a row with itself do not exist
    return float((p * below).sum() / (p.sum() * (1 - p).sum() - own))
