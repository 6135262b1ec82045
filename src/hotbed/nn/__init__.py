"""Layers around the tables: what a recommender's dense part is made of."""

from hotbed.nn.clip import clip_grad_norm_, clip_grad_value_
from hotbed.nn.compressed_interaction import CompressedInteraction
from hotbed.nn.concat import concat
from hotbed.nn.cross_interaction import CrossInteraction
from hotbed.nn.dot_interaction import DotInteraction
from hotbed.nn.factorization import FactorizationMachine
from hotbed.nn.mlp import MLP

__all__ = [
    "MLP",
    "CompressedInteraction",
    "CrossInteraction",
    "DotInteraction",
    "FactorizationMachine",
    "clip_grad_norm_",
    "clip_grad_value_",
    "concat",
]


def __dir__() -> list[str]:
    """Only what is public, for completion."""
    return __all__
