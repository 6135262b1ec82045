"""A loader that is being read, and what it gives."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from hotbed.table.prefetch import BatchAhead

__all__ = ["Entry", "Source", "find_features"]

T = TypeVar("T")


@dataclasses.dataclass(slots=True, eq=False)
class Entry:
    batch: Any
    number: int = -1
    """Of the batch in the loop."""
    error: BaseException | None = None
    """What the loader raised in its place, or a function of the user over it."""
    inputs: dict[str, object] = dataclasses.field(default_factory=dict)
    """What goes into the collections, by their names, where that is known."""
    read: dict[str, BatchAhead] = dataclasses.field(default_factory=dict)
    """The same, read and grouped, whether or not other processes have the same batch."""
    prepared: dict[str, BatchAhead] = dataclasses.field(default_factory=dict)
    """Those that are announced."""
    ids: int = 0
    """How many were read."""
    announced: bool = False
    """Whether what could be announced of it is."""
    admitted: bool = False
    failed: bool = False
    tried: int = -1

    def given(self) -> Any:
        """The batch, or raises what the loader raised."""
        if self.error is not None:
            raise self.error
        return self.batch


class Source(Generic[T]):
    """A loader that is being read; what was read and not taken comes first.

    Threading: whoever reads has its turn alone. A window that ends does not wait for a loader that
    blocks; what the loader gives then is left for the next reader.
    """

    def __init__(self, iterator: Iterator[T]) -> None:
        self.iterator = iterator
        self.unread: deque[Entry] = deque()
        self._turn = threading.Lock()
        self._ended = False

    @property
    def being_read(self) -> bool:
        return self._turn.locked()

    def wait(self) -> None:
        """Returns when nobody reads."""
        with self._turn:
            pass

    @property
    def more(self) -> bool:
        """Whether `read` may give something."""
        return bool(self.unread) or not self._ended

    def read(
        self,
        wanted: Callable[[], bool] = lambda: True,
        look: Callable[[Entry], None] = lambda entry: None,
    ) -> Entry | None:
        """The next batch, or what the loader raised in its place; None: there is none, or it was not
        `wanted` any more when it had come and `look` had seen it, and was left."""
        with self._turn:
            if self.unread:
                entry = self.unread[0]
                look(entry)
                return self.unread.popleft() if wanted() else None
            try:
                entry = Entry(next(self.iterator))
            except StopIteration:
                self._ended = True
                return None
            except BaseException as error:
                self._ended = True
                entry = Entry(None, error=error)
            look(entry)
            if wanted():
                return entry
            self.unread.append(Entry(entry.batch, error=entry.error))
            return None

    def __iter__(self) -> Iterator[T]:
        while (entry := self.read()) is not None:
            yield entry.given()


def find_features(batch: object, features: list[str], deep: int) -> Mapping[str, object] | None:
    """The mapping in `batch` that has all the features."""
    parts: Iterable[object]
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
            found = find_features(part, features, deep - 1)
            if found is not None:
                return found
    return None
