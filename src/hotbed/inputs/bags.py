"""Every kind of input becomes `Bags`: flat ids, offsets or a fixed length, optional weights.

Kind, rank and dtype are checked here; the values of ids and offsets are checked by the core, or the
device, once, when the batch is resolved. `hotbed.inputs` lists the kinds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor

from hotbed.arrays import ID_DTYPES, describe, id_tensor, is_array, real_tensor
from hotbed.errors import HotbedError, IdError, InputError
from hotbed.jagged import Jagged
from hotbed.tables import SUMMED

__all__ = [
    "FORMS",
    "Bags",
    "Form",
    "Jagged",
    "Wanted",
    "checked_offsets",
    "core_input",
    "has_methods",
    "input_fault",
    "read_bags",
]

_KINDS = (
    "a LongTensor (B,) or (B, K), or an array or lists of such ints, a hotbed.Jagged, a jagged nested "
    "tensor, a sparse CSR or COO tensor"
)
_CPU = torch.device("cpu")


class Bags(NamedTuple):
    """A feature's input in the form the core takes."""

    ids: Tensor
    """(N,) contiguous int64 or int32."""
    offsets: Tensor | None
    """(bags + 1,) contiguous int64, or None: every bag has `fixed` ids."""
    fixed: int
    bags: int
    weights: Tensor | None
    """(N,) contiguous, of the table's compute type."""
    batch: int
    """Samples; differs from bags for inputs of three and more dimensions."""
    shape: tuple[int, ...] | None
    """Leading shape of the output where it is not (bags,)."""
    jagged: bool
    """Unpooled, the output is a Jagged with these offsets."""

    def on_host(self) -> Bags:
        """Ids and offsets where the core reads them, without weights."""
        offsets = None if self.offsets is None else self.offsets.cpu()
        return self._replace(ids=self.ids.cpu(), offsets=offsets, weights=None)

    @property
    def positions(self) -> int:
        """Number of ids on this process, of all bags."""
        return self.ids.numel()

    def copied(self, *, ids: bool) -> Bags:
        """Return the same with offsets of its own where they lie on the host, and `ids` if wanted."""
        offsets = self.offsets
        if offsets is not None and offsets.device.type == "cpu":
            offsets = offsets.clone()
        return self._replace(offsets=offsets, ids=self.ids.clone() if ids else self.ids)


class Wanted(NamedTuple):
    """A feature, as the forms of its input are read."""

    feature: str
    compute_dtype: torch.dtype
    """Of the weights that are wanted."""
    combiner: str | None
    device: torch.device
    """Of the tables."""


class Form(NamedTuple):
    """A form that a feature's input may have. Another one goes into `FORMS`, and nothing else knows it."""

    fits: Callable[..., bool]
    """Called with an input: returns True if it has this form."""
    read: Callable[..., Bags]
    """Called with `Wanted` and an input of this form. Raises InputError."""


def read_bags(
    feature: str,
    value: object,
    compute_dtype: torch.dtype,
    combiner: str | None,
    device: torch.device = _CPU,
) -> Bags:
    """Reads one feature's input: a dense tensor, or of any form in `FORMS`.

    Args:
        device: of the tables. Inputs may lie there, or on the host.

    Raises:
        InputError: a form, rank or dtype that cannot be ids; the message names the feature.
    """
    if isinstance(value, Tensor):
        _check_places(feature, (value,), device)
        if value.layout is torch.strided and not value.is_nested:  # mostly
            return _read_dense(feature, value, combiner != "none")
    wanted = Wanted(feature, compute_dtype, combiner, device)
    for form in FORMS:
        if form.fits(value):
            return form.read(wanted, value)
    if isinstance(value, Tensor):
        nested = " of a nested tensor" if value.is_nested else ""
        raise InputError(
            f"Feature {feature!r}: the layout {value.layout}{nested} is not understood; give {_KINDS}."
        )
    raise InputError(f"Feature {feature!r}: got {describe(value)}; give {_KINDS}.")


