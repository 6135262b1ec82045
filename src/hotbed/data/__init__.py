"""Readers and generators of training data."""

from hotbed.data.criteo import CATEGORIES, DENSE, MISSING_ID, CriteoLog, Skipped
from hotbed.data.lines import DataError

__all__ = [
    "CATEGORIES",
    "DENSE",
    "MISSING_ID",
    "CriteoLog",
    "DataError",
    "Skipped",
]
