"""Servers of gRPC as processes: workers that die, ends in order, TLS, addresses that are taken, versions that
change under load."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from effort import SOAK, examples
from serve.servers import WAIT, Running, served, soon
from serve.test_following_server import Telling
from typer.testing import CliRunner

import hotbed as hb
from hotbed.cli.app import app
from hotbed.serve.grpc.port import held

grpc = pytest.importorskip("grpc")
messages = pytest.importorskip("hotbed.serve.grpc.messages")
METHOD = "/inference.GRPCInferenceService/ModelInfer"
HERE = ("--grpc", "127.0.0.1:0")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(Telling(), tmp_path_factory.mktemp("served") / "bundle")


def exported(model: Telling, path: Path) -> Path:
    model.become(1)
    sample = {"user": torch.arange(5), "city": torch.arange(5), "x": torch.zeros(5, 1)}
    return hb.export(model, path, sample=sample, step=1)


def address(server: Running) -> str:
    """Where it answers, once it says so."""

    def found() -> list[str]:
        return re.findall(r"answers gRPC at (\S+)\n", "".join(server.lines))

    soon(found)
    (at,) = found()
    return at


def request(samples: int = 5) -> bytes:
    ids = np.arange(samples) % 5
    values: dict[str, Any] = {"user": ids, "city": ids, "x": np.zeros((samples, 1), np.float32)}
    inputs = [
        {"name": name, "shape": each.shape, "datatype": "FP32" if name == "x" else "INT64"}
        for name, each in values.items()
    ]
    message = messages.message_class("ModelInferRequest")(
        model_name="bundle",
        inputs=inputs,
        raw_input_contents=[each.tobytes() for each in values.values()],
    )
    return bytes(message.SerializeToString())


def channel_to(at: str, **more: Any) -> Any:
    """A connection of its own: others share one of the process."""
    return grpc.insecure_channel(at, options=[("grpc.use_local_subchannel_pool", 1)], **more)


def numbers_of(channel: Any, message: bytes = request(), **more: Any) -> set[float]:
    """All numbers that an answer has: one, of one version."""
    ask = channel.unary_unary(
        METHOD, response_deserializer=messages.message_class("ModelInferResponse").FromString
    )
    answer = ask(message, timeout=WAIT, **{"wait_for_ready": True, **more})
    flat = np.concatenate([np.frombuffer(each, "<f4") for each in answer.raw_output_contents])
    return {*flat.tolist()}


def fresh(server: Running, **more: Any) -> set[float]:
    with channel_to(address(server)) as channel:
        return numbers_of(channel, **more)


def test_a_killed_worker_comes_again(bundle: Path) -> None:
    with served(bundle, *HERE, "--workers", 2) as server:
        soon(lambda: len(server.workers()) == 2)
        for _ in range(2):
            assert fresh(server) == {1}
            first = server.workers()[0]
            os.kill(first, signal.SIGKILL)
            soon(lambda first=first: first not in server.workers() and len(server.workers()) == 2)

        def ask(_: int) -> set[float]:
            return fresh(server)

        def counted() -> float:
            _, figures = server.get("/metrics")
            found = re.search(
                r'hotbed_requests_total\{endpoint="grpc_infer",status="OK"\} (\S+)', figures
            )
            return float(found[1]) if found else 0

        with ThreadPoolExecutor(4) as pool:
            assert [*pool.map(ask, range(40))] == [{1.0}] * 40
        assert counted() >= 40  # of both workers


def test_every_worker_answers(bundle: Path) -> None:
    """The system gives connections to all that listen."""
    with served(bundle, *HERE, "--workers", 2) as server:

        def listeners() -> int:
            port = f":{int(address(server).rsplit(':', 1)[1]):04X} "
            lines = [
                line
                for table in ("tcp", "tcp6")
                for line in Path(f"/proc/net/{table}").read_text().splitlines()
            ]
            return sum(port in line and line.split()[3] == "0A" for line in lines)

        soon(lambda: listeners() == 2)


@pytest.mark.parametrize("workers", [2, 1][: examples(1, 2)])
def test_it_says_that_it_answers_when_calls_are_answered(bundle: Path, workers: int) -> None:
    """Calls that do not wait for it are refused before."""
    with served(bundle, *HERE, "--workers", workers) as server:
        assert fresh(server, wait_for_ready=False) == {1}


def silent(at: str) -> socket.socket:
    """A connection of HTTP/2 whose client says nothing more."""
    host, port = at.split(":")
    client = socket.create_connection((host, int(port)), timeout=WAIT)
    client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
    assert client.recv(1 << 16)
    return client


def test_silent_connections_do_not_hold_its_end(bundle: Path) -> None:
    with served(bundle, *HERE, "--timeout", WAIT) as server:
        with (
            silent(address(server)),
            silent(address(server)),
            channel_to(address(server)) as channel,
        ):
            assert numbers_of(channel) == {1}
            server.process.terminate()
            assert server.process.wait(10) == 0  # gRPC would wait 20 s for what clients say
        assert not any("Traceback" in line for line in server.lines), server.lines


def test_calls_that_it_has_are_answered_when_it_ends(bundle: Path) -> None:
    with (
        served(bundle, *HERE) as server,
        silent(address(server)),
        channel_to(address(server)) as channel,
    ):
        assert numbers_of(channel) == {1}
        come = threading.Event()

        def slow() -> Iterator[bytes]:
            assert come.wait(WAIT)
            yield request()

        call = channel.stream_unary(METHOD).future(slow(), timeout=WAIT)
        assert numbers_of(channel) == {1}  # behind it, so that the first has been met
        server.process.terminate()
        soon(lambda: not _takes(address(server)))
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(1)
        come.set()
        assert call.result()
        assert server.process.wait(WAIT) == 0
        assert not any("Traceback" in line for line in server.lines), server.lines


def _takes(at: str) -> bool:
    host, port = at.split(":")
    try:
        socket.create_connection((host, int(port))).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls_and_tokens(bundle: Path, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    asked = ["-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    alternative = ["-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(
        ["openssl", "req", "-x509", *asked, *alternative, *made], check=True, capture_output=True
    )
    tokens = tmp_path / "tokens"
    tokens.write_text("secret\n")
    options = ("--ssl-certfile", certificate, "--ssl-keyfile", key, "--token-file", tokens)
    with served(bundle, *HERE, *options) as server:
        trusted = grpc.ssl_channel_credentials(certificate.read_bytes())
        with grpc.secure_channel(address(server), trusted) as channel:
            metadata = [("authorization", "Bearer secret")]
            assert numbers_of(channel, metadata=metadata) == {1}
            with pytest.raises(grpc.RpcError) as error:
                numbers_of(channel)
            assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with channel_to(address(server)) as channel, pytest.raises(grpc.RpcError) as error:
            channel.unary_unary(METHOD)(request(), timeout=WAIT)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.skipif(not SOAK, reason="as over HTTP: HOTBED_SOAK=1")
def test_versions_are_swapped_under_load(tmp_path: Path) -> None:
    model = Telling()
    bundle, run = exported(model, tmp_path / "bundle"), tmp_path / "run"
    optimizer = hb.optim.SGD(model.parameters(), lr=0.1)
    hb.save(run, model, optimizer, step=1)
    options = (*HERE, "--follow", run, "--max-wait", 5)
    with served(bundle, *options) as server, channel_to(address(server)) as channel:
        seen: list[set[float]] = []
        ended = threading.Event()

        def load() -> None:
            while not ended.is_set():
                seen.append(numbers_of(channel))

        with ThreadPoolExecutor(3) as pool:
            loads = [pool.submit(load) for _ in range(3)]
            try:
                for number in range(2, 6):
                    model.become(number)
                    hb.save(run, model, optimizer, step=number, delta=number % 4 != 0)
                    soon(lambda number=number: seen and seen[-1] == {number})
            finally:
                ended.set()
            for each in loads:
                each.result()
        assert all(len(each) == 1 for each in seen)
        assert {*range(1, 6)} <= {n for each in seen for n in each}


def test_garbage_on_the_port(bundle: Path) -> None:
    with served(bundle, *HERE, "--timeout", 1) as server, channel_to(address(server)) as channel:
        assert numbers_of(channel) == {1}
        host, port = address(server).split(":")
        for sent in (
            b"GET / HTTP/1.1\r\nHost: h\r\n\r\n",
            b"\x16\x03\x01" + bytes(200),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 10_000,
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(10_000),
            b"",
        ):
            with socket.create_connection((host, int(port)), timeout=WAIT) as client:
                client.sendall(sent)
                try:
                    while client.recv(1 << 16):
                        pass  # until it is closed: silent ones, too
                except ConnectionError:
                    pass
        assert numbers_of(channel) == {1}
        assert not any("Traceback" in line for line in server.lines), server.lines


def test_what_cannot_be_served_is_told_in_a_sentence(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*options: str) -> str:
        done = CliRunner().invoke(app, ["serve", str(bundle), "--bind", "127.0.0.1:0", *options])
        assert done.exit_code == 2 and "Traceback" not in done.output, done.output
        return done.output

    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"--grpc {at}: Address already in use" in told("--grpc", at)
    with socket.socket() as shared:  # as other servers of gRPC listen
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        shared.bind(("127.0.0.1", 0))
        shared.listen()
        at = f"127.0.0.1:{shared.getsockname()[1]}"
        assert f"--grpc {at}: Address already in use" in told("--grpc", at)
    assert "is no ADDRESS:PORT" in told("--grpc", "8500")
    assert "answers no gRPC" in told("--grpc", "127.0.0.1:0", "--rows-only")
    monkeypatch.setitem(sys.modules, "grpc", None)
    assert "needs grpcio: pip install 'hotbed[grpc]'" in told(*HERE)


def test_an_address_is_held(bundle: Path) -> None:
    """Until the server ends, other programs cannot take it, and workers can, of which one may die."""
    with held("127.0.0.1", 0) as at:
        port = int(at.rsplit(":", 1)[1])
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port), reuse_port=False).close()


def test_nothing_of_grpc_comes_without_it(bundle: Path) -> None:
    code = (
        "import sys\n"
        "from hotbed.serve.http.app import app_of\n"
        "from hotbed.serve.http.run import serve\n"
        "from hotbed.serve.http.settings import ServeSettings\n"
        f"app_of(ServeSettings(bundle={str(bundle)!r}, name='bundle'))\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('grpc', 'google')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
