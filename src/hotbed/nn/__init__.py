"""Layers around the tables: what a recommender's dense part is made of."""

from hotbed.nn.clip import clip_grad_norm_, clip_grad_value_
from hotbed.nn.compressed_interaction import CompressedInteraction
from hotbed.nn.concat import concat
from hotbed.nn.cross_interaction import CrossInteraction
from hotbed.nn.dot_interaction import DotInteraction
from hotbed.nn.factorization import FactorizationMachine
from hotbed.nn.in_batch import FrequencyEstimate, in_batch_logits, in_batch_softmax
from hotbed.nn.mixture import MixtureOfExperts
from hotbed.nn.mlp import MLP
from hotbed.nn.multi_head import SelfAttentionInteraction
from hotbed.nn.target_attention import Dice, TargetAttention
from hotbed.nn.two_streams import BilinearFusion, FeatureGate

__all__ = [
    "MLP",
    "BilinearFusion",
    "CompressedInteraction",
    "CrossInteraction",
    "Dice",
    "DotInteraction",
    "FactorizationMachine",
    "FeatureGate",
    "FrequencyEstimate",
    "MixtureOfExperts",
    "SelfAttentionInteraction",
    "TargetAttention",
    "clip_grad_norm_",
    "clip_grad_value_",
    "concat",
    "in_batch_logits",
    "in_batch_softmax",
]


def __dir__() -> list[str]:
    """Only what is public, for completion."""
    return __all__
