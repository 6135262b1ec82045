"""`criteo_ids`: ids of the categories in the Criteo click logs."""

from __future__ import annotations

import re

import numpy as np
import torch
from torch import Tensor

from hotbed.arrays import describe
from hotbed.data.criteo import MISSING_ID
from hotbed.errors import InputError

__all__ = ["criteo_ids"]

_DIGITS = re.compile("[0-9a-fA-F]{8}")


def criteo_ids(values: object) -> Tensor:
    """int64 ids of the text in columns C1 to C26, as `CriteoLog` reads them.

    >>> hb.data.criteo_ids(["68fd1e64", ""])      # tensor([1761418852, -1])

    Args:
        values: 8 hexadecimal digits, as a string or bytes, (nested) lists of them, or an array: NumPy's, a
            pandas or Arrow column. What is missing (``""``, None, NaN) has the id -1.

    Returns:
        int64 on the host, of the shape of `values`.

    Raises:
        InputError: other text.
    """
    if isinstance(values, np.ma.MaskedArray):
        raise InputError("criteo_ids: a masked array has values missing; give .filled('').")
    try:
        array = np.asarray(values, object)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"criteo_ids: got {describe(values)}, of which NumPy says: {error}"
        ) from None
    ids = [_id_of(value) for value in array.ravel().tolist()]
    return torch.tensor(ids, dtype=torch.int64, device="cpu").view(array.shape)


def _id_of(value: object) -> int:
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    if isinstance(text, str) and _DIGITS.fullmatch(text):
        return int(text, 16)
    named = type(value).__name__ in ("NoneType", "NAType", "NaTType")
    if named or text == "" or (isinstance(value, float) and value != value):
        return MISSING_ID
    raise InputError(
        f"criteo_ids: a category is 8 hexadecimal digits, or '' where it is missing; got {describe(value)}. "
        "hotbed.data.hash_ids makes ids of any text."
    )
