"""Requests of ModelInfer as arrays, and arrays as its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from hotbed.serve.grpc.messages import message_class
from hotbed.serve.http.answering import Answers
from hotbed.serve.http.errors import wrong
from hotbed.serve.http.limits import Limits
from hotbed.serve.http.model import ServedModel
from hotbed.serve.http.open_inference import (
    DATATYPES,
    check_datatype,
    kinds_of,
    outputs_of,
    samples_of,
    sizes_of,
)
from hotbed.serve.http.parts import Input, InputTensor, Part

__all__ = ["Asked", "InferRequest", "answered", "asked_of"]

DTYPES = {datatype: np.dtype(name) for name, datatype in DATATYPES.items()}
"""By the protocol's names."""
FIELDS = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}
"""Where typed values are. Those of FP16 are raw: the protocol has no field for them."""
WIDE = {"int_contents": np.dtype(np.int32), "uint_contents": np.dtype(np.uint32)}
"""Types of fields that several datatypes have."""


class _Named(Protocol):
    name: str


class _GivenTensor(_Named, Protocol):
    datatype: str
    shape: Sequence[int]
    contents: Message


class InferRequest(Protocol):
    """A message of the class ``ModelInferRequest``."""

    model_name: str
    model_version: str
    id: str
    inputs: Sequence[_GivenTensor]
    outputs: Sequence[_Named]
    raw_input_contents: Sequence[bytes]


class Asked(NamedTuple):
    """A request as it was understood."""

    parts: dict[str, Part]
    samples: int
    id: str
    outputs: list[str]
    is_raw: bool
    """True: values are bytes, in the request and in its answer."""


class _Array(InputTensor):
    """A tensor whose values are an array, (n,)."""

    def __init__(self, name: str, shape: list[int], flat: NDArray[np.generic]) -> None:
        super().__init__(name, shape, len(flat))
        self._flat = flat

    def values(self, taken_by: Input) -> NDArray[np.generic]:
        return taken_by.checked_array(self._flat)

    def integers(self) -> NDArray[np.int64] | None:
        return self._flat.astype(np.int64, copy=False)


def asked_of(request: InferRequest, model: ServedModel, limits: Limits) -> Asked:
    """Return what a request asks with.

    Raises:
        RequestError: it is not as the signature says.
    """
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise wrong("raw_input_contents", f"has {len(raw)} of {len(request.inputs)} inputs.")
    tensors: dict[str, InputTensor] = {}
    for n, each in enumerate(request.inputs):
        kinds = kinds_of(each.name, model, tensors)
        check_datatype(each.name, each.datatype, kinds)
        sizes, count = sizes_of(each.name, each.shape)
        flat = _of_raw(each, raw[n], count) if raw else _of_fields(each, count)
        tensors[each.name] = _Array(each.name, sizes, flat)
    outputs = outputs_of((each.name for each in request.outputs), model)
    return Asked(*samples_of(tensors, model, limits), request.id, outputs, bool(raw))


def _of_raw(given: _GivenTensor, raw: bytes, count: int) -> NDArray[np.generic]:
    """Return values that are bytes of a request, (n,), which stay where they are."""
    dtype = DTYPES[given.datatype]
    if given.contents.ListFields():
        raise wrong(given.name, "has contents, and raw_input_contents. Give one of them.")
    if len(raw) != count * dtype.itemsize:
        raise wrong(
            given.name,
            f"has {len(raw)} bytes, and a shape of {count} values of {dtype.itemsize} bytes.",
        )
    if dtype.kind == "b" and np.frombuffer(raw, np.uint8).max(initial=0) > 1:
        raise wrong(given.name, "has bytes that are no BOOL: each is 0 or 1.")
    return np.frombuffer(raw, _little(dtype)).astype(dtype, copy=False)


def _of_fields(given: _GivenTensor, count: int) -> NDArray[np.generic]:
    """Return values that are fields of a message, (n,)."""
    field = FIELDS.get(given.datatype)
    if field is None:
        raise wrong(given.name, f"is {given.datatype}, whose values go into raw_input_contents.")
    if any(other.name != field for other, _ in given.contents.ListFields()):
        raise wrong(given.name, f"is {given.datatype}, whose values go into {field} alone.")
    values = getattr(given.contents, field)
    if len(values) != count:
        raise wrong(given.name, f"has {len(values)} values in {field}, and a shape of {count}.")
    return np.array(values, WIDE.get(field, DTYPES[given.datatype]))


def answered(answers: Answers, asked: Asked, name: str, version: str) -> Message:
    """Return the answer: raw where the request was, and where an output has no typed field."""
    chosen = {output: answers[output] for output in asked.outputs}
    datatypes = {output: DATATYPES[values.dtype.name] for output, values in chosen.items()}
    is_raw = asked.is_raw or not all(each in FIELDS for each in datatypes.values())
    return message_class("ModelInferResponse")(
        model_name=name,
        model_version=version,
        id=asked.id,
        outputs=[
            {
                "name": output,
                "datatype": datatypes[output],
                "shape": values.shape,
                **({} if is_raw else {"contents": _fields(datatypes[output], values)}),
            }
            for output, values in chosen.items()
        ],
        raw_output_contents=[_raw(values) for values in chosen.values()] if is_raw else [],
    )


def _raw(values: NDArray[np.generic]) -> bytes:
    return values.astype(_little(values.dtype), copy=False).tobytes()


def _little(dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
    """Return the type of raw values. By its string, as ``newbyteorder`` makes one that the core refuses."""
    found: np.dtype[np.generic] = np.dtype(dtype.newbyteorder("<").str)
    return found


def _fields(datatype: str, values: NDArray[np.generic]) -> Mapping[str, object]:
    return {FIELDS[datatype]: values.reshape(-1).tolist()}
