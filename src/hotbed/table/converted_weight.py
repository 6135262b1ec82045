"""The parameter that was a layer's weight before the layer was converted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import SupportsIndex

import torch
from torch import Tensor, nn

from hotbed.errors import TableError
from hotbed.table.sparse_gradient import Function, Keywords

__all__ = ["ConvertedWeight"]


class ConvertedWeight(nn.Parameter):
    """A weight after `hotbed.convert`: empty, and refused by torch, as whoever still holds it would train or
    read rows that are no layer's.

    Attributes:
        layer: path of the layer in its model.
        handle: the parameter in its place.
    """

    layer: str
    handle: nn.Parameter

    @classmethod
    def adopt(cls, weight: nn.Parameter, layer: str, handle: nn.Parameter) -> None:
        """Make a weight one, and free its memory."""
        weight.data = weight.data.new_empty(0)
        weight.__class__ = cls
        assert isinstance(weight, cls)
        weight.layer, weight.handle = layer, handle

    def __deepcopy__(self, memo: dict[int, object]) -> ConvertedWeight:
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        return _empty, (self.layer, self.handle)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"The weight of {self.layer!r} before hotbed.convert"

    @classmethod
    def __torch_function__(
        cls, func: Function, types: object, args: Iterable[object] = (), kwargs: Keywords = None
    ) -> object:
        found = next((a for a in args if isinstance(a, cls)), None)
        named = "a layer" if found is None else repr(found.layer)
        raise TableError(
            f"This parameter was the weight of {named} before hotbed.convert, and is none any more. Take "
            "parameters of a model after converting it; an optimizer that was made before goes on as "
            "hotbed.optim.convert(optimizer)."
        )


def _empty(layer: str, handle: nn.Parameter) -> ConvertedWeight:
    made = Tensor._make_subclass(ConvertedWeight, torch.empty(0, device="cpu"))
    assert isinstance(made, ConvertedWeight)
    made.layer, made.handle = layer, handle
    return made
