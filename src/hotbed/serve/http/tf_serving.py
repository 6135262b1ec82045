"""Requests and answers as TensorFlow Serving has them: ``/v1/models/NAME:predict``. They may have columns in
place of inputs, see `hotbed.serve.http.records`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from hotbed.files import Json
from hotbed.serve.http.answering import Answers
from hotbed.serve.http.errors import RequestError, wrong
from hotbed.serve.http.limits import Limits
from hotbed.serve.http.parts import Input, Part, parts_of_lists
from hotbed.serve.http.records import Records, Unencoded, are_records

__all__ = ["Asked", "Asking", "answered", "asked_of", "told_status"]


class Asking(Protocol):
    """Something that is asked with inputs, or with the columns that they are made of."""

    inputs: Mapping[str, Input]
    records: Records | Unencoded


class Asked(NamedTuple):
    """A request as it was understood."""

    parts: dict[str, Part]
    samples: int
    by_rows: bool
    """True: a sample an entry. False: a list an input."""


def asked_of(body: Json, model: Asking, limits: Limits) -> Asked:
    """Return what the body of a request asks with.

    Raises:
        RequestError: it is not as the signature says.
    """
    if isinstance(body, dict) and are_records(body):
        if isinstance(model.records, Unencoded):
            raise RequestError(*model.records)
        return Asked(*model.records.encoded(body), by_rows="records" in body)
    if not isinstance(body, dict):
        raise RequestError(400, "The body is an object with instances or inputs.")
    if unknown := {*body} - {"instances", "inputs", "signature_name"}:
        raise RequestError(
            400, f"The body has {min(unknown)[:40]!r}: it takes instances or inputs."
        )
    if ("instances" in body) == ("inputs" in body):
        raise RequestError(400, "The body has one of instances (a sample an entry) and inputs.")
    if body.get("signature_name", "serving_default") != "serving_default":
        raise wrong("signature_name", "there is serving_default alone.")
    by_rows = "instances" in body
    columns = _of_rows(body["instances"], model) if by_rows else _of_inputs(body["inputs"], model)
    samples = {name: len(values) for name, values in columns.items()}
    count = next(iter(samples.values()))
    for name, each in samples.items():
        if each != count:
            raise wrong(name, f"has {each} samples, and another input {count}.")
    if not count:
        raise RequestError(400, "There are no samples.")
    if count > limits.samples:
        raise RequestError(413, f"There are {count} samples, and {limits.samples} may be asked.")
    return Asked(parts_of_lists(model.inputs, columns), count, by_rows)


def _of_rows(instances: Json, model: Asking) -> dict[str, list[Json]]:
    if not isinstance(instances, list):
        raise wrong("instances", "is a list with a sample an entry.")
    names = [*model.inputs]
    if len(names) == 1 and not any(isinstance(each, dict) for each in instances):
        return {names[0]: instances}
    for n, each in enumerate(instances):
        if not isinstance(each, dict):
            raise wrong(f"instances[{n}]", f"is an object with {', '.join(names)}.")
        if len(each) != len(names) or not all(name in each for name in names):
            _refuse_names(each, model, f"instances[{n}]")
    return {name: [each[name] for each in instances] for name in names}  # type: ignore[index, call-overload]


def _of_inputs(inputs: Json, model: Asking) -> dict[str, list[Json]]:
    names = [*model.inputs]
    if isinstance(inputs, list) and len(names) == 1:
        return {names[0]: inputs}
    if not isinstance(inputs, dict):
        raise wrong("inputs", f"is an object with {', '.join(names)}.")
    if {*inputs} != {*names}:
        _refuse_names(inputs, model, "inputs")
    columns: dict[str, list[Json]] = {}
    for name, values in inputs.items():
        if not isinstance(values, list):
            raise wrong(name, "is a list with a value of each sample.")
        columns[name] = values
    return columns


def _refuse_names(given: Mapping[str, Json], model: Asking, where: str) -> None:
    names = ", ".join(model.inputs)
    for name in model.inputs:
        if name not in given:
            raise wrong(name, f"is missing in {where}. It takes {names}.")
    unknown = next(name for name in given if name not in model.inputs)
    raise wrong(unknown[:40], f"is not known, in {where}. It takes {names}.")


def answered(answers: Answers, asked: Asked) -> object:
    """Return the body of an answer, with NumPy's arrays in it."""
    only = next(iter(answers.values())) if len(answers) == 1 else None
    if not asked.by_rows:
        return {"outputs": answers if only is None else only}
    if only is not None:
        return {"predictions": only}
    return {
        "predictions": [
            {name: values[n] for name, values in answers.items()} for n in range(asked.samples)
        ]
    }


def told_status(version: str) -> object:
    """Return the body of an answer about a version that is served."""
    status = {"error_code": "OK", "error_message": ""}
    return {"model_version_status": [{"version": version, "state": "AVAILABLE", "status": status}]}
