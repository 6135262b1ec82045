"""Look-ahead: a loader's own batches, whose rows are where they are needed before they are asked for."""

from __future__ import annotations

import dataclasses
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from hotbed import _core
from hotbed.collection import EmbeddingCollection
from hotbed.errors import HotbedError, StorageError
from hotbed.resolve.lookup import Prepared
from hotbed.trace import span

__all__ = ["lookahead"]

T = TypeVar("T")
Inputs = Callable[[Any], Any]


def lookahead(
    loader: Iterable[T],
    model: nn.Module,
    depth: int = 2,
    horizon: int = 32,
    *,
    inputs: Inputs | None = None,
) -> Lookahead[T]:
    """Wraps a loader: the same batches in the same order with the same results, sooner.

    Of the next `horizon` batches the ids are known, so that rows that will come again are kept. Of
    the next `depth` batches every row is brought up and stays until the batch is used. Both happen on
    a thread beside the training.

    >>> for batch in hb.lookahead(loader, model):
    ...     loss = loss_fn(model(batch), batch["label"]); loss.backward()
    ...     optimizer.step(); optimizer.zero_grad()

    Args:
        loader: any iterable; a new iteration of the wrapper iterates it anew.
        model: its collections that have tiers look ahead; without any, batches are passed on.
        depth: batches whose rows are resident; 0 leaves everything to the forward. The budget holds
            them beside the batch that is trained on; where it does not, look-ahead shortens itself.
        horizon: batches whose ids are known.
        inputs: what of a batch goes into the collection, ``batch -> dict`` of features; with several
            collections ``batch -> {module name: dict}``. Default: what the module that holds the
            collection says by a method ``embedding_inputs(batch)``; else a mapping with all features
            of the collection, in the batch or up to three containers deep in it.

    A forward recognises its batch by the tensors of the ids: slices or copies of them are resolved on
    the spot, which is correct and slower and counted in ``collection.stats()``. A loader that draws
    from a global random generator while it is iterated (``num_workers=0``) draws sooner.

    Raises:
        ValueError: depth or horizon below 0.
    """
    return Lookahead(loader, model, depth, horizon, inputs)


class Lookahead(Generic[T]):
    """See `lookahead`. ``len()`` is the loader's."""

    def __init__(
        self,
        loader: Iterable[T],
        model: nn.Module,
        depth: int,
        horizon: int,
        inputs: Inputs | None,
    ) -> None:
        if depth < 0 or horizon < 0:
            raise ValueError(f"depth and horizon must not be negative, got {depth} and {horizon}.")
        self.loader, self.model = loader, model
        self.depth, self.horizon, self.inputs = depth, max(depth, horizon), inputs
        self._left: tuple[Iterator[T], list[T]] | None = None

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        iterator = iter(self.loader)
        left: list[T] = []
        if self._left is not None and self._left[0] is iterator:
            left = self._left[1]
        self._left = None
        collections = {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(module, EmbeddingCollection) and module.tiers is not None
        }
        if not collections or self.depth == 0:
            yield from left
            yield from iterator
            return
        given_by = {}
        for name in collections:
            holder = self.model.get_submodule(name.rpartition(".")[0])
            if callable(given := getattr(holder, "embedding_inputs", None)):
                given_by[name] = given
        window = _Window(
            iterator, left, collections, self.depth, self.horizon, self.inputs, given_by
        )
        try:
            yield from window
        finally:
            window.close()
            rest = window.rest()
            if rest and iterator is self.loader:
                self._left = (iterator, rest)


@dataclasses.dataclass(slots=True, eq=False)
class _Entry:
    batch: Any
    prepared: dict[str, Prepared] = dataclasses.field(default_factory=dict)
    admitted: bool = False
    failed: bool = False
    tried: int = -1


