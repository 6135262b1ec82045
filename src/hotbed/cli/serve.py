"""`hotbed serve`."""

from __future__ import annotations

import dataclasses
import os
from typing import Annotated

from hotbed.cli.errors import in_one_sentence
from hotbed.cli.options import command, made_of
from hotbed.train.options import SIZE, Kind

BUNDLE = Kind("BUNDLE", is_positional=True)
ADDRESS = Kind("ADDRESS:PORT", is_path=False)
READ = Kind("PATH")
RUN = Kind("RUN")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options of `hotbed serve`."""

    bundle: Annotated[str, BUNDLE]
    """What hotbed export or hotbed.export wrote."""
    bind: Annotated[str, ADDRESS] = "127.0.0.1:8501"
    """Where connections are taken."""
    grpc: Annotated[str | None, ADDRESS] = None
    """Where gRPC is answered, too. It needs pip install 'hotbed\\[grpc]'. Default: nowhere."""
    follow: Annotated[str | None, RUN] = None
    """The folder of a run: each of its checkpoints is served as soon as it is there."""
    workers: int = 1
    """Processes that answer; they share the rows' memory."""
    memory: Annotated[str | None, SIZE] = None
    """What all processes may have together, rows included, like 4GB; other rows are read from the disk when
    they are asked for. Default: what the system has."""
    shards: int = 0
    """Processes beside these that have the rows, each a part in its memory. Default: all have all."""
    replicas: int = 1
    """Processes a shard; one that dies is not missed."""
    shards_file: Annotated[str | None, READ] = None
    """Shards on other machines: {"shards": [["HOST:PORT", ...], ...]}, replicas by shard. Names are asked of
    DNS again and again."""
    rows_only: bool = False
    """Be one of those: answer with rows, for another hotbed serve."""
    threads: int = 1
    """That compute the dense part of a batch, in each process."""
    name: str | None = None
    """Of the model, in paths. Default: the name of the folder."""
    token_file: Annotated[str | None, READ] = None
    """Tokens, one a line, of which a request needs one."""
    ssl_certfile: Annotated[str | None, READ] = None
    """Certificate, for https."""
    ssl_keyfile: Annotated[str | None, READ] = None
    """Its key."""
    max_body: Annotated[str, SIZE] = "16MB"
    """The largest body of a request."""
    max_samples: int = 8192
    """The most samples of a request."""
    max_ids: int = 10_000
    """The most ids of a bag."""
    timeout: float = 10.0
    """Seconds in which a request has come, and been answered."""
    max_wait: float = 0.25
    """Seconds of work that may wait; beyond, requests are told to come again (503)."""


@command(ServeOptions)
def serve(given: dict[str, object]) -> None:
    """Answer requests with an exported model, over HTTP.

    Requests are those of TensorFlow Serving (POST /v1/models/NAME:predict) and of the Open Inference Protocol
    (POST /v2/models/NAME/infer). / is a page that shows what is asked with, and asks; /openapi.json,
    /metrics (for Prometheus), /healthz and /readyz are for other programs. Ctrl-C and SIGTERM end it when the
    requests that it has are answered. It needs pip install 'hotbed\\[serve]'.

    [bold]Examples[/bold]

      [cyan]hotbed serve bundle[/cyan]
      Answers at http://127.0.0.1:8501, to this machine alone.

      [cyan]hotbed serve bundle --follow runs/1[/cyan]
      Answers with what the training has learned up to its latest checkpoint.

      [cyan]hotbed serve bundle --bind 0.0.0.0:8501 --workers 4 --token-file tokens[/cyan]
      Answers whoever has a token, with four processes.
    """
    from rich.console import Console

    console = Console(stderr=True)
    with in_one_sentence(given, console):
        from hotbed.serve.http.limits import Limits
        from hotbed.serve.http.run import address_of
        from hotbed.serve.http.run import serve as run
        from hotbed.serve.http.settings import ServeSettings
        from hotbed.serve.http.tokens import read_tokens
        from hotbed.storage import parse_bytes

        options = made_of(ServeOptions, given)
        folder = os.path.abspath(options.bundle)
        token_file = options.token_file
        limits = Limits(
            body=parse_bytes(options.max_body),
            samples=options.max_samples,
            ids=options.max_ids,
            seconds=options.timeout,
            waiting=options.max_wait,
        )
        settings = ServeSettings(
            bundle=folder,
            name=options.name or os.path.basename(folder),
            threads=options.threads,
            grpc=options.grpc,
            follow=options.follow,
            memory=None if options.memory is None else parse_bytes(options.memory),
            workers=options.workers,
            shards=options.shards,
            replicas=options.replicas,
            shards_file=options.shards_file,
            rows_only=options.rows_only,
            tokens=() if token_file is None else tuple(read_tokens(token_file)),
            certificate=options.ssl_certfile,
            key=options.ssl_keyfile,
            limits=limits,
        )

        def began(address: str) -> None:
            console.print(f"{settings.name} answers at {address}", highlight=False, markup=False)

        def told(line: str) -> None:
            console.print(line, highlight=False, markup=False)

        run(settings, *address_of(options.bind), began, told)
