"""Digests of values, by which processes find out that theirs differ."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

__all__ = ["digest_of"]


def digest_of(value: object) -> str:
    """Return hex digits that equal values have in common: of tensors by dtype, shape and bytes, of containers
    of what is in them in their order, of other objects by their text."""
    digest = hashlib.sha256()
    _add(digest.update, value)
    return digest.hexdigest()


def _add(update: Callable[[bytes | memoryview], None], value: object) -> None:
    if isinstance(value, Tensor):
        update(f"tensor {value.dtype} {tuple(value.shape)};".encode())
        if value.numel():
            raw = value.detach().cpu().to_dense().contiguous().reshape(-1).view(torch.uint8)
            update(raw.numpy().data)
    elif isinstance(value, Mapping):
        update(f"mapping {len(value)};".encode())
        for name, item in value.items():
            _add(update, name)
            _add(update, item)
    elif isinstance(value, (list, tuple)):
        update(f"sequence {len(value)};".encode())
        for item in value:
            _add(update, item)
    else:
        text = repr(value)
        update(f"{type(value).__qualname__} {'' if ' at 0x' in text else text};".encode())