class _Window:
    """Batches on their way, and the thread that brings them.

    The thread alone reads the loader and admits; the training thread alone takes batches. `_moved`
    guards everything below it.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        left: list[Any],
        collections: Mapping[str, EmbeddingCollection],
        depth: int,
        horizon: int,
        inputs: Inputs | None,
        given_by: Mapping[str, Inputs],
    ) -> None:
        self._given_by = given_by
        self._iterator = iterator
        self._left = deque(left)
        self._collections = dict(collections)
        self._depth, self._horizon, self._inputs = depth, horizon, inputs
        self._moved = threading.Condition()
        self._entries: deque[_Entry] = deque()
        self._exhausted = False
        self._error: BaseException | None = None
        self._closed = False
        self._busy = False
        self._round = 0  # of releases: what did not fit is tried once a round
        self._said = False
        for collection in self._collections.values():
            assert collection.tiers is not None
            collection.tiers.settle()
            collection.tiers.open_window(self)
        self._thread = threading.Thread(
            target=_work,
            args=(weakref.ref(self), self._moved),
            name="hotbed-lookahead",
            daemon=True,
        )
        self._thread.start()

    # -- the training thread ---------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        while True:
            with span("wait for a batch"):
                entry = self._next()
            if entry is None:
                return
            yield entry.batch

    def _next(self) -> _Entry | None:
        for collection in self._collections.values():
            tiers = collection.tiers
            assert tiers is not None
            tiers.prepared.clear()  # what no forward has used is taken back
            tiers.release_spent()
        began = time.perf_counter()
        with self._moved:
            self._round += 1
            self._moved.notify_all()
            while not self._closed:
                if self._entries:
                    first = self._entries[0]
                    if first.admitted or first.failed or first.tried == self._round:
                        break
                elif self._error is not None or self._exhausted:
                    break
                self._moved.wait()
            if not self._entries:
                error, self._error = self._error, None
                if error is not None:
                    raise error
                return None
            entry = self._entries.popleft()
            self._moved.notify_all()
        waited = time.perf_counter() - began
        for name, prepared in entry.prepared.items():
            tiers = self._collections[name].tiers
            assert tiers is not None
            tiers.prepared.append(prepared)
            tiers.stall_ms += waited * 1e3
            tiers.queue_depth = sum(e.admitted for e in self._entries)
        entry.prepared = {}
        return entry

    def close(self) -> None:
        """Ends the thread and takes back what was reserved."""
        with self._moved:
            self._closed = True
            self._moved.notify_all()
            while self._busy:
                self._moved.wait()
        if self._thread is not threading.current_thread():
            self._thread.join()
        for entry in self._entries:
            entry.prepared = {}
        for collection in self._collections.values():
            if collection.tiers is not None:
                collection.tiers.prepared.clear()

    def rest(self) -> list[Any]:
        """Batches that were fetched and not taken."""
        rest = [entry.batch for entry in self._entries] + list(self._left)
        self._entries.clear()
        return rest

    # -- the thread ------------------------------------------------------------------------------

    def _task(self) -> Callable[[], None] | None:
        """What to do next; under `_moved`."""
        for entry in list(self._entries)[: self._depth]:
            if entry.admitted or entry.failed:
                continue
            if entry.tried != self._round:
                number = self._round
                return lambda: self._admit(entry, number)
            break
        if len(self._entries) < self._horizon and not self._exhausted and self._error is None:
            return self._fetch
        return None

    def _fetch(self) -> None:
        try:
            with span("read a batch"):
                batch = self._left.popleft() if self._left else next(self._iterator)
        except StopIteration:
            with self._moved:
                self._exhausted = True
            return
        except BaseException as error:
            with self._moved:
                self._error = error
            return
        entry = _Entry(batch)
        try:
            for name, collection in self._collections.items():
                with span("announce ids"):
                    prepared = collection.prepare(self._inputs_of(batch, name, collection))
                    if prepared.batch.check()[0]:
                        raise HotbedError("the forward will say what is wrong")
                    prepared.batch.group(prepared.frozen)
                    prepared.batch.announce()
                entry.prepared[name] = prepared
        except HotbedError:
            # A batch that cannot be looked up is an error of its forward, when its turn comes.
            entry.failed = True
        with self._moved:
            self._entries.append(entry)

    def _admit(self, entry: _Entry, number: int) -> None:
        fits, failed = False, False
        try:
            with span("bring rows up"):
                fits = all(prepared.batch.admit() for prepared in entry.prepared.values())
        except StorageError:
            failed = True  # the forward tries again, and says so
        with self._moved:
            entry.admitted, entry.failed, entry.tried = fits, failed, number
            ahead = self._entries.index(entry) if entry in self._entries else 0
        if not fits and not failed and ahead > 0 and not self._said:
            self._said = True
            warnings.warn(
                f"The budget holds {ahead} batches beside the one that is trained on, not "
                f"depth={self._depth}: look-ahead is shorter now. Raise the budget, or lower depth.",
                stacklevel=1,
            )

    def _inputs_of(self, batch: Any, name: str, collection: EmbeddingCollection) -> Any:
        if self._inputs is not None:
            given = self._inputs(batch)
            return given[name] if len(self._collections) > 1 else given
        if name in self._given_by:
            return self._given_by[name](batch)
        found = _find(batch, list(collection.features), 3)
        if found is None:
            raise HotbedError(f"no features of {name!r} in the batch")
        return {feature: found[feature] for feature in collection.features}


def _work(window_ref: weakref.ref[_Window], moved: threading.Condition) -> None:
    torch.get_num_threads()  # sets torch's count for this thread, which is then taken back:
    _core.use_one_thread()  # a second team of OpenMP threads would slow the first down
    while True:
        window = window_ref()
        if window is None:
            return
        with moved:
            if window._closed:
                return
            task = window._task()
            if task is None:
                del window
                moved.wait(1.0)
                continue
            window._busy = True
        try:
            task()
        except BaseException as error:
            with moved:
                window._error = window._error or error
        finally:
            with moved:
                window._busy = False
                moved.notify_all()


def _find(batch: Any, features: list[str], deep: int) -> Any:
    """The mapping in `batch` that has all the features."""
    parts: Iterable[Any]
    if isinstance(batch, Mapping):
        if all(feature in batch for feature in features):
            return batch
        parts = batch.values()
    elif isinstance(batch, (list, tuple)):
        parts = batch
    elif dataclasses.is_dataclass(batch):
        parts = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    else:
        return None
    if deep:
        for part in parts:
            found = _find(part, features, deep - 1)
            if found is not None:
                return found
    return None
