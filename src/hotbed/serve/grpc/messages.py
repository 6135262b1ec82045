"""Messages of the Open Inference Protocol over gRPC, package `inference`, as KServe and Triton declare them.

`DECLARED` says what a .proto file would; the classes are made of it when this module is imported. They are in
a pool of their own, so that clients with generated classes of the same names may be in the process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

__all__ = ["SERVICE", "message_class"]

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"
FIELD = re.compile(r"(repeated |map |choice )?([\w.]+) (\w+) = (\d+)")
"""``choice``: of the oneof ``parameter_choice``. ``map``: from strings."""
DECLARED: dict[str, Sequence[str]] = {
    "ServerLiveRequest": (),
    "ServerLiveResponse": ("bool live = 1",),
    "ServerReadyRequest": (),
    "ServerReadyResponse": ("bool ready = 1",),
    "ModelReadyRequest": ("string name = 1", "string version = 2"),
    "ModelReadyResponse": ("bool ready = 1",),
    "ServerMetadataRequest": (),
    "ServerMetadataResponse": (
        "string name = 1",
        "string version = 2",
        "repeated string extensions = 3",
    ),
    "ModelMetadataRequest": ("string name = 1", "string version = 2"),
    "ModelMetadataResponse": (
        "string name = 1",
        "repeated string versions = 2",
        "string platform = 3",
        "repeated ModelMetadataResponse.TensorMetadata inputs = 4",
        "repeated ModelMetadataResponse.TensorMetadata outputs = 5",
    ),
    "ModelMetadataResponse.TensorMetadata": (
        "string name = 1",
        "string datatype = 2",
        "repeated int64 shape = 3",
    ),
    "InferParameter": (
        "choice bool bool_param = 1",
        "choice int64 int64_param = 2",
        "choice string string_param = 3",
        "choice double double_param = 4",
        "choice uint64 uint64_param = 5",
    ),
    "InferTensorContents": (
        "repeated bool bool_contents = 1",
        "repeated int32 int_contents = 2",
        "repeated int64 int64_contents = 3",
        "repeated uint32 uint_contents = 4",
        "repeated uint64 uint64_contents = 5",
        "repeated float fp32_contents = 6",
        "repeated double fp64_contents = 7",
        "repeated bytes bytes_contents = 8",
    ),
    "ModelInferRequest": (
        "string model_name = 1",
        "string model_version = 2",
        "string id = 3",
        "map InferParameter parameters = 4",
        "repeated ModelInferRequest.InferInputTensor inputs = 5",
        "repeated ModelInferRequest.InferRequestedOutputTensor outputs = 6",
        "repeated bytes raw_input_contents = 7",
    ),
    "ModelInferRequest.InferInputTensor": (
        "string name = 1",
        "string datatype = 2",
        "repeated int64 shape = 3",
        "map InferParameter parameters = 4",
        "InferTensorContents contents = 5",
    ),
    "ModelInferRequest.InferRequestedOutputTensor": (
        "string name = 1",
        "map InferParameter parameters = 2",
    ),
    "ModelInferResponse": (
        "string model_name = 1",
        "string model_version = 2",
        "string id = 3",
        "map InferParameter parameters = 4",
        "repeated ModelInferResponse.InferOutputTensor outputs = 5",
        "repeated bytes raw_output_contents = 6",
    ),
    "ModelInferResponse.InferOutputTensor": (
        "string name = 1",
        "string datatype = 2",
        "repeated int64 shape = 3",
        "map InferParameter parameters = 4",
        "InferTensorContents contents = 5",
    ),
    "ModelRepositoryParameter": (
        "choice bool bool_param = 1",
        "choice int64 int64_param = 2",
        "choice string string_param = 3",
        "choice bytes bytes_param = 4",
    ),
    "RepositoryIndexRequest": ("string repository_name = 1", "bool ready = 2"),
    "RepositoryIndexResponse": ("repeated RepositoryIndexResponse.ModelIndex models = 1",),
    "RepositoryIndexResponse.ModelIndex": (
        "string name = 1",
        "string version = 2",
        "string state = 3",
        "string reason = 4",
    ),
    "RepositoryModelLoadRequest": (
        "string repository_name = 1",
        "string model_name = 2",
        "map ModelRepositoryParameter parameters = 3",
    ),
    "RepositoryModelLoadResponse": (),
    "RepositoryModelUnloadRequest": (
        "string repository_name = 1",
        "string model_name = 2",
        "map ModelRepositoryParameter parameters = 3",
    ),
    "RepositoryModelUnloadResponse": (),
}
"""Fields by message; a message within another is behind it, as ``OUTER.INNER``."""


def message_class(name: str) -> type[Message]:
    """Return the class of a message."""
    return _CLASSES[name]


def _classes() -> dict[str, type[Message]]:
    file = FileDescriptorProto(name="hotbed/inference.proto", package=PACKAGE, syntax="proto3")
    declared: dict[str, DescriptorProto] = {}
    for name, fields in DECLARED.items():
        outer, _, inner = name.rpartition(".")
        within = declared[outer].nested_type if outer else file.message_type
        declared[name] = within.add(name=inner)
        for field in fields:
            _add_field(declared[name], name, field)
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    found = {name: pool.FindMessageTypeByName(f"{PACKAGE}.{name}") for name in DECLARED}
    return {name: GetMessageClass(descriptor) for name, descriptor in found.items()}


def _add_field(message: DescriptorProto, name: str, declared: str) -> None:
    parsed = FIELD.fullmatch(declared)
    assert parsed is not None, declared
    how, kind, field, number = parsed.groups()
    added = message.field.add(name=field, number=int(number))
    added.label = FieldDescriptorProto.LABEL_OPTIONAL
    if how in ("repeated ", "map "):
        added.label = FieldDescriptorProto.LABEL_REPEATED
    if how == "choice ":
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        added.oneof_index = 0
    if how == "map ":
        entry = f"{field.capitalize()}Entry"
        pair = message.nested_type.add(name=entry)
        pair.options.map_entry = True
        _add_field(pair, entry, "string key = 1")
        _add_field(pair, entry, f"{kind} value = 2")
        kind = f"{name}.{entry}"
    if kind[0].isupper():
        added.type = FieldDescriptorProto.TYPE_MESSAGE
        added.type_name = f".{PACKAGE}.{kind}"
    else:
        added.type = getattr(FieldDescriptorProto, f"TYPE_{kind.upper()}")


_CLASSES = _classes()
