"""Hotbed: recommender models whose embedding tables outgrow GPU memory, as plain PyTorch modules."""

import torch  # noqa: F401  (first: the core shares the OpenMP runtime that torch brings)

from hotbed import checkpoint, data, dist, init, models, nn, optim, serve, train
from hotbed.ahead.lookahead import lookahead
from hotbed.checkpoint import load, save
from hotbed.collection import EmbeddingCollection, Rows
from hotbed.conversion.convert import Conversion, convert, unconvert
from hotbed.dist import distribute, plan
from hotbed.embedding import Embedding
from hotbed.embedding_bag import EmbeddingBag
from hotbed.erasing import erase
from hotbed.errors import (
    HotbedError,
    IdError,
    InputError,
    NotFiniteError,
    OptimizerError,
    OutOfMemory,
    PlanError,
    StorageError,
    TableError,
)
from hotbed.graphs import graphed
from hotbed.group.group import Group
from hotbed.jagged import Jagged
from hotbed.optim import split_parameters
from hotbed.serve import export
from hotbed.storage import Storage
from hotbed.tables import Table

__version__ = "0.1.0"

__all__ = [
    "Conversion",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingCollection",
    "Group",
    "HotbedError",
    "IdError",
    "InputError",
    "Jagged",
    "NotFiniteError",
    "OptimizerError",
    "OutOfMemory",
    "PlanError",
    "Rows",
    "Storage",
    "StorageError",
    "Table",
    "TableError",
    "checkpoint",
    "convert",
    "data",
    "dist",
    "distribute",
    "erase",
    "export",
    "graphed",
    "init",
    "load",
    "lookahead",
    "models",
    "nn",
    "optim",
    "plan",
    "save",
    "serve",
    "split_parameters",
    "train",
    "unconvert",
]


def __dir__() -> list[str]:
    """Only what is public, for completion."""
    return [*__all__, "__version__"]
