"""`EmbeddingBag`: a drop-in for torch's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotbed import init as initializers
from hotbed.errors import InputError, TableError
from hotbed.inputs import Bags, Jagged, read_bags
from hotbed.one_table import OneTable, check_given, refuse_options, reset, shape_of
from hotbed.resolve.outside_graphs import outside_graphs

__all__ = ["EmbeddingBag"]


class EmbeddingBag(OneTable):
    """``torch.nn.EmbeddingBag`` over a Hotbed table: same arguments, same results.

    ``num_embeddings=None`` makes the table dynamic. ``mode`` may also be ``"sqrtn"``. The gradient
    is always sparse, for every mode. See `Embedding` for first values and optimizers.

    Input: (B, K) ids, or (N,) ids with ``offsets``; or one of the kinds of `hotbed.inputs`. Output
    (B, embedding_dim).

    Raises:
        TableError: ``max_norm``, ``scale_grad_by_freq``, an unknown mode.
        IdError, InputError: from forward, before anything has changed.
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = True,
        _weight: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        init: initializers.Initializer | None = None,
    ) -> None:
        super().__init__()
        refuse_options("EmbeddingBag", max_norm, scale_grad_by_freq)
        if mode not in ("sum", "mean", "max", "sqrtn"):
            raise TableError(
                f"hotbed.EmbeddingBag: mode must be sum, mean, max or sqrtn, got {mode!r}."
            )
        self.sparse = True
        self.mode = mode
        self.include_last_offset = include_last_offset
        if _weight is not None:
            check_given("EmbeddingBag", _weight, num_embeddings, embedding_dim)
            dtype, init = dtype or _weight.dtype, initializers.Zeros()
        self._make(
            "EmbeddingBag", num_embeddings, embedding_dim, mode, padding_idx, dtype, init, device
        )
        if _weight is not None:
            self._assign_weight(_weight.detach())

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = True,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
    ) -> EmbeddingBag:
        """A layer with these (rows, dim) weights, copied; frozen by default, as torch's."""
        rows, dim = shape_of(embeddings)
        layer = cls(
            rows,
            dim,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            sparse,
            embeddings,
            include_last_offset,
            padding_idx,
        )
        layer._live.parameter.requires_grad_(not freeze)
        return layer

    def reset_parameters(self) -> None:
        """Gives every row a new first value."""
        reset(self._live)

    @outside_graphs
    def forward(
        self, input: Any, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        return self._lookup(self._bags(input, offsets, per_sample_weights))

    def _bags(self, input: Any, offsets: Tensor | None, weights: Tensor | None) -> Bags:
        compute = self._live.spec.compute_dtype
        plain = isinstance(input, Tensor) and input.layout is torch.strided and not input.is_nested
        if weights is not None:
            if not plain:
                raise InputError(
                    "per_sample_weights go with a tensor of ids; give Jagged(weights=...)."
                )
            if self.mode == "max":
                raise InputError("per_sample_weights need mode sum, mean or sqrtn, not max.")
            if weights.shape != input.shape:
                raise InputError(
                    f"per_sample_weights must have the shape of input, {tuple(input.shape)}, "
                    f"got {tuple(weights.shape)}."
                )
        if not plain:
            if offsets is not None:
                raise InputError("offsets go with a 1-D tensor of ids.")
            return read_bags("input", input, compute, self.mode)
        if input.dim() == 2:
            if offsets is not None:
                raise InputError("offsets go with a 1-D input; a 2-D input is (bags, ids a bag).")
            bags = read_bags("input", input, compute, self.mode)
            if weights is None:
                return bags
            return bags._replace(weights=weights.to(compute).reshape(-1).contiguous())
        if input.dim() != 1:
            raise InputError(f"input must be 1-D or 2-D, got shape {tuple(input.shape)}.")
        if offsets is None or offsets.dim() != 1 or offsets.dtype not in (torch.int64, torch.int32):
            raise InputError(
                "A 1-D input needs offsets, a 1-D int64 tensor: the start of each bag."
            )
        if not self.include_last_offset:
            end = torch.tensor([len(input)], dtype=offsets.dtype)
            offsets = torch.cat([offsets, end])
        elif len(offsets) == 0:
            raise InputError("include_last_offset=True needs at least one offset.")
        return read_bags("input", Jagged(input, offsets, weights=weights), compute, self.mode)

    def extra_repr(self) -> str:
        padding = f", padding_idx={self.padding_idx}" if self.padding_idx is not None else ""
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}{padding}"
