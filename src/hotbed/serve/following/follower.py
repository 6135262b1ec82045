"""A bundle that follows a training run: a version of it for each new checkpoint."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

from hotbed.checkpoint.chain import chain_of, fault_of_chain
from hotbed.checkpoint.errors import CheckpointError, DamagedError
from hotbed.checkpoint.folder import folders_in, is_complete, opened, order_of, root_of
from hotbed.checkpoint.manifest import MANIFEST, read_manifest
from hotbed.checkpoint.stores import store_of
from hotbed.checkpoint.stores.local_files import held
from hotbed.errors import HotbedError
from hotbed.paths import path_text
from hotbed.serve.bundles.bundle import BundleError
from hotbed.serve.bundles.manifests import VERSION_MANIFEST, read_bundle, read_version
from hotbed.serve.bundles.versions import (
    Version,
    fault_of_sizes,
    folder_of,
    has_versions_alone,
    pinned,
    versions_of,
)
from hotbed.serve.following.layer_merges import LayerMerges
from hotbed.serve.following.new_version import Layer, Stack, Written, since_of, write_version

__all__ = ["Applied", "Follower", "follow"]

KEEP, MOST_LAYERS, EVERY = 3, 8, 0.5
_PART = re.compile(r"[^/\s]*[0-9a-f]{16}\.part")
"""Folder of a version that is being written, which has another name at each try."""


class Applied(NamedTuple):
    """A checkpoint that has become a version."""

    version: Version
    step: int
    rows: int
    """Rows that differ from those of the version before."""
    seconds: float


class Follower:
    """Makes versions of a bundle from the checkpoints of a run. One process follows for a bundle at a time;
    a follower is used by one thread, in a ``with`` statement.

    Args:
        bundle: folder that `hotbed.export` has written. It stays as it is, but for its folder ``versions``.
        run: folder of checkpoints, or its URL on object storage. It need not be there yet.
        keep: how many of the newest versions stay on the disk, beside the bundle and a pinned one.
        most_layers: layers of changed rows of a table above which some are merged, on another thread.

    Raises:
        BundleError: `bundle` is none, was exported by an earlier Hotbed, or another process follows for it.
        CheckpointError: `run` is a checkpoint, or no path.
    """

    def __init__(
        self,
        bundle: str | os.PathLike[str],
        run: str | os.PathLike[str],
        *,
        keep: int = KEEP,
        most_layers: int = MOST_LAYERS,
    ) -> None:
        for name, value in (("keep", keep), ("most_layers", most_layers)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise BundleError(f"{name} must be an integer from 1 on, got {value!r}.")
        self._bundle, self._run = os.path.abspath(path_text(bundle, "bundle")), root_of(run, "run")
        if is_complete(self._run):
            raise CheckpointError(
                f"{self._run} is a checkpoint itself. Name the folder that it lies in."
            )
        self._keep, self._most_layers = keep, most_layers
        self._refused: set[tuple[str, float]] = set()
        self._last: tuple[str, float] | None = None
        self._of_base = contextlib.ExitStack()
        self._begin()

    def __enter__(self) -> Follower:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End merges that are under way, and let another process follow."""
        self._of_base.close()

    def _begin(self) -> None:
        """Go on from the newest version of the bundle that is there now."""
        self._of_base.close()
        self._locked: os.stat_result | None = None  # where this fails, the next poll begins again
        about = read_bundle(self._bundle)
        if "parameters" not in about or "state_dict" not in about:
            raise BundleError(
                f"{self._bundle} does not tell which weights are the model's, as an earlier Hotbed has "
                "exported it. Export it again."
            )
        folder = folder_of(self._bundle, about["model_version"])
        os.makedirs(folder, exist_ok=True)
        locked = os.stat(folder)  # before it is locked: one that replaces it meanwhile is another
        try:
            self._of_base.enter_context(held(folder, fcntl.LOCK_EX | fcntl.LOCK_NB))
        except BlockingIOError:
            raise BundleError(
                f"Another process follows a run for {self._bundle} already. End it first."
            ) from None
        _remove_left_overs(folder)
        self._merges = LayerMerges(folder, self._most_layers)
        self._of_base.callback(self._merges.close)
        self._served = _newest(self._bundle)
        self._stack = Stack(0, {}, {}, about.get("checkpoint"), about.get("step"))
        if self._served is not None:
            self._stack = _stack_of(self._served)
        self._refused, self._last = set(), None
        self._about, self._locked = about, locked

    def _is_on_disk(self) -> bool:
        """Return True if nobody has removed the folder that is locked, or what the next version links."""
        paths = {layer.folder for layers in self._stack.tables.values() for layer in layers}
        if self._served is not None:
            own = [VERSION_MANIFEST, *(each["name"] for each in self._served.manifest["files"])]
            paths |= {os.path.join(self._served.version.folder, name) for name in own}
        try:
            for path in paths:
                os.stat(path)
            folder = os.stat(folder_of(self._bundle, self._about["model_version"]))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return self._locked is not None and os.path.samestat(folder, self._locked)

    def poll(self) -> Applied | None:
        """Make a version of the latest checkpoint, if there is one that is not served. Returns None if there
        is none; that costs a listing of the run. Where somebody has removed versions, it goes on from what
        is there, as a new follower would.

        A checkpoint that cannot be served is refused once, by an error; the next call takes the latest
        before it, if that is newer than what is served, or a later one.

        Raises:
            BundleError: the bundle is gone, or the checkpoint is of another model.
            CheckpointError: the checkpoint is damaged.
            OSError: a version cannot be written, or the run not be read; the next call tries again.
        """
        is_replaced = read_bundle(self._bundle)["model_version"] != self._about["model_version"]
        if is_replaced or not self._is_on_disk():
            self._begin()
        found = self._candidate()
        if found is None:
            return None
        try:
            applied = self._apply(found[0])
        except HotbedError as error:
            # One that was removed meanwhile, or may have been, is not the fault of the next.
            if isinstance(error, DamagedError | BundleError) or not is_complete(found[0]):
                self._refused.add(found)
            latest = self._candidate()
            if latest is not None and order_of(latest[0]) > order_of(found[0]):
                return self.poll()  # its bases may have been removed as another one was complete
            raise
        self._last = found
        return applied

    def _candidate(self) -> tuple[str, float] | None:
        """Return the folder of the latest complete checkpoint that is newer than what is served and was not
        refused, and when it was completed."""
        store = store_of(self._run)
        for folder in reversed(folders_in(store.resolved(self._run))):
            try:
                if not is_complete(folder):
                    continue
                found = folder, store.changed_at(os.path.join(folder, MANIFEST))
            except FileNotFoundError:
                continue
            if found == self._last:
                return None
            if found not in self._refused:
                return found
        return None

    def _apply(self, folder: str) -> Applied | None:
        began = time.monotonic()
        with opened(folder) as path:
            links = chain_of(path, read_manifest(path))
            if since_of(self._stack, links[:1]) is not None:
                return None
            if self._served is not None:
                served = self._served.manifest["checkpoint"]["name"]
                if _is_older(path, served, self._run):
                    return None
            if fault := fault_of_chain(links, self._about["tables"].keys()):
                raise DamagedError(fault)
            self._stack = self._stack._replace(tables=self._merges.take(self._stack.tables))
            written = write_version(self._bundle, self._about, self._stack, links)
        merged = {layer.folder for layers in self._stack.tables.values() for layer in layers}
        self._stack, self._served = _stack_of(written), written
        for each in merged:
            if each.endswith(".part"):
                shutil.rmtree(each, ignore_errors=True)
        self._remove_old()
        self._merges.begin(self._stack.tables)
        seconds = time.monotonic() - began
        return Applied(written.version, written.manifest["step"], written.rows, seconds)

    def _remove_old(self) -> None:
        for version in versions_of(self._bundle)[1 : -self._keep]:
            try:
                stays = version.model_version == pinned(self._bundle)
            except BundleError:  # it may be any
                return
            if not stays:
                part = f"{version.folder}.part"  # which nobody takes for a version
                with contextlib.suppress(OSError):
                    os.rename(version.folder, part)
                shutil.rmtree(part, ignore_errors=True)

    def wait_for_merges(self) -> None:
        """Return when no layers are being merged. The next version has what was merged."""
        self._merges.wait()


