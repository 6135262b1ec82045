"""`Embedding`: a drop-in for torch's."""

from __future__ import annotations

import torch
from torch import Tensor

from hotbed import init as initializers
from hotbed.arrays import id_tensor, is_array
from hotbed.devices import Device
from hotbed.group.group import Group
from hotbed.inputs.bags import Bags, read_bags
from hotbed.jagged import Jagged
from hotbed.modules.one_table import OneTable, refuse_options, weights_of
from hotbed.ops.outside_graphs import outside_graphs

__all__ = ["Embedding"]


class Embedding(OneTable):
    """``torch.nn.Embedding`` over a Hotbed table: same arguments, same results.

    ``num_embeddings=None`` makes the table dynamic: any int64 id, a row for each one that training
    has met. The gradient is always sparse (``sparse=False`` is accepted and changes nothing but
    that), and ``hotbed.optim`` applies it. First values are N(0, 1), drawn by row from a key that
    ``torch.manual_seed`` governs; they are not torch's own numbers.

    Input: int64 or int32 ids of any shape ``(*)``, a tensor, a NumPy array or (nested) lists; output
    ``(*, embedding_dim)``. A `Jagged` of ids gives a `Jagged` of vectors.

    Raises:
        TableError: an argument that cannot be honoured: ``max_norm`` (it would rewrite rows in a
            forward), ``scale_grad_by_freq``.
        IdError, InputError: from forward, before anything has changed.
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = True,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
        *,
        init: initializers.Initializer | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        refuse_options("Embedding", max_norm, scale_grad_by_freq)
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, True
        self._make(
            "Embedding",
            (num_embeddings, embedding_dim),
            "none",
            padding_idx,
            _weight,
            device,
            dtype,
            init,
            group,
        )
        self._live.parameter.requires_grad_(not _freeze)

    @classmethod
    def from_pretrained(
        cls,
        embeddings: object,
        freeze: bool = True,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = True,
    ) -> Embedding:
        """Return a layer with a copy of these weights, frozen by default as torch's.

        ``embeddings``: (rows, dim), a tensor, a NumPy array or lists.

        Raises:
            TableError, InputError: they are no such weights.
        """
        weights = weights_of(embeddings)
        rows, dim = weights.shape
        return cls(
            rows,
            dim,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            _weight=weights,
            _freeze=freeze,
        )

    @outside_graphs
    def forward(self, input: object) -> Tensor | Jagged:
        with self._live.place.ranks.reporting("a lookup"):
            return self._forward(input)

    def _forward(self, input: object) -> Tensor | Jagged:
        self._refuse_transforms()
        if is_array(input):
            input = id_tensor("Feature 'input'", input)
        single = isinstance(input, Tensor) and input.dim() == 0
        (bags,) = self._bags_of(input)
        vectors = self._vectors(bags)
        if bags.offsets is not None:
            return Jagged(vectors, bags.offsets)
        return vectors[0] if single else vectors

    def _bags_of(self, inputs: object) -> list[Bags]:
        if is_array(inputs):
            inputs = id_tensor("Feature 'input'", inputs)
        if isinstance(inputs, Tensor) and inputs.dim() == 0:
            inputs = inputs[None]
        table = self._live
        return [read_bags("input", inputs, table.compute_dtype, "none", table.device)]

    def extra_repr(self) -> str:
        padding = f", padding_idx={self.padding_idx}" if self.padding_idx is not None else ""
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"
