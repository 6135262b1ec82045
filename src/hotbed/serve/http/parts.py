"""Inputs of a request as arrays: what JSON and tensors say, checked by the bundle's signature."""

from __future__ import annotations

import abc
import contextlib
import functools
import itertools
import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray
from torch import Tensor

from hotbed.files import Json
from hotbed.jagged import Jagged
from hotbed.serve.bundles.bundle import Bundle, InputEntry, LookupEntry
from hotbed.serve.http.errors import RequestError, wrong
from hotbed.serve.http.limits import Limits

__all__ = ["Input", "InputTensor", "Part", "inputs_of_bundle", "parts_of_lists"]

Flat = list[Json]
_WIDE: dict[str, npt.DTypeLike] = {"f": np.float64, "i": np.int64, "u": np.int64}
"""Types in which numbers are checked, by the kinds of those that are taken."""
_REPR = reprlib.Repr()
"""Shows values that may be large or deep."""
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother = 3, 60, 60


class Part(NamedTuple):
    """One input of some samples."""

    values: NDArray[np.generic]
    """(B, ...); of bags (n,)."""
    offsets: NDArray[np.int64] | None = None
    """Of bags: (B + 1,) where they begin and end."""

    @property
    def samples(self) -> int:
        """Return how many there are."""
        return len(self.values) if self.offsets is None else len(self.offsets) - 1


class InputTensor(abc.ABC):
    """A tensor of a request, whose values are not checked yet. `size`: how many, as the shape says."""

    def __init__(self, name: str, shape: Sequence[int], size: int) -> None:
        self.name, self.shape, self.size = name, shape, size

    @abc.abstractmethod
    def values(self, taken_by: Input) -> NDArray[np.generic]:
        """Return the values, (n,), as an input takes them.

        Raises:
            RequestError: it does not take them.
        """

    @abc.abstractmethod
    def integers(self) -> NDArray[np.int64] | None:
        """Return the values, (n,), or None where they are no integers of 64 bits."""


class Input(abc.ABC):
    """An input of a request, by its name."""

    def __init__(self, about: InputEntry, ids: _Ids | None, limits: Limits) -> None:
        self.name, self.about, self.limits = about["name"], about, limits
        self.dtype = np.dtype(about["dtype"])
        self.size = math.prod(about["shape"])
        """Values of a sample, where it is fixed."""
        self._ids = ids

    takes_lengths = False
    """True: samples may have any number of values."""

    @property
    def is_ids(self) -> bool:
        """Return whether values are ids of tables."""
        return self._ids is not None

    @abc.abstractmethod
    def of_lists(self, values: Sequence[Json]) -> Part:
        """Return values, one of each sample, as JSON has them.

        Raises:
            RequestError: they are not as the signature says.
        """

    @abc.abstractmethod
    def of_tensor(self, tensor: InputTensor, lengths: InputTensor | None) -> Part:
        """Return the values of a tensor. `lengths`: of bags, if they are given.

        Raises:
            RequestError: they are not as the signature says.
        """

    @abc.abstractmethod
    def of_batch(self, entry: Tensor | Jagged) -> Part:
        """Return the values of an entry of a batch, as the data's reader makes it.

        Raises:
            RequestError: an id is out of range, or a bag too large.
            ValueError: it is of another kind or shape than the signature says.
        """

    @abc.abstractmethod
    def joined(self, parts: Sequence[Part]) -> Part:
        """Return the samples of all parts."""

    @abc.abstractmethod
    def schema(self) -> dict[str, object]:
        """Return the JSON Schema of the values of a sample."""

    @abc.abstractmethod
    def bags(self, part: Part) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the ids of a part, (n,), and (B + 1,) where each sample's begin and end, to be read."""

    def leaf(self) -> dict[str, object]:
        """Return the JSON Schema of a number or an id."""
        if self._ids is not None:
            return {"type": "integer", **self._ids.schema(np.iinfo(self.dtype))}
        kind = self.dtype.kind
        if kind == "f":
            most = float(np.finfo(self.dtype).max)
            return {"type": "number", "minimum": -most, "maximum": most}
        if kind == "b":
            return {"type": "boolean"}
        about = np.iinfo(self.dtype)
        return {"type": "integer", "minimum": int(about.min), "maximum": int(about.max)}

    def checked(self, flat: Flat) -> NDArray[np.generic]:
        """Return (n,) numbers or ids.

        Raises:
            RequestError: something else is among them, or they are out of range.
        """
        kinds = set(map(type, flat))
        if self._ids is None:
            return self._numbers(flat, kinds)
        if not kinds <= {int}:
            raise wrong(self.name, f"ids are integers, not {_told(flat, (int,))}.")
        try:
            values = np.array(flat, np.int64)
        except OverflowError:
            raise wrong(self.name, "an id is no 64-bit integer.") from None
        self._ids.check(self.name, values)
        return self._cast(values)

    def checked_array(self, values: NDArray[np.generic]) -> NDArray[np.generic]:
        """Return (n,) numbers or ids of an array; raises RequestError where they are out of range."""
        if self._ids is not None:
            self._ids.check(self.name, values.astype(np.int64, copy=False))
        return self._cast(values)

    def other_shape(self, entry: Tensor | Jagged) -> ValueError:
        """Return the error of an entry that is not as the signature says."""
        told = "bags" if isinstance(entry, Jagged) else f"of shape {tuple(entry.shape)}"
        return ValueError(
            f"{self.name} is {told}, and {self.about['shape']} a sample is asked with."
        )

    def _numbers(self, flat: Flat, kinds: set[type]) -> NDArray[np.generic]:
        dtype = self.dtype
        taken = {"f": (int, float), "b": (bool,)}.get(dtype.kind, (int,))
        if not kinds <= {*taken}:
            what = "numbers" if dtype.kind == "f" else dtype.name
            raise wrong(self.name, f"takes {what}, not {_told(flat, taken)}.")
        try:
            values = np.array(flat, _WIDE.get(dtype.kind, dtype))
        except OverflowError:
            raise wrong(self.name, f"a number is out of the range of {dtype.name}.") from None
        return self._cast(values)

    def _cast(self, values: NDArray[np.generic]) -> NDArray[np.generic]:
        cast = values
        if values.dtype != self.dtype:
            with np.errstate(over="ignore"):
                cast = values.astype(self.dtype)
        if self.dtype.kind == "f":
            same = np.isfinite(cast).all()
        else:
            same = cast is values or (cast == values).all()
        if not same:
            raise wrong(self.name, f"a number is out of the range of {self.dtype.name}.")
        return cast