def _is_older(folder: str, served: str, run: str) -> bool:
    """Return True if a checkpoint was completed before the one that is served, in the same run: one that
    was begun anew has none that is as late."""
    there = filter(is_complete, folders_in(store_of(run).resolved(run)))
    newest = max(map(order_of, there), default=(-1, -1))
    return order_of(folder) < order_of(served) <= newest


def _remove_left_overs(folder: str) -> None:
    """Remove what followers that died have left of versions, and versions of bundles that were replaced."""
    versions, base = os.path.split(folder)
    for name in os.listdir(versions):
        path = os.path.join(versions, name)
        if name != base and has_versions_alone(path):
            shutil.rmtree(path, ignore_errors=True)
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if name.endswith(".part"):
            if os.path.isdir(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)


def _newest(bundle: str) -> Written | None:
    """Return the newest version that can be read; None: there is none. Versions that are damaged are
    removed."""
    for version in reversed(versions_of(bundle)[1:]):
        try:
            manifest = read_version(version.folder)
            if fault := fault_of_sizes(version.folder, manifest["files"]):
                raise BundleError(fault)
        except BundleError as error:
            logging.getLogger(__name__).warning("%s It is removed.", error)
            shutil.rmtree(version.folder, ignore_errors=True)
            continue
        return Written(version, manifest, 0)
    return None


