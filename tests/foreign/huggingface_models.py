"""BERT of Hugging Face's transformers, by its token embeddings."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

TOKENS = 20_000


def bert() -> Any:
    config = BertConfig(
        vocab_size=TOKENS,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=1,
    )
    return BertForSequenceClassification(config)


def batch(number: int, samples: slice = slice(0, 32)) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    ids = torch.randint(1, TOKENS, (32, 6), generator=draw)[samples]
    return ids, torch.randint(0, 2, (32, 1), generator=draw).float()[samples]


def loss(model: Any, given: tuple[Tensor, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(given[0]).logits, given[1])
