"""A process beside a server, which makes versions of the checkpoints of a run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from hotbed.serve.following.follower import Follower, follow
from hotbed.serve.http.children import kept_running

__all__ = ["following"]


@contextlib.contextmanager
def following(bundle: str, run: str) -> Iterator[None]:
    """For a ``with`` statement: versions of a bundle are made meanwhile, in another process.

    Raises:
        BundleError, CheckpointError: as of `hotbed.serve.following.follower.Follower`.
    """
    with Follower(bundle, run):
        pass  # what is wrong is told before anything is served
    with kept_running(_follow, bundle, run):
        yield


def _follow(bundle: str, run: str) -> None:
    follow(bundle, run, report=lambda line: print(line, file=sys.stderr, flush=True))
