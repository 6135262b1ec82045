"""Items drawn as negatives.

Shapes: n positive samples, k negatives of each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hotbed.arrays import integer
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
        InputError: there are no items.
    """
    ids = items if isinstance(items, Tensor) else None
    number = len(ids) if ids is not None else integer(items)
    if number is None or number < 1:
        raise InputError(f"uniform_items: items is {items!r}. Pass a positive number, or ids.")
    drawn = torch.randint(number, (count,), generator=generator)
    return drawn if ids is None else ids[drawn]


class PopularItems:
    """Items drawn with a probability that grows with how often they occur: ``count ** power``.

    The power 0.75 is that of word2vec (Mikolov et al., arXiv:1310.4546), 1 the share itself, 0 evenly.

    Args:
        ids: int64 (N,), in which items occur as often as they do, such as those of all positive samples.
        power: of the counts.

    Raises:
        InputError: there are no items.
    """

    def __init__(self, ids: Tensor, power: float = 0.75) -> None:
        if not len(ids):
            raise InputError("PopularItems: there are no ids. Pass those of the positive samples.")
        self.ids, counts = torch.unique(ids, return_counts=True)
        weights = counts.double() ** power
        self.probability = weights / weights.sum()
        """float64, of each of `ids`, which are distinct and in order."""
        self._ends = self.probability.cumsum(0)

    def sample(self, count: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Return `count` ids, int64 (count,), drawn with replacement."""
        at = torch.rand(count, dtype=torch.float64, generator=generator) * self._ends[-1]
        drawn = torch.searchsorted(self._ends, at, right=True).clamp_max(len(self.ids) - 1)
        sampled: Tensor = self.ids[drawn]
        return sampled


def with_negatives(
    batch: dict[str, Tensor], negatives: Tensor, item: str = "item"
) -> dict[str, Tensor]:
    """Return a batch of n positive samples followed by k negatives of each, with labels 1 and 0.

    Args:
        batch: tensors whose first dimension is n.
        negatives: int64 (n · k,), those of the first sample first.
        item: the feature that negatives take the place of.

    Raises:
        InputError: there is no such feature, or n does not divide the number of negatives.
    """
    if item not in batch or not len(batch[item]) or len(negatives) % len(batch[item]):
        raise InputError(
            f"with_negatives: there are {len(negatives)} negatives for feature {item!r} of "
            f"{len(batch.get(item, ()))} samples. Pass the same number for each."
        )
    each = len(negatives) // len(batch[item])
    made = {
        name: torch.cat([value, value.repeat_interleave(each, 0)]) for name, value in batch.items()
    }
    made[item] = torch.cat([batch[item], negatives])
    label = torch.zeros(len(made[item]))
    label[: len(batch[item])] = 1
    made["label"] = label
    return made
