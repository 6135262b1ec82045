"""Items drawn as negatives.

Shapes: n positive samples, k negatives of each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from hotbed.arrays import id_tensor, integer
from hotbed.data.blocks import Value
from hotbed.data.criteo_lines import Batch
from hotbed.errors import InputError

__all__ = ["PopularItems", "uniform_items", "with_negatives"]


def uniform_items(
    count: int, items: int | Tensor, *, generator: torch.Generator | None = None
) -> Tensor:
    """Return `count` ids, int64 (count,), drawn evenly with replacement.

    Args:
        count: how many.
        items: the number of items, whose ids begin at 0, or their ids, int64 (N,).
        generator: of the draws. Default: torch's.

    Raises:
        InputError: there are no items, or `count` is no number of them.
    """
    ids = id_tensor("uniform_items", items).flatten() if isinstance(items, Tensor) else None
    number = len(ids) if ids is not None else integer(items)
    if number is None or not 1 <= number < 2**63:
        raise InputError(f"uniform_items: items is {items!r}. Pass a positive number, or ids.")
    _check_count("uniform_items", count)
    drawn = torch.randint(number, (count,), generator=generator)
    return drawn if ids is None else ids[drawn]


class PopularItems:
    """Items drawn with a probability that grows with how often they occur: ``count ** power``.

    The power 0.75 is that of word2vec (Mikolov et al., arXiv:1310.4546), 1 the share itself, 0 evenly.

    Args:
        ids: int64 (N,), in which items occur as often as they do, such as those of all positive samples.
        power: of the counts.

    Raises:
        InputError: there are no items, ids are no integers, or the power is not finite.
    """

    def __init__(self, ids: Tensor, power: float = 0.75) -> None:
        ids = id_tensor("PopularItems", ids).long().flatten()
        if (
            isinstance(power, bool)
            or not isinstance(power, int | float)
            or not math.isfinite(power)
        ):
            raise InputError(f"PopularItems: power is {power!r}. Pass a finite number.")
        if not len(ids):
            raise InputError("PopularItems: there are no ids. Pass those of the positive samples.")
        self.ids, counts = torch.unique(ids, return_counts=True)
        self.probability = (power * counts.double().log()).softmax(0)
        """float64, of each of `ids`, which are distinct and in order."""
        self._ends = self.probability.cumsum(0)

    def sample(self, count: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Return `count` ids, int64 (count,), drawn with replacement.

        Raises:
            InputError: `count` is no number of items.
        """
        _check_count("PopularItems.sample", count)
        at = torch.rand(count, dtype=torch.float64, generator=generator) * self._ends[-1]
        drawn = torch.searchsorted(self._ends, at, right=True).clamp_max(len(self.ids) - 1)
        sampled: Tensor = self.ids[drawn]
        return sampled


def _check_count(function: str, count: object) -> None:
    given = integer(count)
    if given is None or given < 0:
        raise InputError(f"{function}: count is {count!r}. Pass 0 or a positive integer.")


def with_negatives(batch: Mapping[str, Value], negatives: Tensor, item: str = "item") -> Batch:
    """Return a batch of n positive samples followed by k negatives of each, with labels 1 and 0.

    Args:
        batch: tensors whose first dimension is n, Jagged of n bags, and lists of n texts.
        negatives: int64 (n · k,), those of the first sample first.
        item: the feature that negatives take the place of.

    Raises:
        InputError: the feature is missing, or not of one id a sample; n does not divide the number of
            negatives; or a value of the batch is not of n samples.
    """
    positives = batch.get(item)
    if not isinstance(positives, Tensor) or positives.dim() != 1:
        raise InputError(f"with_negatives: feature {item!r} must be ids, (n,), got {positives!r}.")
    count, negatives = len(positives), id_tensor("with_negatives", negatives)
    if negatives.dim() != 1 or not count or len(negatives) % count:
        raise InputError(
            f"with_negatives: there are negatives of shape {tuple(negatives.shape)} for feature {item!r} of "
            f"{count} samples. Pass the same number for each, those of the first sample first."
        )
    for name, value in batch.items():
        if len(value) != count:
            raise InputError(
                f"with_negatives: batch[{name!r}] has {len(value)} samples, and {item!r} {count}. Give all "
                "the same number."
            )
    each = torch.arange(count)
    rows = torch.cat([each, each.repeat_interleave(len(negatives) // count)])
    taken: dict[str, Value] = {
        name: [value[row] for row in rows.tolist()] if isinstance(value, list) else value[rows]
        for name, value in batch.items()
    }
    made = cast(Batch, taken)
    made[item] = torch.cat([positives, negatives])
    label = torch.zeros(len(rows))
    label[:count] = 1
    made["label"] = label
    return made
