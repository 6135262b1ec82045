"""The dtype that autocast wants."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["autocast_dtype"]


def autocast_dtype(tensor: Tensor, otherwise: torch.dtype) -> torch.dtype:
    """The dtype to compute in on the tensor's device: autocast's, where that is on.

    As torch does it: float64 stays what it is.
    """
    kind = tensor.device.type
    if otherwise != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return otherwise
