"""The server's OpenAPI page: paths, and the bundle's signature as schemas."""

from __future__ import annotations

import importlib.metadata
import urllib.parse
from collections.abc import Mapping, Sequence

from hotbed.serve.bundles.bundle import OutputEntry
from hotbed.serve.http.limits import Limits
from hotbed.serve.http.model import ServedModel
from hotbed.serve.http.open_inference import LENGTH_TYPES, LENGTHS, datatypes_of
from hotbed.serve.http.records import Records
from hotbed.serve.http.settings import ServeSettings
from hotbed.serve.http.tf_serving import Asking
from hotbed.serve.http.topk import TopK

__all__ = ["openapi_of"]

_Schema = dict[str, object]
ERROR = {"$ref": "#/components/schemas/Error"}
REFUSED = {
    "400": "It is not as the signature says",
    "401": "A token is needed",
    "404": "There is no such model",
    "408": "The body has not come in time",
    "413": "It asks for more than is answered at once",
    "415": "The body is compressed in an unknown way",
    "503": "There is too much to do; come again after the seconds of Retry-After",
}
"""Statuses, and what they tell."""


def openapi_of(settings: ServeSettings, model: ServedModel) -> object:
    """Return the page, of OpenAPI 3.1, of the version that is served."""
    limits, name = settings.limits, settings.name
    v1, v2 = (f"/{of}/models/{urllib.parse.quote(name)}" for of in ("v1", "v2"))
    paths = {
        f"{v1}:predict": _post(
            "Answer samples, as TensorFlow Serving does",
            _body(model, limits, {}),
            _predict_answer(model),
        ),
        v1: _get("Tell the state of the version that is served"),
        f"{v1}/metadata": _get("Tell what is asked with and answered, and the tables"),
        f"{v2}/infer": _post(
            "Answer samples, by the Open Inference Protocol",
            _infer_body(model),
            _object({"model_name": {}, "model_version": {}, "outputs": {"type": "array"}}),
        ),
        v2: _get("Tell what is asked with and answered, by the Open Inference Protocol"),
        f"{v2}/ready": _get("Tell whether the model answers"),
        "/v2": _get("Tell what the server is"),
        "/v2/health/live": _get("Tell whether the server runs"),
        "/v2/health/ready": _get("Tell whether the server answers"),
        "/healthz": _get("Tell whether the server runs"),
        "/readyz": _get("Tell whether the server answers"),
        "/sample": _get("Tell a request of a few samples, and its answers"),
    }
    if isinstance(model.topk, TopK):
        k = {"k": {"type": "integer", "minimum": 1, "maximum": limits.k}}
        lists = {
            name: _array(_array({"type": kind}))
            for name, kind in (("items", "integer"), ("scores", "number"))
        }
        paths[f"{v1}:topk"] = _post(
            "Tell the items with the highest scores for users",
            _body(model.topk, limits, k),
            _object(lists),
        )
    components: _Schema = {"schemas": {"Error": _object({"error": {"type": "string"}})}}
    page: _Schema = {
        "openapi": "3.1.0",
        "info": {
            "title": f"{name}, version {model.version}",
            "version": importlib.metadata.version("hotbed"),
            "description": "A model that Hotbed has trained.",
        },
        "paths": paths,
        "components": components,
    }
    if settings.tokens:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        page["security"] = [{"token": []}]
    return page


def _body(model: Asking, limits: Limits, more: Mapping[str, object]) -> _Schema:
    """Return the schema of a body with inputs, or with columns. `more`: what else it may have."""
    samples = {"type": "array", "minItems": 1, "maxItems": limits.samples}
    of_each = {name: each.schema() for name, each in model.inputs.items()}
    columns = {name: {**samples, "items": schema} for name, schema in of_each.items()}
    only = next(iter(of_each.values())) if len(of_each) == 1 else None
    row = _object(of_each)
    instances: _Schema = {**samples, "items": row}
    inputs = _object(columns)
    if only is not None:
        instances = {"anyOf": [instances, {**samples, "items": only}]}
        inputs = {"anyOf": [inputs, {**samples, "items": only}]}
    name = {"signature_name": {"const": "serving_default"}, **more}
    forms = [_object({"instances": instances}, name), _object({"inputs": inputs}, name)]
    if isinstance(model.records, Records):
        cells = {name: _cell(types) for name, types in model.records.columns.needed.items()}
        rest: _Schema = {name: {} for name in model.records.columns.optional}
        records = {**samples, "items": _object(cells, rest)}
        by_column = _object(
            {name: {**samples, "items": cell} for name, cell in cells.items()}, rest
        )
        forms += [_object({"records": records}, name), _object({"columns": by_column}, name)]
    return {"oneOf": forms}


