"""Servers as processes: they end without losing requests, outlive their workers, and bear clients that are
slow, many or wrong."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from serve.servers import Running, served, soon
from starlette.testclient import TestClient
from typer.testing import CliRunner

import hotbed as hb
from hotbed.cli.app import app
from hotbed.serve.http.app import app_of
from hotbed.serve.http.metrics import FIGURES
from hotbed.serve.http.settings import ServeSettings

PREDICT = "/v1/models/bundle:predict"
BODY = b'{"inputs": {"dense": [[0.5]], "user": [3]}}'
SECONDS = 1.0
"""In which a request must have come, here."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = hb.models.DLRM(["user"], dim=4, num_dense=1)
    sample = {"dense": torch.rand(6, 1), "user": torch.arange(6)}
    model(sample)
    return hb.export(model, tmp_path_factory.mktemp("served") / "bundle", sample=sample)


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Running]:
    with served(bundle, "--timeout", SECONDS, "--max-body", "100kB") as server:
        yield server


def connected(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def answer_of(client: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    found = b""
    try:
        while piece := client.recv(1 << 16):
            found += piece
    except ConnectionResetError:
        pass
    return found


def head(length: int, more: str = "", path: str = PREDICT) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: h\r\n{more}Content-Length: {length}\r\n\r\n".encode()


def check_answers(server: Running) -> None:
    status, answer = server.ask("POST", PREDICT, BODY)
    assert status == 200 and len(answer["outputs"]) == 1


def memory_of(server: Running) -> int:
    """Bytes in memory of the process, of its own."""
    text = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024


def test_headers_that_do_not_come(server: Running) -> None:
    begun = time.monotonic()
    with connected(server) as silent, connected(server) as slow:
        slow.sendall(b"POST / HTTP/1.1\r\nHost:")
        assert answer_of(silent) == b"" and answer_of(slow) == b""
    assert time.monotonic() - begun < 20 * SECONDS
    with connected(server) as again:  # the second request of a connection
        again.sendall(head(len(BODY)) + BODY)
        again.sendall(b"POST / HT")
        whole = answer_of(again)  # ends in time
        assert whole.count(b"HTTP/1.1 ") == 1 and whole.startswith(b"HTTP/1.1 200")
    check_answers(server)


def test_what_nobody_awaits_keeps_no_connection(server: Running) -> None:
    """Empty lines behind an answer, and a body behind the answer that it is not wanted."""
    for asked, drop in ((head(len(BODY)) + BODY, b"\r\n"), (head(10**9, "", "/nothing"), b"x")):
        with connected(server) as client:
            client.sendall(asked)
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 ")
            begun = time.monotonic()
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                while time.monotonic() - begun < 20 * SECONDS:
                    client.sendall(drop)
                    time.sleep(0.1)
    check_answers(server)


def test_answers_that_are_not_taken(server: Running) -> None:
    """They do not keep memory, nor the connection."""

    def open_files() -> int:
        return len(os.listdir(f"/proc/{server.process.pid}/fd"))

    before = open_files()
    rows = 1000
    body = b'{"inputs": {"dense": [%s], "user": [%s]}}' % (
        b",".join([b"[0.123456789]"] * rows),
        b",".join([b"3"] * rows),
    )
    clients = []
    try:
        for _ in range(5):
            client = socket.socket()
            clients.append(client)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", server.port))
            client.settimeout(1)
            with contextlib.suppress(TimeoutError):  # the server reads no more
                for _ in range(600):
                    client.sendall(head(len(body)) + body)
        soon(lambda: open_files() <= before, 20 * SECONDS)
    finally:
        for client in clients:
            client.close()
    check_answers(server)


def test_an_upgrade_is_not_taken(server: Running) -> None:
    """The parser would take the body for another request: one that no proxy has seen."""
    within = b"GET /v2 HTTP/1.1\r\nHost: h\r\n\r\n"
    with connected(server) as client:
        client.sendall(head(len(within), "Connection: Upgrade\r\nUpgrade: h2c\r\n"))
        with contextlib.suppress(OSError):  # it may have closed
            time.sleep(0.2)
            client.sendall(within)
        answer = answer_of(client)
    assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1 ") == 1
    assert b"cannot ask for an upgrade" in answer
    with connected(server) as client:
        client.sendall(
            b"GET /v2 HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
        )
        assert answer_of(client).startswith(b"HTTP/1.1 200")
    assert not any("pgrade" in line for line in server.lines)


def test_a_body_that_does_not_come(server: Running) -> None:
    with connected(server) as slow:
        slow.sendall(head(100) + b"{")
        assert answer_of(slow).startswith(b"HTTP/1.1 408")
    with connected(server) as gone:
        gone.sendall(head(100) + b"{")
    check_answers(server)


def test_what_is_too_large(server: Running) -> None:
    before = memory_of(server)
    for sent in (
        head(10**12),
        b"GET / HTTP/1.1\r\nHost: h\r\nx: " + b"y" * 3_000_000,
        b"GET /" + b"y" * 3_000_000,
    ):
        with connected(server) as client:
            try:
                client.sendall(sent)
            except (ConnectionResetError, BrokenPipeError):
                continue
            assert answer_of(client)[:12] in (b"HTTP/1.1 413", b"HTTP/1.1 431", b"")
    with connected(server) as client:  # chunks without an end
        client.sendall(f"POST {PREDICT} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            for _ in range(10_000):
                client.sendall(chunk)
    check_answers(server)
    assert memory_of(server) - before < 50_000_000


def test_many_connections(server: Running) -> None:
    before = memory_of(server)
    clients = []
    try:
        for _ in range(800):
            clients.append(connected(server))
            clients[-1].sendall(b"GET /healthz HTTP/1.1\r\nHost: h\r\n")
        check_answers(server)
        assert memory_of(server) - before < 100_000_000
    finally:
        for client in clients:
            client.close()
    check_answers(server)


def test_what_is_no_http(server: Running) -> None:
    for sent in (
        b"\x16\x03\x01" + bytes(200),
        b"GET / HTTP/9.9\r\n\r\n",
        b"\0" * 1000,
        b"\r\n" * 100,
    ):
        with connected(server) as client:
            client.sendall(sent)
            assert answer_of(client)[:12] in (b"HTTP/1.1 400", b"")
    check_answers(server)


def test_requests_that_it_has_are_answered_when_it_ends(bundle: Path) -> None:
    with served(bundle) as server, connected(server) as client:
        client.sendall(head(len(BODY)) + BODY[:10])
        check_answers(server)  # behind it, so that the first has been met
        server.process.terminate()
        soon(lambda: not _takes(server))
        client.sendall(BODY[10:])
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert server.process.wait(60) == 0


def _takes(server: Running) -> bool:
    try:
        connected(server).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_killed_worker_comes_again(bundle: Path) -> None:
    with served(bundle, "--workers", 2) as server:
        soon(lambda: _alive(server) == 2)
        for _ in range(2):
            first = server.workers()[0]
            subprocess.run(["kill", "-9", str(first)], check=True)
            soon(lambda first=first: first not in server.workers() and _alive(server) == 2)
            check_answers(server)
        with ThreadPoolExecutor(8) as pool:
            statuses = [*pool.map(lambda _: server.ask("POST", PREDICT, BODY)[0], range(200))]
        assert statuses == [200] * 200
        _, figures = server.get("/metrics")
        counted = 'hotbed_requests_total{endpoint="predict",status="200"}'
        assert float(figures.split(counted)[1].split()[0]) >= 200  # of both workers


def test_workers_that_cannot_begin_are_tried_again(bundle: Path, tmp_path: Path) -> None:
    there, away = tmp_path / "bundle", tmp_path / "away"
    shutil.copytree(bundle, there)
    with served(there, "--workers", 2) as server:
        soon(lambda: _figure(server, "hotbed_versions_total") == 2)  # both have begun
        there.rename(away)
        subprocess.run(["kill", "-9", str(server.workers()[0])], check=True)
        soon(lambda: any("cannot begin" in line for line in server.lines))
        assert not any("Traceback" in line for line in server.lines)
        check_answers(server)  # the other one goes on
        away.rename(there)
        soon(lambda: _alive(server) == 2)


def test_workers_end_with_their_parent(bundle: Path, tmp_path: Path) -> None:
    """Where the parent is killed, the address is free again, and no files are left."""
    with served(bundle, "--workers", 2, temporary=tmp_path) as server:
        soon(lambda: len(server.workers()) == 2 and _alive(server) == 2)
        assert [*tmp_path.glob("hotbed-*")]
        server.process.kill()
        soon(lambda: not _takes(server))
        soon(lambda: not [*tmp_path.glob("hotbed-*")])


def test_workers_that_end_after_their_parent_leave_no_files(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when they end before they have looked for it."""
    folder, parent = tmp_path / "figures", Mock()
    folder.mkdir()
    monkeypatch.setenv(FIGURES, str(folder))
    monkeypatch.setattr("multiprocessing.parent_process", lambda: parent)
    told = ServeSettings(bundle=str(bundle), name="bundle", workers=2)
    for is_alive in (True, False):
        parent.is_alive.return_value = True
        with TestClient(app_of(told)):
            parent.is_alive.return_value = is_alive
        assert folder.exists() == is_alive


def test_killed_workers_have_nothing_waiting(bundle: Path) -> None:
    with served(bundle, "--workers", 2) as server:
        soon(lambda: _alive(server) == 2)
        samples = 8000
        body = b'{"inputs": {"dense": [%s], "user": [%s]}}' % (
            b",".join([b"[0.5]"] * samples),
            b",".join([b"3"] * samples),
        )
        with ThreadPoolExecutor(8) as pool:
            ended = threading.Event()
            for _ in range(8):
                pool.submit(_ask_until, ended, server, body)
            try:
                soon(lambda: _figure(server, "hotbed_waiting_samples") >= samples)
                for worker in server.workers():
                    subprocess.run(["kill", "-9", str(worker)], check=True)
            finally:
                ended.set()
        soon(lambda: _alive(server) == 2)
        assert _figure(server, "hotbed_waiting_samples") == 0


def _ask_until(ended: threading.Event, server: Running, body: bytes) -> None:
    while not ended.is_set():
        with contextlib.suppress(OSError, http.client.HTTPException):
            server.ask("POST", PREDICT, body)


def _figure(server: Running, name: str) -> float:
    """Return what /metrics says; 0 where a worker was killed meanwhile."""
    try:
        _, figures = server.get("/metrics")
    except (OSError, http.client.HTTPException):
        return 0.0
    return float(figures.split(f"\n{name} ")[1].split()[0])


def _alive(server: Running) -> int:
    """How many workers there are, once requests are answered."""
    try:
        check_answers(server)
    except ConnectionError:  # it was with the one that was killed
        return 0
    return len(server.workers())


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
    tokens.write_text("\ufeffsecret\r\n\r\n# who may ask\r\n", "utf-8")
    options = ("--ssl-certfile", certificate, "--ssl-keyfile", key, "--token-file", tokens)
    with served(bundle, *options) as server:
        trusting = ssl.create_default_context(cafile=str(certificate))
        url = f"https://127.0.0.1:{server.port}{PREDICT}"
        request = urllib.request.Request(url, BODY, {"Authorization": "Bearer secret"})
        with urllib.request.urlopen(request, context=trusting, timeout=30) as response:
            assert response.status == 200
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(url, BODY, context=trusting, timeout=30)
        with error.value as refused:
            assert refused.code == 401


def test_a_full_disk_for_figures(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 0))
    done = CliRunner().invoke(
        app, ["serve", str(bundle), "--workers", "2", "--bind", "127.0.0.1:0"]
    )
    assert done.exit_code == 2 and "No space left" in done.output


def test_what_cannot_be_served_is_told_in_a_sentence(bundle: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("#\n")
    many = tmp_path / "many"
    many.write_text("".join(f"{n:050}\n" for n in range(3000)))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for options, told in (
            ([tmp_path], "is no bundle"),
            ([bundle, "--bind", "8501"], "is no ADDRESS:PORT"),
            ([bundle, "--bind", f"127.0.0.1:{port}"], "in use"),
            ([bundle, "--workers", "0"], "workers is 0"),
            ([bundle, "--timeout", "0"], "seconds is 0"),
            ([bundle, "--name", "a/b"], "without / and :"),
            ([bundle, "--token-file", empty], "has no token"),
            ([bundle, "--token-file", many, "--workers", 2], "3,000 tokens are more than"),
            ([bundle, "--token-file", tmp_path / "none"], "none"),
        ):
            done = CliRunner().invoke(app, ["serve", *map(str, options)])
            assert done.exit_code == 2, (options, done.output)
            assert told in done.output and "Traceback" not in done.output, done.output
