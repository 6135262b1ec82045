"""How well a model of two towers finds the items that users chose.

Shapes: B samples, N items, S sampled items.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.errors import InputError
from hotbed.models.item_index import ItemIndex
from hotbed.models.two_tower import TwoTower

__all__ = ["RetrievalQuality", "evaluate_retrieval", "ranks_of_items"]


class RetrievalQuality(NamedTuple):
    """Means over the samples of `evaluate_retrieval`."""

    recall: dict[int, float]
    """Share of samples whose item is among the first k, by k."""
    ndcg: dict[int, float]
    """1 / log2(rank + 1) where the item's rank, from 1, is at most k, else 0; by k."""
    samples: int


def evaluate_retrieval(
    model: TwoTower,
    batches: Iterable[Mapping[str, Tensor]],
    index: ItemIndex,
    *,
    k: Sequence[int] = (10, 50),
    sampled: int | None = None,
    seed: int = 0,
) -> RetrievalQuality:
    """Return recall and NDCG at `k` of the items that users chose, among all items of the index.

    Each positive sample (``batch["label"]`` above 0.5, or all where there is no label) is one query with
    one item to be found; others of the same user count among the rest. Ties count against the model.

    Args:
        model: put into evaluation mode meanwhile. batches: of users and items, by the model's features.
        index: the items, made of the same model by `ItemIndex.of`. k: the cuts. sampled: compare with so
        many items drawn evenly instead of all: cheaper, and larger figures, which compare with
            nothing but figures of the same number (Krichene and Rendle, "On Sampled Metrics for Item
            Recommendation", KDD 2020).
        seed: of the draws.

    Raises:
        InputError: a cut or `sampled` is not positive, or an item is not in the index.
    """
    if not k or min(k) < 1 or (sampled is not None and sampled < 1):
        raise InputError(
            f"evaluate_retrieval: k is {k} and sampled {sampled}. Pass positive numbers."
        )
    generator = torch.Generator().manual_seed(seed)
    found = [
        ranks_of_items(index, users, ids, sampled, generator)
        for users, ids in _pairs(model, batches)
    ]
    ranks = torch.cat([torch.empty(0, dtype=torch.int64), *found])
    gains = (ranks + 2).double().log2().reciprocal()
    recall = {cut: float((ranks < cut).double().mean()) for cut in k}
    ndcg = {cut: float(torch.where(ranks < cut, gains, 0.0).mean()) for cut in k}
    return RetrievalQuality(recall, ndcg, len(ranks))


def ranks_of_items(
    index: ItemIndex,
    users: Tensor,
    ids: Tensor,
    sampled: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the number of items that score no less than each user's own, int64 (B,), from 0.

    Args:
        users: vectors, (B, w).
        ids: the users' own items, int64 (B,).
        sampled: compare with so many items, drawn evenly with `generator`; None: with all.

    Raises:
        InputError: an item is not in the index.
    """
    order = index.ids.argsort()
    there = torch.searchsorted(index.ids[order], ids).clamp_max(len(index) - 1)
    at = order[there]
    missing = index.ids[at] != ids
    if missing.any():
        raise InputError(
            f"Item {int(ids[missing][0])} is not in the index. Make it of all items: "
            "ItemIndex.of(model, batches)."
        )
    at = at.unsqueeze(1)
    if sampled is None:
        scores = users @ index.vectors.T
        own, others = scores.gather(1, at), torch.arange(len(index)) != at
    else:
        drawn = torch.randint(len(index), (len(ids), sampled), generator=generator)
        both = torch.cat([at, drawn], 1)
        scores = torch.einsum("bw,bsw->bs", users, index.vectors[both])
        own, others = scores[:, :1], both != at
    return ((scores >= own) & others).sum(1)


def _pairs(
    model: TwoTower, batches: Iterable[Mapping[str, Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the vectors of users and the ids of their items, of positive samples."""
    training = model.training
    model.eval()
    try:
        for batch in batches:
            with torch.no_grad():
                users = model.user_vectors(batch).float().cpu()
            ids = batch[model.settings.item[0]].cpu()
            if "label" in batch:
                chosen = batch["label"].cpu() > 0.5
                users, ids = users[chosen], ids[chosen]
            yield users, ids
    finally:
        model.train(training)
