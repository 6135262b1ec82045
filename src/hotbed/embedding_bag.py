"""`EmbeddingBag`: a drop-in for torch's."""

from __future__ import annotations

import torch
from torch import Tensor

from hotbed import init as initializers
from hotbed.arrays import ID_DTYPES, describe, id_tensor, is_array, is_one_of, real_tensor
from hotbed.devices import Device
from hotbed.errors import InputError, TableError
from hotbed.group.group import Group
from hotbed.inputs.bags import Bags, read_bags
from hotbed.jagged import Jagged
from hotbed.modules.one_table import OneTable, refuse_options, weights_of
from hotbed.ops.outside_graphs import outside_graphs

__all__ = ["EmbeddingBag"]


class EmbeddingBag(OneTable):
    """``torch.nn.EmbeddingBag`` over a Hotbed table: same arguments, same results.

    ``num_embeddings=None`` makes the table dynamic. ``mode`` may also be ``"sqrtn"``. The gradient
    is always sparse, for every mode. See `Embedding` for first values and optimizers.

    Input: (B, K) ids, or (N,) ids with ``offsets``, each a tensor, a NumPy array or a list; or one of
    the kinds of `hotbed.inputs`. Output (B, embedding_dim).

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
        device: Device | None = None,
        dtype: torch.dtype | None = None,
        *,
        init: initializers.Initializer | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        refuse_options("EmbeddingBag", max_norm, scale_grad_by_freq)
        if not is_one_of(mode, ("sum", "mean", "max", "sqrtn")):
            raise TableError(
                f"hotbed.EmbeddingBag: mode must be sum, mean, max or sqrtn, got {mode!r}."
            )
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, True
        self.mode = mode
        self.include_last_offset = include_last_offset
        self._make(
            "EmbeddingBag",
            (num_embeddings, embedding_dim),
            mode,
            padding_idx,
            _weight,
            device,
            dtype,
            init,
            group,
        )

    @classmethod
    def from_pretrained(
        cls,
        embeddings: object,
        freeze: bool = True,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = True,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
    ) -> EmbeddingBag:
        """Return a layer with a copy of these weights, frozen by default as torch's.

        ``embeddings``: (rows, dim), a tensor, a NumPy array or lists.

        Raises:
            TableError, InputError: they are no such weights.
        """
        weights = weights_of(embeddings)
        rows, dim = weights.shape
        layer = cls(
            rows,
            dim,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            sparse,
            weights,
            include_last_offset,
            padding_idx,
        )
        layer.weight.requires_grad_(not freeze)
        return layer

    @outside_graphs
    def forward(
        self, input: object, offsets: object = None, per_sample_weights: object = None
    ) -> Tensor:
        with self._live.place.ranks.reporting("a lookup"):
            self._refuse_transforms()
            bags = self._bags(input, offsets, per_sample_weights)
            try:
                return self._vectors(bags)
            except InputError:  # nothing has changed
                if offsets is None or not self.include_last_offset or not _ends_early(bags):
                    raise
            return self._vectors(bags._replace(offsets=self._up_to_the_end(bags)))

    def _bags_of(self, inputs: object) -> list[Bags]:
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        return [self._bags(*given, *(None,) * (3 - len(given)))]

    def _bags(self, input: object, offsets: object, weights: object) -> Bags:
        compute = self._live.spec.compute_dtype
        if is_array(input):
            input = id_tensor("Feature 'input'", input)
        if is_array(offsets):
            offsets = id_tensor("EmbeddingBag", offsets, "offsets")
        ids = input if isinstance(input, Tensor) else None
        if ids is not None and (ids.layout is not torch.strided or ids.is_nested):
            ids = None
        of_ids: Tensor | None = None
        if weights is not None:
            if ids is None:
                raise InputError(
                    "per_sample_weights go with a tensor of ids; give Jagged(weights=...)."
                )
            if self.mode == "max":
                raise InputError("per_sample_weights need mode sum, mean or sqrtn, not max.")
            of_ids = real_tensor("EmbeddingBag", "per_sample_weights", weights)
            if of_ids.shape != ids.shape:
                raise InputError(
                    f"per_sample_weights must have the shape of input, {tuple(ids.shape)}, "
                    f"got {describe(of_ids)}."
                )
        if ids is None:
            if offsets is not None:
                raise InputError("offsets go with a 1-D tensor of ids.")
            return read_bags("input", input, compute, self.mode, self._live.device)
        if ids.dim() == 2:
            if offsets is not None:
                raise InputError("offsets go with a 1-D input; a 2-D input is (bags, ids a bag).")
            bags = read_bags("input", input, compute, self.mode, self._live.device)
            if of_ids is None:
                return bags
            return bags._replace(weights=of_ids.to(compute).reshape(-1).contiguous())
        if ids.dim() != 1:
            raise InputError(f"input must be 1-D or 2-D, got shape {tuple(ids.shape)}.")
        if not isinstance(offsets, Tensor) or offsets.dim() != 1 or offsets.dtype not in ID_DTYPES:
            raise InputError(
                "A 1-D input needs offsets, a 1-D int64 tensor: the start of each bag; got "
                f"{describe(offsets)}."
            )
        if not self.include_last_offset:
            offsets = torch.nn.functional.pad(offsets, (0, 1), value=len(ids))
        elif len(offsets) == 0:
            raise InputError("include_last_offset=True needs at least one offset.")
        jagged = Jagged(ids, offsets, weights=of_ids)
        return read_bags("input", jagged, compute, self.mode, self._live.device)

    def _up_to_the_end(self, bags: Bags) -> Tensor:
        """Offsets whose last bag takes the ids behind the last offset, where torch's layer has it so on
        every device. (Sums and means in float32 and 16 bits it computes on the CPU by code of their
        own, which leaves those ids out of the sum, and counts them in the mean.)

        Raises:
            InputError: torch has it in two ways, or there is no last bag.
        """
        spec, offsets, count = self._live.spec, bags.offsets, len(bags.ids)
        assert offsets is not None
        own = self.mode != "max" and spec.dtype != torch.float64 and spec.padding_idx is None
        if own or len(offsets) == 1:
            raise InputError(
                f"offsets end at {int(offsets[-1])}, and there are {count} ids. With "
                "include_last_offset=True torch has ids behind the last offset in the last bag or in "
                f"none, depending on device and dtype: give input[:{int(offsets[-1])}], or offsets that "
                f"end at {count}."
            )
        return torch.nn.functional.pad(offsets[:-1], (0, 1), value=count)

    def extra_repr(self) -> str:
        padding = f", padding_idx={self.padding_idx}" if self.padding_idx is not None else ""
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}{padding}"


def _ends_early(bags: Bags) -> bool:
    offsets = bags.offsets
    return (
        offsets is not None and offsets.device.type == "cpu" and bool(offsets[-1] < len(bags.ids))
    )
