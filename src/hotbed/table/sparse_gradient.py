"""The gradient of a table as torch has it: sparse, over slots, with what keeps the rows of these in place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import GetSetDescriptorType
from typing import SupportsIndex

import torch
from torch import Tensor

from hotbed.errors import TableError
from hotbed.ops.duplicates import sum_duplicates
from hotbed.table.by_slot import FUNCTIONS_BY_ID

__all__ = [
    "Function",
    "Keywords",
    "TableGradient",
    "by_rows",
    "norm_of_rows",
    "plain_access",
    "set_gradient",
    "stored_gradient",
    "zero_rows",
]

Function = Callable[..., object]
Keywords = Mapping[str, object] | None
"""A function of torch's that `__torch_function__` is given, and its arguments by name."""

plain_access = torch._C.DisableTorchFunctionSubclass
"""A context in which handles are taken for what they are in memory, which is also quicker."""

_GRAD: GetSetDescriptorType = inspect.getattr_static(Tensor, "grad")


def stored_gradient(parameter: Tensor) -> Tensor | None:
    """Return what torch holds as the gradient of a parameter."""
    grad: Tensor | None = _GRAD.__get__(parameter)
    return grad


def set_gradient(parameter: Tensor, grad: Tensor | None) -> None:
    """Has torch hold it."""
    _GRAD.__set__(parameter, grad)


class TableGradient(Tensor):
    """A sparse COO gradient over slots, for which torch's own clipping works too.

    Attributes:
        sources: what keeps the rows of its slots where they are. Whatever torch makes of the gradient
            keeps them as well.
    """

    sources: list[object]

    @classmethod
    def over(
        cls, slots: Tensor, rows: Tensor, shape: torch.Size, sources: Iterable[object]
    ) -> TableGradient:
        """Return a gradient over (n,) slots and (n, dim) rows, which it aliases."""
        return cls.adopt(_coo(slots, rows, shape), sources)

    @classmethod
    def adopt(cls, made: Tensor, sources: Iterable[object]) -> TableGradient:
        """Makes a sparse tensor one."""
        made.__class__ = cls
        assert isinstance(made, cls)
        made.sources = list(sources)
        return made

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        with plain_access():
            return self.adopt(self.clone(), self.sources)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        with plain_access():  # as the tensor that it is for others
            alias = _coo(self._indices()[0], self._values(), self.shape)
            reduced: tuple[object, ...] = alias.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
            return reduced

    @classmethod
    def __torch_function__(
        cls, func: Function, types: object, args: Iterable[object] = (), kwargs: Keywords = None
    ) -> object:
        args, kwargs = tuple(args), kwargs or {}
        with plain_access():
            if (own := _OF_GRADIENTS.get(func)) is not None:
                return own(*args, **kwargs)
            if getattr(func, "__name__", "").startswith("_foreach"):
                raise TableError(
                    f"{func.__name__} takes no gradient of a table. Clip with hotbed.nn.clip_grad_norm_ "
                    "or clip_grad_value_, or pass foreach=False."
                )
            result = func(*args, **kwargs)
            if isinstance(result, Tensor) and result.is_sparse and type(result) is Tensor:
                used = result._nnz() > 0
                found = [part.sources for part in args if isinstance(part, cls) and used]
                return cls.adopt(result, [source for sources in found for source in sources])
            return result


if "2.11" <= torch.__version__ < "2.13":  # which compares as versions
    # There sparse_coo_tensor warns that it checks nothing, also where it is told not to.
    _unchecked = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default

    def _coo(slots: Tensor, rows: Tensor, shape: torch.Size) -> Tensor:
        kind = {"dtype": rows.dtype, "layout": torch.sparse_coo, "device": rows.device}
        made: Tensor = _unchecked(1, 1, shape, slots[None], rows, **kind)
        return made

else:

    def _coo(slots: Tensor, rows: Tensor, shape: torch.Size) -> Tensor:
        return torch.sparse_coo_tensor(
            slots[None], rows, shape, device=rows.device, check_invariants=False
        )


def by_rows(grad: Tensor) -> Tensor:
    """A sparse gradient of single elements as one of rows."""
    places, elements = grad._indices(), grad._values()
    slots, at = torch.unique(places[0], return_inverse=True)
    rows = elements.new_zeros((len(slots), grad.shape[1]))
    rows.view(-1).index_add_(0, at * grad.shape[1] + places[1], elements)
    return _coo(slots, rows, grad.shape)


def _each_once(grad: Tensor) -> Tensor:
    """The rows of a gradient, those of each slot summed; it has them from then on."""
    if not grad.is_cpu:
        grad.copy_(grad.coalesce())
        return grad._values()
    slots, rows = sum_duplicates(grad._indices()[0], grad._values())
    if len(slots) != grad._nnz():
        grad.copy_(_coo(slots, rows, grad.shape))
    return grad._values()


def _norm(
    grad: Tensor,
    ord: float | str | None = 2,
    dim: object = None,
    *,
    dtype: torch.dtype | None = None,
    **options: object,
) -> Tensor:
    if dim is not None:
        raise TableError(
            "The gradient of a table has a norm over all of it, not along a dimension."
        )
    rows = _each_once(grad)
    if dtype is not None:
        rows = rows.to(dtype)
    if not rows.numel():
        return rows.new_zeros(())
    return norm_of_rows(rows, 2.0 if ord is None or ord == "fro" else float(ord))


def _scale(grad: Tensor, factor: Tensor | float) -> Tensor:
    if isinstance(factor, Tensor) and factor.dim():
        return Tensor.mul_(grad, factor)
    grad._values().mul_(factor)
    return grad


def _clamp(grad: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    _each_once(grad).clamp_(min, max)
    return grad


def zero_rows(grad: Tensor) -> Tensor:
    if isinstance(grad, TableGradient):
        grad.sources = []
    return Tensor.zero_(grad)


_OF_GRADIENTS: dict[object, Callable[..., object]] = {
    torch.linalg.vector_norm: _norm,
    torch.norm: _norm,
    Tensor.norm: _norm,
    Tensor.mul_: _scale,
    Tensor.clamp_: _clamp,
    Tensor.zero_: zero_rows,
    **FUNCTIONS_BY_ID,
}


def norm_of_rows(rows: Tensor, norm_type: float) -> Tensor:
    """The norm of (n, dim) rows taken together; the same bits in whatever order they are."""
    norms: Tensor = torch.linalg.vector_norm(rows, norm_type, dim=1)
    if not 0 < norm_type < float("inf"):
        return norms.sum() if norm_type == 0 else torch.linalg.vector_norm(norms, norm_type)
    # Powers are added as integers, of which the largest has as many bits as the count allows.
    powers = norms.to(torch.float64).pow(norm_type)
    largest = powers.max()
    step = torch.exp2((torch.frexp(largest).exponent + len(norms).bit_length() - 62).double())
    total = (powers / step).round().to(torch.int64).sum() * step
    # Zero has no exponent, and what is not finite no integer.
    total = torch.where(torch.isfinite(largest) & (largest > 0), total, largest)
    return total.pow(1 / norm_type).to(norms.dtype)
