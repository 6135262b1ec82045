"""Checks of dense columns, and of how many a model is made for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hotbed.errors import InputError, TableError

__all__ = ["check_num_dense", "check_samples", "dense_of"]


def check_num_dense(model: object, num_dense: object, least: int) -> None:
    """Raise TableError if `num_dense` is no integer from `least` on."""
    if isinstance(num_dense, bool) or not isinstance(num_dense, int) or num_dense < least:
        raise TableError(
            f"{type(model).__name__}: num_dense must be an integer from {least} on, got {num_dense!r}."
        )


def dense_of(model: object, batch: Mapping[str, Tensor], num_dense: int) -> Tensor:
    """Return ``batch["dense"]``.

    Raises:
        InputError: it is missing, no tensor of floating point, or not of shape (B, `num_dense`); or the batch
            is no dict.
    """
    if not isinstance(batch, Mapping):
        raise InputError(
            f"{type(model).__name__}: the batch is {type(batch).__name__}. Pass a dict of tensors."
        )
    dense = batch.get("dense")
    if isinstance(dense, Tensor) and dense.dim() == 2 and dense.shape[1] == num_dense:
        if not dense.is_floating_point():
            raise InputError(
                f"{type(model).__name__}: batch['dense'] is {dense.dtype}. Convert it with .float()."
            )
        return dense
    found = f"shape {tuple(dense.shape)}" if isinstance(dense, Tensor) else type(dense).__name__
    raise InputError(
        f"{type(model).__name__}: batch['dense'] must be a tensor of shape (B, {num_dense}), got "
        f"{'none' if dense is None else found}. The model was made with num_dense={num_dense}."
    )


def check_samples(model: object, dense: Tensor, feature: str, vectors: Tensor) -> None:
    """Raise InputError if the dense columns and the vectors of a feature are not of as many samples, or only
    the columns are float64."""
    if dense.dtype == torch.float64 and vectors.dtype != torch.float64:
        raise InputError(
            f"{type(model).__name__}: batch['dense'] is torch.float64, and the vectors are {vectors.dtype}. "
            "Convert it with .float()."
        )
    # torch.export takes what len() gives for a constant.
    samples = vectors.shape[0] if isinstance(vectors, Tensor) else len(vectors)
    if dense.shape[0] != samples:
        raise InputError(
            f"{type(model).__name__}: batch['dense'] has {len(dense)} samples, and feature {feature!r} "
            f"{len(vectors)}. Give all of a batch the same number."
        )
