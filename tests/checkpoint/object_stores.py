"""Storages of objects for tests: in memory, over a folder, and a server of S3 in this process."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest

KINDS = ("memory", "file", "s3")
BUCKET = "bucket"


def environment_of(endpoint: str) -> dict[str, str]:
    """Variables that lead clients of S3 to a server."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """For a ``with`` statement: the address of a server with a bucket, to which `s3://` leads meanwhile."""
    server_module = pytest.importorskip("moto.server", reason="needs moto[server]")
    pytest.importorskip("s3fs", reason="needs s3fs")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        with mock.patch.dict(os.environ, environment_of(f"http://{host}:{port}")):
            fsspec.filesystem("s3", use_listings_cache=False).mkdir(BUCKET)
            yield f"http://{host}:{port}"
    finally:
        server.stop()


def new_root(kind: str, folder: Path) -> str:
    """The URL of a run that has nothing yet."""
    name = f"run-{secrets.token_hex(4)}"
    return {
        "memory": f"memory://{name}",
        "file": f"file://{folder}/{name}",
        "s3": f"s3://{BUCKET}/{name}",
    }[kind]


def storage_of(url: str) -> Any:
    """What fsspec has for a URL."""
    scheme = url.partition("://")[0]
    options = {"auto_mkdir": True} if scheme == "file" else {}
    return fsspec.filesystem(scheme, use_listings_cache=False, **options)


def names_in(url: str) -> list[str]:
    """Objects at a URL, as paths below it."""
    top = fsspec.core.strip_protocol(url).strip("/")
    return sorted(p.strip("/")[len(top) + 1 :] for p in storage_of(url).find(url))


def folders_in(url: str) -> list[str]:
    return sorted({name.partition("/")[0] for name in names_in(url)})


def contents_of(url: str) -> bytes:
    return bytes(storage_of(url).cat_file(url))


def put(url: str, contents: bytes) -> None:
    storage_of(url).pipe_file(url, contents)