def _cell(types: Sequence[str]) -> _Schema:
    """Return the schema of a value of a column."""
    found: _Schema = {"type": [*dict.fromkeys(types)]}
    if "array" in types:
        found["items"] = {"type": [each for each in dict.fromkeys(types) if each != "array"]}
    return found


def _predict_answer(model: ServedModel) -> _Schema:
    of_each = {each["name"]: _schema_of_output(each) for each in model.about["outputs"]}
    only = next(iter(of_each.values())) if len(of_each) == 1 else None
    columns: _Schema = _object({name: _array(schema) for name, schema in of_each.items()})
    predictions = _array(_object(of_each) if only is None else only)
    outputs = columns if only is None else _array(only)
    return {"oneOf": [_object({"predictions": predictions}), _object({"outputs": outputs})]}


def _infer_body(model: ServedModel) -> _Schema:
    names = [each["name"] for each in model.about["outputs"]]
    output = {**_object({"name": {"enum": names}}), "additionalProperties": True}
    more = {
        "id": {"type": ["string", "null"]},
        "outputs": {"type": ["array", "null"], "items": output},
    }
    return {**_object({"inputs": _infer_inputs(model)}, more), "additionalProperties": True}


def _infer_inputs(model: ServedModel) -> _Schema:
    sizes = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
    kinds = {name: datatypes_of(each) for name, each in model.inputs.items()}
    bags = [name for name, each in model.inputs.items() if each.takes_lengths]
    kinds |= {name + LENGTHS: [*LENGTH_TYPES] for name in bags if name + LENGTHS not in kinds}
    tensors = [
        {
            **_object(
                {
                    "name": {"const": name},
                    "shape": sizes,
                    "datatype": {"enum": of_name},
                    "data": {"type": "array"},
                }
            ),
            "additionalProperties": True,
        }
        for name, of_name in kinds.items()
    ]
    return {"type": "array", "minItems": len(model.inputs), "items": {"anyOf": tensors}}


def _schema_of_output(about: OutputEntry) -> _Schema:
    whole = about["dtype"].startswith(("int", "uint"))
    schema: _Schema = {"type": "integer" if whole else "number"}
    if about["dtype"].startswith("float"):
        schema = {"type": ["number", "null"]}
    elif about["dtype"] == "bool":
        schema = {"type": "boolean"}
    for _ in about["shape"]:
        schema = _array(schema)
    return schema


def _array(items: _Schema) -> _Schema:
    return {"type": "array", "items": items}


def _object(required: Mapping[str, object], more: Mapping[str, object] | None = None) -> _Schema:
    return {
        "type": "object",
        "properties": {**required, **(more or {})},
        "required": [*required],
        "additionalProperties": False,
    }


def _post(summary: str, body: _Schema, answer: _Schema) -> _Schema:
    taken = {"required": True, "content": {"application/json": {"schema": body}}}
    return {"post": {"summary": summary, "requestBody": taken, "responses": _responses(answer)}}


def _get(summary: str) -> _Schema:
    return {"get": {"summary": summary, "responses": _responses({"type": "object"})}}


def _responses(answer: _Schema) -> _Schema:
    found = {"200": _response("The answer", answer)}
    return {**found, **{status: _response(told, ERROR) for status, told in REFUSED.items()}}


def _response(told: str, schema: Mapping[str, object]) -> _Schema:
    return {"description": told, "content": {"application/json": {"schema": schema}}}
