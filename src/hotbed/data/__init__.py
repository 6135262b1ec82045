"""Readers and generators of training data."""

from hotbed.data.categories import criteo_ids
from hotbed.data.columns import Column, Id, Ids, Key, Label, Number, Pair, Sequence
from hotbed.data.criteo import MISSING_ID, CriteoLog
from hotbed.data.criteo_lines import CATEGORIES, DENSE
from hotbed.data.fields import SchemaError
from hotbed.data.hashing import hash_ids
from hotbed.data.lines import DataError
from hotbed.data.negatives import PopularItems, uniform_items, with_negatives
from hotbed.data.reader import ColumnFiles
from hotbed.data.schema import Schema
from hotbed.data.synthetic import SyntheticClicks, synthetic_clicks, write_criteo_tsv
from hotbed.data.windows import Skipped

open = ColumnFiles

__all__ = [
    "CATEGORIES",
    "DENSE",
    "MISSING_ID",
    "PopularItems",
    "Column",
    "ColumnFiles",
    "CriteoLog",
    "DataError",
    "Id",
    "Ids",
    "Key",
    "Label",
    "Number",
    "Pair",
    "Schema",
    "SchemaError",
    "Sequence",
    "Skipped",
    "SyntheticClicks",
    "criteo_ids",
    "hash_ids",
    "open",
    "synthetic_clicks",
    "uniform_items",
    "with_negatives",
    "write_criteo_tsv",
]


def __dir__() -> list[str]:
    """Only what is public, for completion."""
    return __all__
