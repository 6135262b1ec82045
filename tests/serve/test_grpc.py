"""Requests over gRPC: answers have the bits of those over HTTP, and what is wrong is told as there."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serve.test_openapi import Kinds
from serve.test_requests import (
    INFER,
    LIMITS,
    ROWS,
    Clicks,
    asked_of,
    changed,
    row,
    sample_of,
    tensors_of,
)
from starlette.testclient import TestClient

import hotbed as hb
from hotbed.serve.grpc.port import held
from hotbed.serve.http.answering import Lookups
from hotbed.serve.http.app import app_of
from hotbed.serve.http.limits import Limits
from hotbed.serve.http.settings import ServeSettings

grpc = pytest.importorskip("grpc")
messages = pytest.importorskip("hotbed.serve.grpc.messages")
tensors = pytest.importorskip("hotbed.serve.grpc.tensors")
Code = grpc.StatusCode
WAIT = 60.0


class Asking:
    """A client of a server."""

    def __init__(self, at: str, channel: Any = None, **metadata: str) -> None:
        self.channel = channel or grpc.insecure_channel(at)
        self.metadata = [*metadata.items()]

    def ask(self, method: str, message: Any = b"", **more: Any) -> Any:
        """Return the answer to a message, or to some bytes; raises grpc.RpcError."""
        sent = message if isinstance(message, bytes) else message.SerializeToString()
        call = self.channel.unary_unary(
            f"/inference.GRPCInferenceService/{method}",
            response_deserializer=messages.message_class(f"{method}Response").FromString,
        )
        more = {"timeout": WAIT, "wait_for_ready": True, "metadata": self.metadata, **more}
        return call(sent, **more)

    def refused(self, method: str, message: Any = b"", **more: Any) -> Any:
        with pytest.raises(grpc.RpcError) as error:
            self.ask(method, message, **more)
        return error.value


@pytest.fixture(scope="module")
def model() -> Clicks:
    torch.manual_seed(0)
    model = Clicks()
    model(sample_of(30))
    return model.eval()


@pytest.fixture(scope="module")
def bundle(model: Clicks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "clicks"
    return hb.export(model, path, sample=sample_of(6), step=7)


class Both:
    """A server over HTTP and over gRPC."""

    def __init__(self, bundle: Path, **about: Any) -> None:
        self._bundle, self._about = bundle, {"name": "clicks", "limits": LIMITS, **about}

    def __enter__(self) -> Both:
        self._held = held("127.0.0.1", 0)
        self.at = self._held.__enter__()
        told = ServeSettings(bundle=str(self._bundle), grpc=self.at, **self._about)
        self.http = TestClient(app_of(told), raise_server_exceptions=False)
        self.http.__enter__()
        self.grpc = Asking(self.at)
        return self

    def __exit__(self, *error: object) -> None:
        self.grpc.channel.close()
        self.http.__exit__()
        self._held.__exit__(None, None, None)


@pytest.fixture(scope="module")
def both(bundle: Path) -> Iterator[Both]:
    with Both(bundle) as both:
        yield both


DTYPES = {
    **{"BOOL": np.bool_, "UINT8": np.uint8, "INT8": np.int8, "INT16": np.int16},
    **{"INT32": np.int32, "INT64": np.int64, "FP16": np.float16, "FP32": np.float32},
    "FP64": np.float64,
}


def request_of(given: list[dict[str, Any]], *, raw: bool, **about: Any) -> Any:
    """The message of tensors as JSON has them."""
    inputs, contents = [], []
    for each in given:
        tensor = {name: each[name] for name in ("name", "datatype", "shape")}
        flat = np.array(each["data"], DTYPES[each["datatype"]]).reshape(-1)
        if raw:
            contents.append(flat.tobytes())
        else:
            tensor["contents"] = {tensors.FIELDS[each["datatype"]]: flat.tolist()}
        inputs.append(tensor)
    return messages.message_class("ModelInferRequest")(
        **{"model_name": "clicks", "inputs": inputs, "raw_input_contents": contents, **about}
    )


def arrays_of(answer: Any) -> dict[str, np.ndarray]:
    found = {}
    for n, each in enumerate(answer.outputs):
        dtype = DTYPES[each.datatype]
        if answer.raw_output_contents:
            assert not each.HasField("contents")
            values = np.frombuffer(answer.raw_output_contents[n], dtype)
        else:
            values = np.array(getattr(each.contents, tensors.FIELDS[each.datatype]), dtype)
        found[each.name] = values.reshape(each.shape)
    return found


ONE = request_of(changed(0), raw=True)
HTTP = settings(
    max_examples=examples(30),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@HTTP
@given(ROWS, st.booleans())
def test_answers_are_those_over_http(
    both: Both, model: Clicks, rows: list[dict[str, Any]], raw: bool
) -> None:
    given = tensors_of({name: [each[name] for each in rows] for name in rows[0]})
    told = both.http.post(INFER, json={"inputs": given}).json()
    answer = both.grpc.ask("ModelInfer", request_of(given, raw=raw, id="a"))
    assert answer.id == "a" and answer.model_name == "clicks"
    assert answer.model_version == told["model_version"]
    assert bool(answer.raw_output_contents) == raw
    found = arrays_of(answer)
    assert [*found] == [each["name"] for each in told["outputs"]]
    for each in told["outputs"]:
        np.testing.assert_array_equal(
            found[each["name"]], np.float32(each["data"]).reshape(each["shape"])
        )
    for name, values in asked_of(model, rows).items():
        np.testing.assert_allclose(found[name], values, atol=1e-5, rtol=1e-5)


@HTTP
@given(
    st.sampled_from([*DTYPES]),
    st.lists(st.integers(-2, 3), max_size=4),
    st.lists(st.integers(-300, 300), max_size=12),
    st.sampled_from(["x", "user", "city", "city.lengths", "seen", "seen.lengths", "none"]),
    st.booleans(),
)
def test_tensors_are_refused_as_over_http(
    both: Both, datatype: str, shape: list[int], data: list[int], name: str, raw: bool
) -> None:
    """Tensors of any datatype, shape and values, right ones beside them."""
    if not raw and datatype == "FP16":
        return
    values = np.array(data).astype(DTYPES[datatype])  # those that fit
    tensors = [each for each in changed(0) if each["name"] != name]
    wrong = {"name": name, "datatype": datatype, "shape": shape, "data": values.tolist()}
    sent = [*tensors, wrong]
    told = both.http.post(INFER, json={"inputs": sent})
    try:
        answer = both.grpc.ask("ModelInfer", request_of(sent, raw=raw))
    except grpc.RpcError as error:
        expected = {400: Code.INVALID_ARGUMENT, 413: Code.RESOURCE_EXHAUSTED}
        assert error.code() == expected[told.status_code], (error.details(), told.json())
        text = told.json()["error"]
        if "values, and a shape of" not in text:  # counted in bytes, or in a field
            assert error.details() == text
        else:
            assert error.details().split(":")[0] == text.split(":")[0]
    else:
        assert told.status_code == 200, told.json()
        outputs = {each["name"]: each["data"] for each in told.json()["outputs"]}
        for output, found in arrays_of(answer).items():
            np.testing.assert_array_equal(found.reshape(-1), np.float32(outputs[output]))


def test_all_types_of_outputs(tmp_path: Path) -> None:
    """Those of FP16 have no typed field: all are raw then."""
    torch.manual_seed(0)
    kinds = Kinds()
    sample = {"a/b": torch.arange(6, dtype=torch.int32)}
    expected = {name: each.detach().numpy() for name, each in kinds(sample).items()}
    with Both(hb.export(kinds.eval(), tmp_path / "kinds", sample=sample)) as both:
        for raw in (False, True):
            given = {"name": "a/b", "shape": [6], "datatype": "INT8", "data": [*range(6)]}
            asked = request_of([given], raw=raw)
            answer = both.grpc.ask("ModelInfer", asked)
            assert len(answer.raw_output_contents) == len(expected)
            for name, values in arrays_of(answer).items():
                assert values.dtype == expected[name].dtype
                np.testing.assert_allclose(values, expected[name], rtol=1e-3)
            asked.outputs.add(name="whole")
            asked.outputs.add(name="bool")
            answer = both.grpc.ask("ModelInfer", asked)
            assert bool(answer.raw_output_contents) == raw
            assert [*arrays_of(answer)] == ["whole", "bool"]


def without(n: int, **about: Any) -> Any:
    """A request whose tensor `n` has raw bytes or fields that are changed."""
    message = request_of(changed(0), raw=True)
    if "raw" in about:
        message.raw_input_contents[n] = about.pop("raw")
    for name, value in about.items():
        if name == "shape":
            message.inputs[n].shape[:] = value
        else:
            setattr(message.inputs[n], name, value)
    return message


HUGE = [(1 << 31) - 1] * 4


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (without(0, raw=b"1234567"), "x: has 7 bytes, and a shape of 2 values of 4 bytes"),
        (without(0, raw=np.float32([1, np.nan]).tobytes()), "x: a number is out of the range"),
        (without(0, shape=[1, 3], raw=bytes(12)), "x: takes the shape [samples, 2]"),
        (without(0, datatype="BYTES"), "x: takes the datatype FP16 or FP32 or FP64"),
        (without(1, shape=[-1], raw=b""), "user: has a shape with a size that is none"),
        (without(1, shape=[1 << 62, 4]), "user: has a shape with a size that is none"),
        (without(1, shape=HUGE, raw=b""), "user: has 0 bytes, and a shape of"),
        (without(1, shape=[1] * 99), "user: has a shape of 99 sizes, and may have 64"),
        (without(1, shape=[], raw=b""), "user: has a shape: a list of sizes"),
        (without(2, shape=[0], raw=b""), "city: has 0 ids, and lengths of 2"),
        (without(3, raw=np.int32([-1]).tobytes()), "city: lengths are counts of ids"),
        (without(3, raw=np.int32([1 << 30]).tobytes()), "city: has 2 ids, and lengths of"),
        (without(2, raw=np.int64([1, 10]).tobytes()), "city: id 10 is out of range"),
        (without(3, name="city"), "city: is there twice"),
        (without(3, name="seen.lengths"), "seen: takes no lengths"),
        (without(4, name="nobody"), "nobody: is not known"),
    ],
)
def test_wrong_raw_tensors(both: Both, message: Any, told: str) -> None:
    error = both.grpc.refused("ModelInfer", message)
    assert error.code() is Code.INVALID_ARGUMENT and error.details().startswith(told), error


def test_wrong_typed_tensors(both: Both) -> None:
    for change, told in (
        (lambda m: m.inputs[1].contents.int_contents.append(3), "go into int64_contents alone"),
        (lambda m: m.inputs[1].contents.int64_contents.append(3), "user: has 2 values in int64"),
        (lambda m: m.inputs[0].ClearField("contents"), "x: has 0 values in fp32_contents"),
        (lambda m: setattr(m.inputs[0], "datatype", "FP16"), "x: is FP16, whose values go into"),
        (lambda m: m.raw_input_contents.append(b""), "raw_input_contents: has 1 of 5 inputs"),
        (lambda m: m.raw_input_contents.extend([b""] * 5), "x: has contents, and raw_input"),
        (lambda m: m.outputs.add(name="clack"), "outputs: takes the names click, both"),
        (lambda m: [m.outputs.add(name="click") for _ in "ab"], "outputs: has 'click' twice"),
        (lambda m: m.ClearField("inputs"), "x: is missing"),
    ):
        message = request_of(changed(0), raw=False)
        change(message)
        error = both.grpc.refused("ModelInfer", message)
        assert error.code() is Code.INVALID_ARGUMENT and told in error.details(), error.details()


class Switch(Kinds):
    """An input of bools beside the ids."""

    def forward(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sum": self.vectors({"a/b": batch["a/b"]})["a/b"].sum(1) * batch["on"]}


def test_bytes_of_bools_are_0_or_1(tmp_path: Path) -> None:
    sample = {"a/b": torch.arange(2), "on": torch.tensor([True, False])}
    switch = Switch()
    switch(sample)
    with Both(hb.export(switch.eval(), tmp_path / "switch", sample=sample)) as both:
        about = {"shape": [2], "datatype": "BOOL", "data": [True, False]}
        ids = {"name": "a/b", "shape": [2], "datatype": "INT64", "data": [1, 1]}
        for raw in (False, True):
            message = request_of([ids, {"name": "on", **about}], raw=raw)
            found = arrays_of(both.grpc.ask("ModelInfer", message))["sum"]
            assert found[0] != 0 and found[1] == 0
        message.raw_input_contents[1] = b"\x01\x02"
        assert "no BOOL" in both.grpc.refused("ModelInfer", message).details()


@HTTP
@given(st.binary(max_size=300), st.sampled_from(["ModelInfer", "ModelReady", "RepositoryIndex"]))
def test_bytes_that_are_no_message(both: Both, sent: bytes, method: str) -> None:
    try:
        both.grpc.ask(method, sent)
    except grpc.RpcError as error:
        assert error.code() in (Code.INVALID_ARGUMENT, Code.NOT_FOUND), error


@HTTP
@given(st.data())
def test_requests_with_a_few_other_bytes(both: Both, data: st.DataObject) -> None:
    sent = bytearray(ONE.SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        sent[data.draw(st.integers(0, len(sent) - 1))] = data.draw(st.integers(0, 255))
    try:
        both.grpc.ask("ModelInfer", bytes(sent))
    except grpc.RpcError as error:
        allowed = (Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.RESOURCE_EXHAUSTED)
        assert error.code() in allowed, error


def test_names_and_versions(both: Both) -> None:
    version = both.http.get("/v2/models/clicks").json()["versions"][0]
    about = both.grpc.ask("ModelMetadata", named("ModelMetadataRequest", "clicks", version))
    assert [*about.versions] == [version] and about.platform == "hotbed_bundle"
    assert {each.name: [*each.shape] for each in about.inputs} == {
        **{"x": [-1, 2], "user": [-1], "city": [-1, -1], "seen": [-1, 3]}
    }
    assert both.grpc.ask("ServerLive").live and both.grpc.ask("ServerReady").ready
    assert both.grpc.ask("ServerMetadata").name == "hotbed"
    assert both.grpc.ask("ModelReady", named("ModelReadyRequest", "clicks")).ready
    for name, other in (("other", ""), ("clicks", "1"), ("", "")):
        for method in ("ModelReady", "ModelMetadata"):
            error = both.grpc.refused(method, named(f"{method}Request", name, other))
            assert error.code() is Code.NOT_FOUND
        message = request_of(changed(0), raw=True, model_name=name, model_version=other)
        assert both.grpc.refused("ModelInfer", message).code() is Code.NOT_FOUND
    message = request_of(changed(0), raw=True, model_version=version)
    assert both.grpc.ask("ModelInfer", message).model_version == version
    call = both.grpc.channel.unary_unary("/inference.GRPCInferenceService/ModelConfig")
    with pytest.raises(grpc.RpcError) as error:
        call(b"", timeout=WAIT)
    assert error.value.code() is Code.UNIMPLEMENTED


def named(message: str, name: str, version: str = "") -> Any:
    return messages.message_class(message)(name=name, version=version)


def test_versions_are_listed_and_chosen(both: Both) -> None:
    def load(**parameters: Any) -> Any:
        about = {"model_name": "clicks", "parameters": parameters}
        return messages.message_class("RepositoryModelLoadRequest")(**about)

    (there,) = both.grpc.ask("RepositoryIndex").models
    assert [there.version] == both.http.get("/v2/models/clicks").json()["versions"]
    assert there.state == "READY"
    both.grpc.ask("RepositoryModelLoad", load(version={"string_param": there.version}))
    both.grpc.ask("RepositoryModelLoad", load())
    for wrong in (
        load(version={"string_param": "none"}),
        load(version={"int64_param": 3}),
        load(version={}),
        load(other={"string_param": there.version}),
    ):
        assert both.grpc.refused("RepositoryModelLoad", wrong).code() is Code.INVALID_ARGUMENT
    assert both.grpc.refused("RepositoryModelUnload").code() is Code.NOT_FOUND
    unload = messages.message_class("RepositoryModelUnloadRequest")(model_name="clicks")
    assert "has one model" in both.grpc.refused("RepositoryModelUnload", unload).details()


def test_limits(both: Both) -> None:
    rows = tensors_of({name: [value] * 51 for name, value in row().items()})
    assert both.grpc.refused("ModelInfer", request_of(rows, raw=True)).details() == (
        "There are 51 samples, and 50 may be asked."
    )
    for count in (20, 21):
        many = tensors_of({name: [value] for name, value in row(city=[1] * count).items()})
        asked = request_of(many, raw=True)
        if count == 20:
            both.grpc.ask("ModelInfer", asked)
        else:
            error = both.grpc.refused("ModelInfer", asked)
            assert error.code() is Code.RESOURCE_EXHAUSTED
            assert error.details().startswith("city: a sample has 21 ids")
    many = without(1, shape=[1 << 30, 0], raw=b"")
    assert both.grpc.refused("ModelInfer", many).code() is Code.RESOURCE_EXHAUSTED
    error = both.grpc.refused("ModelInfer", bytes(LIMITS.body + 1))
    assert error.code() is Code.RESOURCE_EXHAUSTED


def test_a_bag_of_a_million_ids(bundle: Path) -> None:
    limits = Limits(ids=1_000_000)
    ids = np.arange(1_000_000) % 10
    given = tensors_of({name: [value] for name, value in row().items()})
    given[2] |= {"shape": [len(ids)], "data": ids}
    given[3] |= {"data": [len(ids)]}
    with Both(bundle, limits=limits) as both:
        found = [
            arrays_of(both.grpc.ask("ModelInfer", request_of(given, raw=raw))) for raw in (0, 1)
        ]
        flat = [{**each, "data": np.reshape(each["data"], -1).tolist()} for each in given]
        told = both.http.post(INFER, json={"inputs": flat}).json()["outputs"]
    for each in told:
        for answer in found:
            np.testing.assert_array_equal(
                answer[each["name"]].reshape(-1), np.float32(each["data"])
            )


def test_messages_that_do_not_come(bundle: Path) -> None:
    """A call without a message ends in time, and one that ends without it at once."""
    with Both(bundle, limits=dataclasses.replace(LIMITS, seconds=0.3)) as both:
        call = both.grpc.channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")

        def never() -> Iterator[bytes]:
            time.sleep(2)
            yield b""

        for sent, code in ((never(), Code.DEADLINE_EXCEEDED), (iter(()), Code.INVALID_ARGUMENT)):
            with pytest.raises(grpc.RpcError) as error:
                call(sent, timeout=WAIT)
            assert error.value.code() is code, error.value
        assert arrays_of(both.grpc.ask("ModelInfer", ONE))


def test_clients_that_wait_no_longer(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server drops what nobody waits for, and goes on."""
    go_on, asked = threading.Event(), 0

    def slow(*given: Any) -> Any:
        nonlocal asked
        asked += 1
        assert go_on.wait(WAIT)
        return vectors(*given)

    vectors = Lookups.vectors
    monkeypatch.setattr(Lookups, "vectors", slow)
    for _ in range(5):
        error = both.grpc.refused("ModelInfer", ONE, timeout=0.2)
        assert error.code() is Code.DEADLINE_EXCEEDED
    go_on.set()
    assert arrays_of(both.grpc.ask("ModelInfer", ONE))
    assert asked == 2  # the four behind the first were dropped
    assert "hotbed_waiting_samples 0.0" in both.http.get("/metrics").text


