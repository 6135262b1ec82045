"""How well a model of two towers finds the items that users chose.

Shapes: B samples, N items, S sampled items.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.arrays import integer
from hotbed.errors import InputError
from hotbed.models.item_index import ItemIndex
from hotbed.models.two_tower import TwoTower

__all__ = ["RetrievalQuality", "evaluate_retrieval", "ranks_of_items"]


class RetrievalQuality(NamedTuple):
    """Means over the samples of `evaluate_retrieval`; NaN where there are none."""

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
        model: put into evaluation mode meanwhile.
        batches: users and items, by the model's features.
        index: the items, made of the same model by `ItemIndex.of`.
        k: the cuts.
        sampled: compare with so many items drawn evenly instead of all: cheaper, and larger figures, which
            compare with nothing but figures of the same number (Krichene and Rendle, "On Sampled Metrics for
            Item Recommendation", KDD 2020).
        seed: of the draws.

    Raises:
        InputError: a cut or `sampled` is no positive integer, an item is not in the index, or a batch's
            labels are not one a sample.
    """
    cuts = [integer(cut) or 0 for cut in k] if isinstance(k, Sequence) else []
    if min(cuts, default=0) < 1 or (sampled is not None and (integer(sampled) or 0) < 1):
        raise InputError(
            f"evaluate_retrieval: k is {k!r} and sampled {sampled!r}. Pass positive numbers, k in a list, "
            "and sampled=None for all items."
        )
    generator = torch.Generator().manual_seed(seed)
    # Closed at once where a batch is refused, so that the model is in its mode again.
    with contextlib.closing(_pairs(model, batches)) as pairs:
        found = [ranks_of_items(index, users, ids, sampled, generator) for users, ids in pairs]
    ranks = torch.cat([torch.empty(0, dtype=torch.int64), *found])
    gains = (ranks + 2).double().log2().reciprocal()
    recall = {cut: float((ranks < cut).double().mean()) for cut in cuts}
    ndcg = {cut: float(torch.where(ranks < cut, gains, 0.0).mean()) for cut in cuts}
    return RetrievalQuality(recall, ndcg, len(ranks))


def ranks_of_items(
    index: ItemIndex,
    users: Tensor,
    ids: Tensor,
    sampled: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the number of items that do not score less than each user's own, int64 (B,), from 0.

    A user's vector with NaN scores nothing, so that all items count.

    Args:
        users: vectors, (B, w).
        ids: the users' own items, int64 (B,).
        sampled: compare with so many items, drawn evenly with `generator`; None: with all.

    Raises:
        InputError: an item is not in the index, or the shapes do not fit together.
    """
    width = index.vectors.shape[1]
    if ids.dim() != 1 or users.shape != (len(ids), width):
        raise InputError(
            f"users have shape {tuple(users.shape)}, and ids {tuple(ids.shape)}. Pass (B, {width}) and (B,)."
        )
    if not len(index) and len(ids):
        raise InputError(f"Item {int(ids[0])} is not in the index, which is empty.")
    users, ids = users.float().cpu(), ids.long().cpu()
    known, vectors = index.ids.cpu(), index.vectors.float().cpu()
    order = index.ids.argsort()
    there = torch.searchsorted(known[order], ids).clamp_max(len(index) - 1)
    at = order[there]
    missing = known[at] != ids
    if missing.any():
        raise InputError(
            f"Item {int(ids[missing][0])} is not in the index. Make it of all items: "
            "ItemIndex.of(model, batches)."
        )
    at = at.unsqueeze(1)
    if sampled is None:
        scores = users @ vectors.T
        own, others = scores.gather(1, at), torch.arange(len(index)) != at
    else:
        drawn = torch.randint(len(index), (len(ids), sampled), generator=generator)
        both = torch.cat([at, drawn], 1)
        scores = torch.einsum("bw,bsw->bs", users, vectors[both])
        own, others = scores[:, :1], both != at
    return (~(scores < own) & others).sum(1)


def _pairs(
    model: TwoTower, batches: Iterable[Mapping[str, Tensor]]
) -> Generator[tuple[Tensor, Tensor], None, None]:
    """Yield the vectors of users and the ids of their items, of positive samples."""
    training = model.training
    model.eval()
    try:
        for batch in batches:
            with torch.no_grad():
                users = model.user_vectors(batch).float().cpu()
            ids = model.item_ids(batch).cpu()
            if "label" in batch:
                chosen = batch["label"].cpu() > 0.5
                if chosen.shape != ids.shape:
                    raise InputError(
                        f"evaluate_retrieval: batch['label'] has shape {tuple(chosen.shape)}. Pass one a "
                        f"sample, {tuple(ids.shape)}."
                    )
                users, ids = users[chosen], ids[chosen]
            yield users, ids
    finally:
        model.train(training)