class _Ids:
    """Which ids may be asked with."""

    def __init__(self, lookups: Sequence[LookupEntry], bundle: Bundle) -> None:
        tables = [bundle["tables"][each["table"]] for each in lookups]
        self._rows = min((about["rows"] for about in tables if about["static"]), default=None)

    def schema(self, dtype: np.iinfo) -> dict[str, object]:
        """Return what JSON Schema says of an id, of a type."""
        if self._rows is None:
            return {"minimum": int(dtype.min), "maximum": int(dtype.max)}
        return {"minimum": 0, "maximum": min(self._rows - 1, int(dtype.max))}

    def check(self, name: str, ids: NDArray[np.int64]) -> None:
        """Raise RequestError if one is out of range."""
        if self._rows is None or not len(ids):
            return
        if not 0 <= ids.min() <= ids.max() < self._rows:
            bad = int(ids[(ids < 0) | (ids >= self._rows)][0])
            raise wrong(name, f"id {bad} is out of range: there are {self._rows} rows, from 0.")


class Fixed(Input):
    """As many values of each sample, in a shape that is fixed."""

    def of_lists(self, values: Sequence[Json]) -> Part:
        flat = [*values]
        for size in self.about["shape"]:
            for each in flat:
                if type(each) is not list or len(each) != size:
                    raise wrong(self.name, f"takes lists of {size} values, not {_short(each)}.")
            flat = [*itertools.chain.from_iterable(flat)]  # type: ignore[arg-type]
        return Part(self.checked(flat).reshape(len(values), *self.about["shape"]))

    def of_tensor(self, tensor: InputTensor, lengths: InputTensor | None) -> Part:
        wanted, shape = self.about["shape"], tensor.shape
        if lengths is not None:
            raise wrong(self.name, "takes no lengths: its shape is fixed.")
        if [*shape[1:]] != wanted and not (not wanted and [*shape[1:]] == [1]):
            raise wrong(self.name, f"takes the shape [samples, {_shape(wanted)}], not {[*shape]}.")
        return Part(tensor.values(self).reshape(shape[0], *wanted))

    def of_batch(self, entry: Tensor | Jagged) -> Part:
        if isinstance(entry, Jagged) or [*entry.shape[1:]] != self.about["shape"]:
            raise self.other_shape(entry)
        values = entry.numpy()
        return Part(self.checked_array(values.reshape(-1)).reshape(values.shape))

    def schema(self) -> dict[str, object]:
        found = self.leaf()
        for size in reversed(self.about["shape"]):
            found = {"type": "array", "items": found, "minItems": size, "maxItems": size}
        return found

    def joined(self, parts: Sequence[Part]) -> Part:
        return Part(np.concatenate([part.values for part in parts]))

    def bags(self, part: Part) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        values = part.values.astype(np.int64, copy=False)
        return values.reshape(-1), _ends_of_equal(len(values), self.size)


class OneId(Fixed):
    """An id of each sample, in 64 bits."""

    def of_ids(self, values: NDArray[np.int64]) -> Part:
        """Return ids, one of each sample; raises RequestError where one is out of range."""
        assert self._ids is not None
        self._ids.check(self.name, values)
        return Part(values)

    def bags(self, part: Part) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return cast("NDArray[np.int64]", part.values), _ends_of_equal(len(part.values), 1)


