"""Model-parallel input: each rank has the ids of the tables that it keeps, for the samples of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn

from hotbed import _core
from hotbed.dist.bags import BagRequests, BagsBatch, KeptBags, pool_bags
from hotbed.dist.errors import PeerError
from hotbed.dist.exchange import first_slots
from hotbed.dist.exchanged_values import OwnedInputs
from hotbed.dist.loaders import Slice, Slices, samples_in
from hotbed.dist.ranks import Ranks
from hotbed.dist.shards import TableOnRanks
from hotbed.dist.ways import AHEAD, WHOLE, TellsNumbers, refuse_other_modes, room_of
from hotbed.errors import InputError, TableError
from hotbed.inputs.bags import FORMS, Bags, Form, Wanted, core_input, read_bags
from hotbed.modules.owner import owners_of
from hotbed.places.host.batch import FlatInputs
from hotbed.table.alone import ALONE, Processes
from hotbed.table.lookups import Call, StoredTable
from hotbed.tables import COMBINERS

__all__ = ["Owned", "WholeBags", "all_whole", "inputs_here", "kept_here", "look_up_whole", "owned"]

_SUM = COMBINERS.index("sum")


class WholeInput(NamedTuple):
    """Input of a feature for the samples of all ranks."""

    given: object
    """What a collection takes, of the whole batch; None where this rank keeps no row of its table."""
    samples: list[int]
    """Of each rank."""
    rank: int


class WholeBags(Bags):
    """The same, as it is read: bags of this rank, whose ids lie on other ranks."""

    whole: Bags | None
    samples: list[int]

    @property
    def positions(self) -> int:
        return 0 if self.whole is None else self.whole.positions

    def copied(self, *, ids: bool) -> WholeBags:
        made = _bags_elsewhere(self.bags)
        made.samples = self.samples
        made.whole = None if self.whole is None else self.whole.copied(ids=ids)
        return made


class _IdsElsewhere:
    """Stands for ids where only `look_up_whole` knows what to do without them."""

    def __getattr__(self, name: str) -> NoReturn:
        raise InputError(
            "A batch of hotbed.dist.owned is for the model with which it was made, and for lookups: each "
            "rank has the ids of the tables that it keeps."
        )


def _bags_elsewhere(count: int) -> WholeBags:
    return WholeBags(cast(Tensor, _IdsElsewhere()), None, 0, count, None, count, None, False)


def _read(wanted: Wanted, value: WholeInput) -> WholeBags:
    made = _bags_elsewhere(value.samples[value.rank])
    made.samples, made.whole = value.samples, None
    if value.given is None:
        return made
    whole = read_bags(wanted.feature, value.given, wanted.compute_dtype, wanted.combiner)
    if whole.batch != sum(value.samples) or whole.bags != whole.batch:
        raise InputError(
            f"Feature {wanted.feature!r}: hotbed.dist.owned takes one bag a sample of the whole batch, "
            f"{sum(value.samples)}, got {whole.bags}."
        )
    if whole.weights is not None and whole.weights.requires_grad:
        raise InputError(
            f"Feature {wanted.feature!r}: weights of a batch of hotbed.dist.owned get no gradient, as they "
            "lie on other ranks than their samples. Detach them."
        )
    made.whole = whole
    return made


FORMS.insert(0, Form(lambda value: isinstance(value, WholeInput), _read))


def owned(loader: Iterable[Mapping[str, Any]], model: nn.Module) -> Owned:
    """Wrap a loader of whole batches so that each rank looks up the ids of the tables that it keeps, for all.

    No ids travel: owners read them, and vectors come back to the rank of each sample (what
    distributed-embeddings calls ``dp_input=False``). It pays where loading ids is cheap on every rank, or a
    file has them by table. Everything but features of the model's tables is sliced as by `slices`.

    >>> torch.distributed.init_process_group("gloo")     # under torchrun
    >>> model = hb.distribute(hb.models.DLRM(["item"]))
    >>> for batch in hb.dist.owned(loader, model):
    ...     loss = loss_fn(model(batch), batch["label"])

    Tables may be whole on a rank, cut by columns, or replicated. Their gradients have no rows in ``.grad``,
    so that a GradScaler is refused. All ranks wrap alike, and end together. Look-ahead goes around:
    ``hb.lookahead(hb.dist.owned(loader, model), model)``.

    Args:
        loader: of the same batches on all ranks, feature → input and name → tensor. Features whose tables a
            rank does not keep are not read there, and may be left out.
        model: as `distribute` returned it.

    Raises:
        TableError: a table is cut by row, so that a rank would need ids of its rows out of all bags; or it is
            not pooled; or there are memory hosts.
    """
    ranks: Processes = ALONE
    features, kept = set(), set()
    for name, module in owners_of(model).items():
        ranks = module.ranks
        if not isinstance(ranks, Ranks):
            break
        if ranks.hosts:
            raise TableError(
                "hotbed.dist.owned gives each rank the ids of the tables that it keeps, and memory hosts "
                "have no loaders. Use hotbed.dist.slices."
            )
        for feature, live in module.features_of(name).items():
            table = cast(TableOnRanks, live)
            refuse_table(feature, table)
            features.add(feature)
            if table.place.own:  # of several tables that a feature reads, maybe
                kept.add(feature)
    if not isinstance(ranks, Ranks):
        raise TableError(
            "hotbed.dist.owned takes a model with tables that hotbed.distribute has returned."
        )
    return Owned(loader, ranks.rank, ranks.size, features, kept)


def refuse_table(feature: str, table: TableOnRanks) -> None:
    """Raise TableError where a table takes no model-parallel input."""
    place = table.place
    if place.owners > 1:
        raise TableError(
            f"hotbed.dist.owned: table {table.name!r} of feature {feature!r} is cut by row, so the ids of a "
            'bag lie on several ranks. Plan it as Table(sharding="table") or "column", or use '
            "hotbed.dist.slices."
        )
    if table.spec.combiner == "none":
        raise TableError(
            f"hotbed.dist.owned: table {table.name!r} of feature {feature!r} has combiner=None; only pooled "
            "vectors come from other ranks. Use hotbed.dist.slices."
        )


class Owned(Slices):
    """Loader of batches whose features are `WholeInput`. See `owned`."""

    def __init__(
        self,
        loader: Iterable[Mapping[str, Any]],
        rank: int,
        size: int,
        features: set[str],
        kept: set[str],
    ) -> None:
        """`features`: of all tables; `kept`: of those that this rank keeps."""
        super().__init__(loader)
        self._rank, self._size = rank, size
        self._features, self._kept = features, kept

    def __iter__(self) -> Iterator[Slice]:
        for batch in self.loader:
            count = samples_in(batch, "hotbed.dist.owned")
            edges = [count * rank // self._size for rank in range(self._size + 1)]
            samples = [end - begin for begin, end in zip(edges, edges[1:], strict=False)]
            own = slice(edges[self._rank], edges[self._rank + 1])
            made: dict[str, Any]
            made = {name: v[own] for name, v in batch.items() if name not in self._features}
            for name in self._features:
                given = batch.get(name) if name in self._kept else None
                if given is None and name in self._kept:
                    raise InputError(
                        f"hotbed.dist.owned: the batch lacks feature {name!r}, whose table this rank keeps."
                    )
                made[name] = WholeInput(given, samples, self._rank)
            yield Slice(made, count)


class _BagsOfRanks(FlatInputs):
    """Whole batches of features, as what each rank asks of each shard here, pooled as their tables say."""

    def __init__(self, wholes: Sequence[WholeBags], combiners: Sequence[int]) -> None:
        """`combiners`: of each, as the core has it."""
        self._parts: list[Bags] = []
        self._combiners: list[int] = []
        for bag, combiner in zip(wholes, combiners, strict=True):
            assert bag.whole is not None
            parts = _by_rank(bag.whole, bag.samples)
            self._parts += parts
            self._combiners += [combiner] * len(parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Bags]:
        return iter(self._parts)

    def core_batch(self, tables: list[_core.Table], table_of: Sequence[int]) -> _core.Batch:
        parts = zip(table_of, self._combiners, self._parts, strict=True)
        return _core.Batch.make(tables, [core_input(t, c, part) for t, c, part in parts])


def _by_rank(whole: Bags, samples: Sequence[int]) -> list[Bags]:
    """Cut a whole batch into the bags of each rank."""
    found, begin = [], 0
    offsets = whole.offsets
    for count in samples:
        end = begin + count
        if offsets is None:
            first, last, own = begin * whole.fixed, end * whole.fixed, None
        else:
            first, last = int(offsets[begin]), int(offsets[end])
            own = offsets[begin : end + 1] - first
        weights = None if whole.weights is None else whole.weights[first:last]
        ids = whole.ids[first:last]
        found.append(Bags(ids, own, whole.fixed, count, weights, count, None, own is not None))
        begin = end
    return found


class _KeptWhole(KeptBags):
    """A lookup whose ids lie on the ranks that keep their rows."""

    has_ids = False

    def positions(self, f: int) -> tuple[Tensor, Tensor]:
        raise TableError(
            "A lookup of a batch of hotbed.dist.owned takes one backward, and fewer than 62 wait for a step, "
            "as its ids lie on other ranks."
        )


def look_up_whole(
    ranks: Ranks, call: Call, wanted: bool, modes: Sequence[int], tell: TellsNumbers
) -> BagsBatch:
    """Have owners pool the bags of all ranks. Called by all ranks.

    Args:
        call: of `WholeBags`.
        wanted: True if gradients may come.
        modes, tell: as of `hotbed.dist.ways.agree`.

    Raises:
        InputError: some features are of this rank's samples alone.
        PeerError: on another rank they are, or it has other samples, or none any more.
    """
    bags = all_whole(call.bags)
    samples = [bag.bags for bag in bags]
    places = [cast(TableOnRanks, live).place for live in call.live]
    pad = [0] * (room_of(call, places) - len(samples))
    values, ended = tell([WHOLE, *[0] * (AHEAD - 1), *modes, *samples, *pad])
    refuse_other_modes(values, ended, ranks.rank, len(modes))
    if any(ended):
        raise PeerError(
            f"Rank {ended.index(True)} has no batches any more, where hotbed.dist.owned reads alike on all."
        )
    told = values[:, AHEAD + len(modes) :][:, : len(samples)]
    if told.tolist() != [[bag.samples[rank] for bag in bags] for rank in range(ranks.size)]:
        raise PeerError(
            "Ranks have batches of other sizes: hotbed.dist.owned takes a loader of the same batches on all."
        )
    layout, bags_here, frozen = inputs_here(ranks, call.live, call.table_of, bags, call.frozen)
    numbers = torch.zeros((ranks.size, 2 * len(samples)), dtype=torch.int64, device="cpu")
    numbers[:, 1::2] = 2 * told  # of bags, whose ids nobody sends
    core = _core.BagExchange(layout.core, numbers.data_ptr())
    own = _core.OrderedBags(layout.core, _without_ids(call, samples), range(len(samples)))
    asked = sum(bag.positions for bag in bags)
    requests = BagRequests(layout, own, core, bags_here, asked)
    answer = pool_bags(ranks, requests, frozen, call.training)
    made = BagsBatch(call, answer, wanted)
    if wanted:
        made.lookup = _KeptWhole(answer, first_slots(layout, ranks.waiting.lookups))
        ranks.waiting.add(made, made.lookup)
    return made


def all_whole(bags: Sequence[Bags]) -> list[WholeBags]:
    """Return the bags of a batch, which all are of `owned`.

    Raises:
        InputError: some are not.
    """
    found = [bag for bag in bags if isinstance(bag, WholeBags)]
    if len(found) < len(bags):
        raise InputError(
            "Some features of this batch are of hotbed.dist.owned, and others are not. Give all of one batch."
        )
    return found


def kept_here(live: Sequence[StoredTable], table_of: Sequence[int]) -> list[int]:
    """Return the features whose tables this rank keeps; arguments are as of a `Call`."""
    tables = cast(Sequence[TableOnRanks], live)
    return [f for f, t in enumerate(table_of) if tables[t].place.own]


def inputs_here(
    ranks: Ranks,
    live: Sequence[StoredTable],
    table_of: Sequence[int],
    bags: Sequence[WholeBags],
    frozen: Sequence[int],
) -> OwnedInputs:
    """Return what ranks ask of the shards of this rank; arguments are as of a `Call`."""
    tables = cast(Sequence[TableOnRanks], live)
    here = kept_here(live, table_of)
    combiners = [live[table_of[f]].combiner for f in here]
    layout = ranks.layout([tables[t].place for t in table_of])
    return OwnedInputs(layout, _BagsOfRanks([bags[f] for f in here], combiners), frozen)


def _without_ids(call: Call, samples: Sequence[int]) -> _core.Batch:
    """Return a batch of so many empty bags, whose sums come from the owners."""
    nothing = torch.empty(0, dtype=torch.int64, device="cpu")
    inputs = [
        core_input(t, _SUM, Bags(nothing, None, 0, count, None, count, None, False))
        for t, count in zip(call.table_of, samples, strict=True)
    ]
    return _core.Batch.make([table.core for table in call.live], inputs)