def _stack_of(written: Written) -> Stack:
    folder, manifest = written.version.folder, written.manifest
    return Stack(
        manifest["number"],
        {
            stem: [Layer(folder, entry) for entry in entries]
            for stem, entries in manifest["tables"].items()
        },
        {file["name"]: file for file in manifest["files"]},
        manifest["checkpoint"]["uid"],
        manifest["step"],
    )


def follow(
    bundle: str | os.PathLike[str],
    run: str | os.PathLike[str],
    *,
    every: float = EVERY,
    keep: int = KEEP,
    most_layers: int = MOST_LAYERS,
    stop: threading.Event | None = None,
    report: Callable[[str], object] | None = None,
) -> None:
    """Make a version of a bundle from each new checkpoint of a run, until told to stop.

    What fails is reported, once while it stays the same, and tried again or left out as `Follower.poll` says;
    the versions that are there stay.

    Args:
        bundle, run, keep, most_layers: see `Follower`.
        every: seconds between two looks at the run.
        stop: ends it when it is set; None: it ends with its process, which may be killed at any time.
        report: called with lines of text; None: they go to the log ``hotbed.serve.following.follower``.

    Raises:
        BundleError, CheckpointError: as of `Follower`.
    """
    stop = stop or threading.Event()
    tell = report or logging.getLogger(__name__).warning
    last_fault = ""
    with Follower(bundle, run, keep=keep, most_layers=most_layers) as follower:
        while True:
            try:
                applied = follower.poll()
                if applied is not None:
                    last_fault = ""
                    tell(
                        f"Version {applied.version.model_version} of step {applied.step:,}: "
                        f"{applied.rows:,} rows, in {applied.seconds:.1f} s."
                    )
            except (HotbedError, OSError) as error:
                applied = None
                if (fault := _PART.sub("", str(error))) != last_fault:
                    last_fault = fault
                    tell(f"{error} The version before is served.")
            if stop.wait(0 if applied is not None else every):
                return