def test_too_much_to_do(bundle: Path) -> None:
    with Both(bundle, limits=dataclasses.replace(LIMITS, waiting=1e-9)) as both:

        def ask(_: int) -> Any:
            try:
                return both.grpc.ask("ModelInfer", ONE)
            except grpc.RpcError as error:
                return error

        with ThreadPoolExecutor(16) as pool:
            found = [*pool.map(ask, range(200))]
    refused = [each for each in found if isinstance(each, grpc.RpcError)]
    assert refused and len(refused) < len(found)
    for each in refused:
        assert each.code() is Code.UNAVAILABLE and "Come again" in each.details()
        assert ("grpc-retry-pushback-ms", "1000") in each.trailing_metadata()


def test_connections_that_are_closed_lose_no_call(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotbed.serve.grpc.listening.AGE", 0.05)
    with Both(bundle, limits=dataclasses.replace(LIMITS, waiting=60)) as both:
        with ThreadPoolExecutor(4) as pool:
            found = [*pool.map(lambda _: both.grpc.ask("ModelInfer", ONE), range(1000))]
    assert len(found) == 1000


def test_messages_are_read_a_few_at_a_time(bundle: Path) -> None:
    """One that does not come keeps others waiting until it is given up, where only one may be read."""
    with Both(bundle, limits=dataclasses.replace(LIMITS, bodies=1, seconds=1)) as both:
        go_on = threading.Event()

        def never() -> Iterator[bytes]:
            go_on.wait(WAIT)
            yield b""

        assert arrays_of(both.grpc.ask("ModelInfer", ONE))
        call = both.grpc.channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")
        slow = call.future(never(), timeout=WAIT)
        assert slow.code() is Code.DEADLINE_EXCEEDED
        go_on.set()
        with ThreadPoolExecutor(8) as pool:
            found = [*pool.map(lambda _: both.grpc.ask("ModelInfer", ONE), range(50))]
        assert len(found) == 50


def test_errors_of_the_server_tell_nothing(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Both(bundle) as both:

        def broken(*given: object) -> None:
            raise ValueError("a secret")

        monkeypatch.setattr(Lookups, "vectors", broken)
        error = both.grpc.refused("ModelInfer", ONE)
    assert error.code() is Code.INTERNAL
    assert error.details() == "The server could not answer. Its log says why."


def test_figures(both: Both) -> None:
    def figure(code: str) -> float:
        lines = both.http.get("/metrics").text.splitlines()
        name = f'hotbed_requests_total{{endpoint="grpc_infer",status="{code}"}}'
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    before = figure("OK"), figure("INVALID_ARGUMENT")
    both.grpc.ask("ModelInfer", ONE)
    both.grpc.refused("ModelInfer", without(0, raw=b""))
    assert (figure("OK"), figure("INVALID_ARGUMENT")) == (before[0] + 1, before[1] + 1)


def test_tokens(bundle: Path) -> None:
    with Both(bundle, tokens=("one", "two")) as both:
        for header in (None, "one", "Bearer three", "Bearer ", "Basic one"):
            metadata = [] if header is None else [("authorization", header)]
            for method in ("ModelInfer", "ServerMetadata", "RepositoryIndex"):
                error = both.grpc.refused(method, ONE, metadata=metadata)
                assert error.code() is Code.UNAUTHENTICATED
        twice = [("authorization", "Bearer one")] * 2
        assert both.grpc.refused("ModelInfer", ONE, metadata=twice).code() is Code.UNAUTHENTICATED
        for token in ("one", "two"):
            metadata = [("authorization", f"Bearer {token}")]
            assert arrays_of(both.grpc.ask("ModelInfer", ONE, metadata=metadata))
        assert both.grpc.ask("ServerLive").live and both.grpc.ask("ServerReady").ready


def test_compressed_messages_are_not_taken(both: Both) -> None:
    """They would be expanded before their size is looked at."""
    error = both.grpc.refused("ModelInfer", bytes(3000), compression=grpc.Compression.Gzip)
    assert error.code() is Code.UNIMPLEMENTED
    assert arrays_of(both.grpc.ask("ModelInfer", ONE))


def test_a_stock_client(both: Both) -> None:
    """Triton's, whose generated classes have the same names."""
    triton = pytest.importorskip("tritonclient.grpc")
    client = triton.InferenceServerClient(both.at)
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("clicks")
    assert client.get_model_metadata("clicks").inputs[0].name == "x"
    assert client.get_model_repository_index().models[0].state == "READY"
    client.load_model("clicks")
    inputs = []
    for each in changed(0):
        values = np.array(each["data"], DTYPES[each["datatype"]]).reshape(each["shape"])
        inputs.append(triton.InferInput(each["name"], values.shape, each["datatype"]))
        inputs[-1].set_data_from_numpy(values)
    answer = client.infer("clicks", inputs, request_id="7")
    told = both.http.post(INFER, json={"inputs": changed(0)}).json()["outputs"]
    for each in told:
        np.testing.assert_array_equal(
            answer.as_numpy(each["name"]).reshape(-1), np.float32(each["data"])
        )
    with pytest.raises(triton.InferenceServerException, match="no model of this name"):
        client.infer("other", inputs)
    client.close()


def test_bytes_of_messages() -> None:
    """As Triton's classes wrote them."""
    request = bytes.fromhex(
        "0a016d1201311a016122080a017012031a01762a0d0a01781204465033321a0201022a3f0a01791205494e5436"
        "341a01022a300a0101120affffffffffffffffff011a068080808080202201012a010232040000003f3a080000"
        "00000000d03f42016232030a016f3a083132333435363738"
    )
    message = messages.message_class("ModelInferRequest").FromString(request)
    assert (message.model_name, message.model_version, message.id) == ("m", "1", "a")
    assert message.parameters["p"].string_param == "v" and message.outputs[0].name == "o"
    first, second = message.inputs
    assert (first.name, first.datatype, [*first.shape]) == ("x", "FP32", [1, 2])
    filled = {field.name: [*values] for field, values in second.contents.ListFields()}
    assert filled == {
        **{"bool_contents": [True], "int_contents": [-1], "int64_contents": [1 << 40]},
        **{"uint_contents": [1], "uint64_contents": [2], "fp32_contents": [0.5]},
        **{"fp64_contents": [0.25], "bytes_contents": [b"b"]},
    }
    assert [*message.raw_input_contents] == [b"12345678"]
    assert message.SerializeToString(deterministic=True) == request
    output = {"name": "o", "datatype": "FP32", "shape": [2]}
    answer = messages.message_class("ModelInferResponse")(
        model_name="m",
        model_version="1",
        id="a",
        outputs=[{**output, "contents": {"fp32_contents": [1, 2]}}],
        raw_output_contents=[b"z"],
    )
    assert answer.SerializeToString().hex() == (
        "0a016d1201311a01612a180a016f1204465033321a01022a0a32080000803f0000004032017a"
    )


def test_messages_are_those_of_the_protocol() -> None:
    """Field by field, as Triton's client has them."""
    generated = pytest.importorskip("tritonclient.grpc.service_pb2")

    def about(message: Any) -> object:
        fields = [
            (
                *(each.number, each.name, each.type, each.has_presence),
                each.message_type and each.message_type.full_name,
                each.containing_oneof and each.containing_oneof.name,
            )
            for each in message.fields
        ]
        return message.full_name, fields, {each.name: about(each) for each in message.nested_types}

    for name in messages.DECLARED:
        if "." not in name:
            own = messages.message_class(name).DESCRIPTOR
            assert about(own) == about(getattr(generated, name).DESCRIPTOR)