def _is_nested(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.jagged


def _is_sparse(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout in (torch.sparse_csr, torch.sparse_coo)


def _is_jagged(value: object) -> bool:
    return isinstance(value, Jagged)


def _is_keyed(value: object) -> bool:
    return not isinstance(value, Tensor) and has_methods(value, "values", "offsets")


def _read_dense(feature: str, given: object, pooled: bool) -> Bags:
    value = _ids(feature, given)
    rank = value.dim()
    if rank == 1:
        count = value.shape[0]
        return Bags(value.contiguous(), None, 1, count, None, count, None, False)
    if rank == 0:
        raise InputError(
            f"Feature {feature!r}: a single id without a batch dimension; give a tensor (B,)."
        )
    shape = tuple(value.shape)
    ids = value.reshape(-1).contiguous()
    lead = (shape[:-1] if rank > 2 else None) if pooled else shape
    return Bags(ids, None, shape[-1], math.prod(shape[:-1]), None, shape[0], lead, False)


def _read_array(wanted: Wanted, value: object) -> Bags:
    return _read_dense(wanted.feature, value, wanted.combiner != "none")


def _read_own(wanted: Wanted, value: Jagged) -> Bags:
    return _read_parts(wanted, value.values, value.offsets, value.weights)


def _read_keyed(wanted: Wanted, value: _Keyed) -> Bags:
    if has_methods(value, "keys") and len(value.keys()) != 1:
        raise InputError(
            f"Feature {wanted.feature!r}: a keyed input of {len(value.keys())} keys; give it in place of "
            "the whole dict, or one key of it."
        )
    weights = getattr(value, "weights_or_none", lambda: None)()
    return _read_parts(wanted, value.values(), value.offsets(), weights)


def _read_parts(wanted: Wanted, given: object, offsets: object, weights: object) -> Bags:
    """Reads bags from the parts of a Jagged."""
    feature = wanted.feature
    values = _ids(feature, given)
    _check_places(feature, (values, offsets, weights), wanted.device)
    if values.dim() != 1:
        raise InputError(
            f"Feature {feature!r}: the values of a Jagged must be ids (N,), "
            f"got shape {tuple(values.shape)}."
        )
    edges = checked_offsets(f"Feature {feature!r}", offsets)
    weighed = None
    if weights is not None:
        weighed = _weights(feature, weights, len(values), wanted.compute_dtype, wanted.combiner)
    bags = len(edges) - 1
    return Bags(values.contiguous(), edges, 0, bags, weighed, bags, None, True)


def _read_nested(wanted: Wanted, value: Any) -> Bags:
    if value.dim() != 2:
        raise InputError(
            f"Feature {wanted.feature!r}: a nested tensor of ids must have 2 dimensions, got {value.dim()}."
        )
    if value.lengths() is None:
        return _read_parts(wanted, value.values(), value.offsets(), None)
    # A narrowed view: its bags do not follow one another in the values.
    bags = value.unbind()
    ids = value.values()[:0] if not bags else torch.cat(bags)
    offsets = torch.nn.functional.pad(value.lengths().cumsum(0), (1, 0))
    return _read_parts(wanted, ids, offsets, None)


def _read_sparse(wanted: Wanted, value: Tensor) -> Bags:
    feature = wanted.feature
    if value.dim() != 2 or value.dense_dim() != 0:
        raise InputError(
            f"Feature {feature!r}: a sparse tensor must be (B, ids) of scalars, got shape "
            f"{tuple(value.shape)} with {value.dense_dim()} dense dimensions."
        )
    if value.requires_grad and torch.is_grad_enabled():
        raise InputError(
            f"Feature {feature!r}: a sparse tensor cannot pass a gradient on to its values; give "
            "hotbed.Jagged(ids, offsets, weights=...)."
        )
    if value.layout is torch.sparse_csr:
        offsets, ids, weights = value.crow_indices(), value.col_indices(), value.values()
        return _read_parts(wanted, ids, offsets, weights)
    samples, ids = value._indices().unbind(0)
    weights = value._values()
    batch = value.shape[0]
    if len(samples):
        if int(samples.min()) < 0 or int(samples.max()) >= batch:
            raise InputError(
                f"Feature {feature!r}: a sparse tensor of {batch} samples has an entry for sample "
                f"{int(samples.max()) if int(samples.min()) >= 0 else int(samples.min())}."
            )
        if bool((samples[1:] < samples[:-1]).any()):
            order = torch.argsort(samples, stable=True)
            samples, ids, weights = samples[order], ids[order], weights[order]
    counts = torch.bincount(samples, minlength=batch)
    offsets = counts.new_zeros(batch + 1)
    torch.cumsum(counts, 0, out=offsets[1:])
    return _read_parts(wanted, ids, offsets, weights)


def _ids(feature: str, ids: object) -> Tensor:
    if isinstance(ids, Tensor) and ids.dtype in ID_DTYPES and ids.layout is torch.strided:
        return ids
    return id_tensor(f"Feature {feature!r}", ids)


def _check_places(feature: str, parts: Iterable[object], device: torch.device) -> None:
    for part in parts:
        if isinstance(part, Tensor) and part.device.type != "cpu" and part.device != device:
            raise InputError(
                f"Feature {feature!r}: ids are on {part.device}, the tables on {_place(device)}; move "
                "the batch."
            )


def _place(device: torch.device) -> str:
    return "the CPU" if device.type == "cpu" else str(device)


def checked_offsets(what: str, given: object) -> Tensor:
    offsets = given if isinstance(given, Tensor) else id_tensor(what, given, "offsets")
    if (
        offsets.dim() != 1
        or offsets.dtype not in ID_DTYPES
        or offsets.layout is not torch.strided
        or len(offsets) == 0
    ):
        raise InputError(
            f"{what}: offsets must be an int64 tensor (B + 1,), got {describe(offsets)}."
        )
    return offsets.to(torch.int64).contiguous()


def _weights(
    feature: str, given: object, count: int, compute_dtype: torch.dtype, combiner: str | None
) -> Tensor:
    if combiner not in SUMMED:
        raise InputError(
            f"Feature {feature!r}: weights need a table whose combiner is sum, mean or sqrtn, "
            f"not {combiner}; give the ids without weights."
        )
    weights = real_tensor(f"Feature {feature!r}", "weights", given)
    if weights.shape != (count,):
        raise InputError(
            f"Feature {feature!r}: weights must be {count} numbers, one an id, "
            f"got {describe(weights)}."
        )
    return weights.to(compute_dtype).contiguous()


class _Keyed(Protocol):
    """A KeyedJaggedTensor, or one feature of it."""

    def keys(self) -> Collection[str]: ...
    def values(self) -> Tensor: ...
    def offsets(self) -> Tensor: ...


def has_methods(value: object, *names: str) -> TypeGuard[_Keyed]:
    return all(callable(getattr(value, name, None)) for name in names)


FORMS = [
    Form(_is_nested, _read_nested),
    Form(_is_sparse, _read_sparse),
    Form(_is_jagged, _read_own),
    Form(_is_keyed, _read_keyed),
    Form(is_array, _read_array),
]
"""Forms of inputs beside dense tensors, in the order in which they are tried."""


def core_input(
    table: int, combiner: int, bag: Bags
) -> tuple[int, int, int, int, int, int, int, int, int]:
    """One feature's input as the core takes it."""
    ids, offsets, fixed, count, weights, _, _, _ = bag
    return (
        table,
        combiner,
        ids.data_ptr(),
        4 if ids.dtype is torch.int32 else 8,
        ids.shape[0],
        0 if offsets is None else offsets.data_ptr(),
        fixed,
        count,
        0 if weights is None else weights.data_ptr(),
    )


def input_fault(
    kind: int, table: str, feature: str, bag: Bags, bag_at: int, value: int, bound: int
) -> HotbedError:
    """The error for an input that the core, or a device, found bad; arguments are InputFault's."""
    sample = bag_at if bag.bags == bag.batch else bag_at * bag.batch // bag.bags
    where = f"Table {table!r}, feature {feature!r}"
    if kind == 1:
        return IdError(
            f"{where}, sample {sample}: id {value} is outside [0, {bound}). "
            "Pass rows=None for open-ended ids."
        )
    if kind == 2:
        return InputError(f"{where}: offsets must start at 0, they start at {value}.")
    if kind == 3:
        return InputError(
            f"{where}, sample {sample}: offsets must rise, but {value} follows {bound} "
            f"(a length of {value - bound})."
        )
    return InputError(
        f"{where}: offsets end at {value} (the sum of the lengths), but there are {bound} values."
    )