class Bags(Input):
    """Any number of ids of each sample."""

    takes_lengths = True

    def of_lists(self, values: Sequence[Json]) -> Part:
        kinds = set(map(type, values))
        if kinds == {int}:  # an id of each
            return Part(self.checked([*values]), _ends_of_equal(len(values), 1))
        for each in values:
            if type(each) is not list:
                raise wrong(self.name, f"takes lists of ids, not {_short(each)}.")
        lengths = [*map(len, values)]  # type: ignore[arg-type]
        flat = [*itertools.chain.from_iterable(values)]  # type: ignore[arg-type]
        offsets = self._ends(np.array(lengths, np.int64))
        return Part(self.checked(flat), offsets)

    def of_tensor(self, tensor: InputTensor, lengths: InputTensor | None) -> Part:
        shape = tensor.shape
        if lengths is not None:
            counts = lengths.integers()
            if counts is None or int(counts.min(initial=0)) < 0:
                raise wrong(self.name, "lengths are counts of ids.")
            if len(shape) != 1 or int(counts.sum()) != tensor.size:
                raise wrong(
                    self.name, f"has {tensor.size} ids, and lengths of {int(counts.sum())}."
                )
        elif len(shape) > 2:
            raise wrong(self.name, f"takes the shape [samples, ids], not {[*shape]}.")
        else:
            counts = np.full(shape[0], shape[1] if len(shape) == 2 else 1, np.int64)
        offsets = self._ends(counts)
        return Part(tensor.values(self), offsets)

    def of_batch(self, entry: Tensor | Jagged) -> Part:
        if isinstance(entry, Jagged):
            offsets = self._ends(np.diff(entry.offsets.numpy()))
            return Part(self.checked_array(entry.values.numpy()), offsets)
        if entry.dim() > 2:
            raise self.other_shape(entry)
        values = entry.numpy().reshape(len(entry), -1)
        offsets = self._ends(np.full(len(values), values.shape[1]))
        return Part(self.checked_array(values.reshape(-1)), offsets)

    def _ends(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return (B + 1,) where bags begin and end; raises RequestError where one is too large."""
        longest = int(lengths.max(initial=0))
        if longest > self.limits.ids:
            raise RequestError(
                413, f"{self.name}: a sample has {longest} ids, and may have {self.limits.ids}."
            )
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return offsets

    def schema(self) -> dict[str, object]:
        return {"type": "array", "items": self.leaf(), "maxItems": self.limits.ids}

    def joined(self, parts: Sequence[Part]) -> Part:
        lengths = [np.diff(part.offsets) for part in parts if part.offsets is not None]
        offsets = np.zeros(sum(map(len, lengths)) + 1, np.int64)
        np.cumsum(np.concatenate(lengths), out=offsets[1:])
        return Part(np.concatenate([part.values for part in parts]), offsets)

    def bags(self, part: Part) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        assert part.offsets is not None
        return part.values.astype(np.int64, copy=False), part.offsets


@functools.lru_cache(64)
def _ends_of_equal(samples: int, size: int) -> NDArray[np.int64]:
    """Return (B + 1,) where bags of equal size begin and end: read only, as others have it too."""
    ends = np.arange(samples + 1) * size
    ends.flags.writeable = False
    return ends


def inputs_of_bundle(bundle: Bundle, limits: Limits) -> dict[str, Input]:
    """Return what is asked with, by name."""
    found: dict[str, Input] = {}
    for about in bundle["inputs"]:
        lookups = [each for each in bundle["lookups"] if each["input"] == about["name"]]
        ids = _Ids(lookups, bundle) if about["kind"] == "ids" else None
        kind: type[Input] = Bags if about["shape"] == [-1] else Fixed
        if ids is not None and not about["shape"] and about["dtype"] == "int64":
            kind = OneId
        found[about["name"]] = kind(about, ids, limits)
    return found


def parts_of_lists(
    inputs: Mapping[str, Input], columns: Mapping[str, list[Json]]
) -> dict[str, Part]:
    """Return the values of all inputs: `Input.of_lists` of each.

    Args:
        columns: by name, as many values of each.

    Raises:
        RequestError: they are not as the signature says.
    """
    # Ids of which a sample has one are read together, as most inputs are such and samples few.
    alike = [(name, each) for name, each in inputs.items() if isinstance(each, OneId)]
    flat = [*itertools.chain.from_iterable(columns[name] for name, _ in alike)]
    parts: dict[str, Part] = {}
    if set(map(type, flat)) == {int}:
        with contextlib.suppress(OverflowError):  # which is told below, with its name
            values = np.array(flat, np.int64).reshape(len(alike), -1)
            parts = {
                name: each.of_ids(own) for (name, each), own in zip(alike, values, strict=True)
            }
    return {
        name: parts[name] if name in parts else each.of_lists(columns[name])
        for name, each in inputs.items()
    }


def _told(flat: Flat, taken: tuple[type, ...]) -> str:
    """Return the first value that is of another type, as it is told."""
    return _short(next(each for each in flat if type(each) not in taken))


def _short(value: Json) -> str:
    text = _REPR.repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _shape(wanted: Sequence[int]) -> str:
    return ", ".join(map(str, wanted)) or "1"
