"""Methods of the service, each a function from message to message."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, Protocol, cast

from google.protobuf.message import Message

from hotbed.serve.grpc import tensors
from hotbed.serve.grpc.messages import message_class
from hotbed.serve.http.errors import wrong
from hotbed.serve.http.open_inference import metadata_of, server_metadata
from hotbed.serve.http.repository import Repository
from hotbed.serve.http.server import Server

__all__ = ["Method", "methods_of"]


class Method(NamedTuple):
    """A method of the service."""

    request: type[Message]
    answer: Callable[[Message], Awaitable[Message]]
    is_open: bool = False
    """True: it needs no token, as it tells nothing of the model."""
    endpoint: str = "grpc_other"
    """Name in figures."""
    is_work: bool = False
    """True: it is refused before its message is read where there is too much to do."""


class _OfModel(Protocol):
    name: str
    version: str


class _Parameter(Protocol):
    string_param: str

    def WhichOneof(self, name: str) -> str | None: ...


class _OfRepository(Protocol):
    model_name: str
    parameters: Mapping[str, _Parameter]


class _Index(Protocol):
    ready: bool


def methods_of(server: Server) -> dict[str, Method]:
    """Return the methods by name."""
    service = _Service(server)
    known = {
        "ServerLive": (service.server_live, True),
        "ServerReady": (service.server_ready, True),
        "ModelReady": (service.model_ready, False),
        "ServerMetadata": (service.server_metadata, False),
        "ModelMetadata": (service.model_metadata, False),
        "RepositoryIndex": (service.index, False),
        "RepositoryModelLoad": (service.load, False),
        "RepositoryModelUnload": (service.unload, False),
    }
    found = {
        name: Method(message_class(f"{name}Request"), answer, is_open)
        for name, (answer, is_open) in known.items()
    }
    request = message_class("ModelInferRequest")
    return found | {
        "ModelInfer": Method(request, service.infer, endpoint="grpc_infer", is_work=True)
    }


class _Service:
    def __init__(self, server: Server) -> None:
        self._server, self._repository = server, Repository(server)

    async def server_live(self, request: Message) -> Message:
        return message_class("ServerLiveResponse")(live=True)

    async def server_ready(self, request: Message) -> Message:
        return message_class("ServerReadyResponse")(ready=True)

    async def model_ready(self, request: Message) -> Message:
        about = cast(_OfModel, request)
        self._server.named(about.name, about.version or None)
        return message_class("ModelReadyResponse")(ready=True)

    async def server_metadata(self, request: Message) -> Message:
        return message_class("ServerMetadataResponse")(**server_metadata())

    async def model_metadata(self, request: Message) -> Message:
        about = cast(_OfModel, request)
        model = self._server.named(about.name, about.version or None)
        return message_class("ModelMetadataResponse")(**metadata_of(about.name, model))

    async def infer(self, request: Message) -> Message:
        given = cast(tensors.InferRequest, request)
        model = self._server.named(given.model_name, given.model_version or None)
        asked = tensors.asked_of(given, model, self._server.limits)
        answers = await self._server.answers(model, asked.parts, asked.samples)
        return tensors.answered(answers, asked, given.model_name, model.version)

    async def index(self, request: Message) -> Message:
        models = await self._repository.index()
        if cast(_Index, request).ready:
            models = [each for each in models if each["state"] == "READY"]
        return message_class("RepositoryIndexResponse")(models=models)

    async def load(self, request: Message) -> Message:
        about = cast(_OfRepository, request)
        self._server.check_name(about.model_name)
        if about.parameters.keys() - {"version"}:
            raise wrong("parameters", "has a version or nothing.")
        version = None
        if "version" in about.parameters:
            given = about.parameters["version"]
            if given.WhichOneof("parameter_choice") != "string_param":
                raise wrong("version", "is a string.")
            version = given.string_param
        await self._repository.load(about.model_name, version)
        return message_class("RepositoryModelLoadResponse")()

    async def unload(self, request: Message) -> Message:
        self._repository.unload(cast(_OfRepository, request).model_name)
