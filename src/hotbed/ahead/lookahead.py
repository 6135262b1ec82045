"""Look-ahead: a loader's own batches, whose rows are where they are needed before they are asked for."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sized
from typing import Generic, TypeVar, cast

from torch import nn

from hotbed.ahead.source import Source
from hotbed.ahead.window import Inputs, Window
from hotbed.data.position import seek
from hotbed.errors import TableError
from hotbed.modules.owner import TableOwner, owners_of
from hotbed.places.tiered.budget import count_of_batches

__all__ = ["lookahead"]

T = TypeVar("T")

_IDLE = (
    "Look-ahead waits for another rank, which has none for these tables or reads more slowly: until it "
    "comes, rows are brought up when a batch is looked up. Results are the same."
)


def lookahead(
    loader: Iterable[T],
    model: nn.Module,
    depth: int = 2,
    horizon: int | None = None,
    *,
    inputs: Inputs | None = None,
) -> Lookahead[T]:
    """Wrap a loader: the same batches in the same order with the same results, sooner.

    Of the next `horizon` batches the ids are known, so that rows that will come again are kept. Of
    the next `depth` batches every row is brought up and stays until the batch is used. Both happen on
    a thread beside the training.

    >>> for batch in hb.lookahead(loader, model):
    ...     loss = loss_fn(model(batch), batch["label"]); loss.backward()
    ...     optimizer.step(); optimizer.zero_grad()

    Args:
        loader: any iterable; a new iteration of the wrapper iterates it anew.
        model: its collections that have tiers look ahead; without any, batches are passed on. Of a
            distributed model, all ranks look ahead together: where one does not, none does.
        depth: batches whose rows are resident; 0 leaves everything to the forward. The budget holds
            them beside the batch that is trained on; where it does not, look-ahead shortens itself.
        horizon: batches whose ids are known. Default: 32, or up to 128 of small batches; of large ones
            in a small budget fewer, so that their ids take no more than an eighth of it.
        inputs: what of a batch goes into the collection, ``batch -> dict`` of features; with several
            collections ``batch -> {module name: dict}``. Default: what the module that holds the
            collection says by a method ``embedding_inputs(batch)``; else a mapping with all features
            of the collection, in the batch or up to three containers deep in it. It is asked twice a
            batch, beside the loop and in it, and must answer the same: what is drawn at random belongs
            into the loader.

    A forward recognises its batch by the ids, whatever tensors hold them (tensors on a device: by
    their memory and how often torch has changed them, so that nobody waits; what writes there behind
    torch's back is not seen). Other ids are resolved on the spot, which is correct and slower and
    counted in ``collection.stats()``. A batch whose ids were changed between the loader and the loop
    is refused with InputError: the loader fills its tensors again. A loader that draws from a global
    random generator while it is iterated (``num_workers=0``) draws sooner.

    A loop that is left waits for a loader that blocks a second at most; its thread ends when the
    loader lets it.

    Raises:
        TableError: depth or horizon that are no counts, or above a million, `inputs` that cannot be
            called, a model that is no module, or a loader that looks ahead already.
    """
    return Lookahead(loader, model, depth, horizon, inputs)


class Lookahead(Generic[T]):
    """See `lookahead`. ``len()`` is the loader's. `depth`, `horizon` and `inputs` can be set; a loop that
    is under way keeps those with which it began to look ahead."""

    def __init__(
        self,
        loader: Iterable[T],
        model: nn.Module,
        depth: int,
        horizon: int | None,
        inputs: Inputs | None,
    ) -> None:
        if isinstance(loader, Lookahead):
            raise TableError(
                "The loader looks ahead already. For several models, give lookahead one module that "
                "holds them all, such as nn.ModuleList([first, second])."
            )
        if not isinstance(model, nn.Module):
            raise TableError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
        if inputs is not None and not callable(inputs):
            raise TableError(
                f"inputs must be a function batch -> dict of features, got {type(inputs).__name__}."
            )
        self.loader, self.model, self.inputs = loader, model, inputs
        self.depth, self.horizon = depth, horizon
        self._left: Source[T] | None = None
        self._said: set[str] = set()
        self._passed = 0
        self._given = 0

    @property
    def depth(self) -> int:
        return self._depth

    @depth.setter
    def depth(self, depth: int) -> None:
        self._depth = count_of_batches("depth", depth)

    @property
    def horizon(self) -> int | None:
        return self._horizon

    @horizon.setter
    def horizon(self, horizon: int | None) -> None:
        self._horizon = None if horizon is None else count_of_batches("horizon", horizon)

    @property
    def given(self) -> int:
        """Batches that the last loop has got so far."""
        return self._given

    def seek(self, epoch: int, batches: int = 0) -> None:
        """The next iteration is that of `epoch` (from 1), but for its first `batches`, whose rows nobody
        looks up; see `hotbed.train.Position`."""
        self._passed = seek(self.loader, epoch, batches)

    def __len__(self) -> int:
        return len(cast(Sized, self.loader))

    def __iter__(self) -> Iterator[T]:
        if self._left is not None:
            self._left.wait()  # loaders are iterated by one thread at a time
        iterator = iter(self.loader)
        self._given = 0  # loops before may have been longer on one process than on another
        passed, self._passed = self._passed, 0
        for _ in itertools.islice(iterator, passed):
            pass
        source: Source[T] = Source(iterator)
        if self._left is not None and self._left.iterator is iterator:
            source = self._left
        self._left = None
        try:
            # Whatever closes a window, an optimizer that is made or a state_dict that is loaded, the
            # next batch opens another.
            while source.more:
                modules = self._modules()
                if not modules:
                    for batch in source:
                        self._given += 1
                        yield batch
                    continue
                every = [one for m in modules.values() if (one := m.prefetcher) is not None]
                idle = any(one.is_idle for one in every)
                if idle or not all([one.allocate_all() for one in every]):
                    if idle:
                        self.say("ranks", _IDLE, stacklevel=3)
                    if (entry := source.read()) is not None:
                        self._given += 1
                        yield entry.given()
                    continue
                window = Window(source, modules, self)
                try:
                    for batch in window:
                        self._given += 1
                        yield batch
                finally:
                    window.close()
        finally:
            if source.being_read or (iterator is self.loader and source.unread):
                self._left = source

    def _modules(self) -> dict[str, TableOwner]:
        """Return the modules whose rows are brought up."""
        if self.depth == 0:
            return {}
        found: dict[TableOwner, str] = {}
        for name, module in owners_of(self.model).items():
            if module.prefetcher is not None:
                found.setdefault(module.looked_up_by, name)
        return {name: module for module, name in found.items()}

    def say(self, about: str, message: str, stacklevel: int = 5) -> None:
        """Warns, once about a thing, where the loop of the user is."""
        if about not in self._said:
            self._said.add(about)
            warnings.warn(message, stacklevel=stacklevel)
