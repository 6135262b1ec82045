"""`EmbeddingCollection`: the module that owns tables and looks all features up at once."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from hotbed.arrays import integer
from hotbed.devices import Device, named_device
from hotbed.errors import InputError, TableError
from hotbed.group.group import Group
from hotbed.init import derive_key
from hotbed.inputs.bags import Bags, read_bags
from hotbed.inputs.keyed import split_keyed
from hotbed.jagged import Jagged
from hotbed.modules.by_name import Rows, TablesByName
from hotbed.modules.descriptions import described, group_for
from hotbed.ops.outside_graphs import outside_graphs
from hotbed.places.host.batch import check, core_batch
from hotbed.places.tiered import hottest
from hotbed.places.tiered.budget import required
from hotbed.stock_layers import tables_of_layers
from hotbed.storage import Storage
from hotbed.table.live import LiveTable
from hotbed.table.lookups import Call, CallAhead, lookups_of
from hotbed.table.prefetch import BatchAhead
from hotbed.tables import Table

__all__ = ["EmbeddingCollection", "Rows"]


class EmbeddingCollection(TablesByName):
    """Tables, and the features that are looked up in them.

    Args:
        tables: descriptions, with distinct names.
        features: feature name → table name; several features may share a table. Default: each table
            is a feature of its own name.
        seed: fixes, with the tables' names, all first values. ``None`` draws one from torch's default
            generator, so ``torch.manual_seed`` governs it.
        storage: budgets for the tiers that rows may lie in. Default: all rows in the memory that
            computes. Where a row lies never changes a result; wrap the loader in `hotbed.lookahead`
            so that rows are there before they are asked for.
        device: where the tables compute; whole static ones are made there, without a copy in RAM.
            Default: on the host, until ``to("cuda")``.
        group: in place of `storage`, a `Group` that other modules put tables into, too.

    ``forward`` takes a dict feature → input (see `hotbed.inputs`) and returns a dict feature →
    vectors: (B, dim) pooled; unpooled (B, dim) for (B,) ids, (B, K, dim) for (B, K), and a `Jagged`
    of (N, dim) for bags of different lengths. Vectors of one forward are columns of one buffer, so
    ``hotbed.nn.concat`` joins them without copying.

    ``to("cuda")`` moves the tables, rows and states, and vectors come out there; inputs may lie there
    or on the host. Dynamic tables need a ``storage`` with ``device=`` for that. What is wrong with ids
    that lie on the device is raised by a later forward or step, and changes nothing.

    In training (``module.training`` with gradients enabled) an id that a dynamic table has not met
    gets a row. Otherwise it reads its first value and nothing is stored.

    Raises:
        TableError: duplicate names, unknown tables.
        InputError, IdError: from forward, before anything has changed.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        features: Mapping[str, str] | None = None,
        *,
        seed: int | None = None,
        storage: Storage | None = None,
        device: Device | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        tables, features = described(tables, features)
        there = named_device(device)
        group = group_for(group, storage)
        live = group.make([(table, derive_key(seed, table.name)) for table in tables], there)
        self._serve({table.name: table for table in live}, features)
        group.place(live, there)

    def _serve(self, live: dict[str, LiveTable], features: Mapping[str, str]) -> None:
        self._features = dict(features)
        self._live = list(live.values())
        position = {name: t for t, name in enumerate(live)}
        self._table_of = [position[name] for name in self.features.values()]
        self.in_order = False
        """True if it takes and returns a list, as one made of layers without names does."""
        self._own(live)

    @classmethod
    def from_layers(
        cls, layers: Sequence[nn.Module], names: Sequence[str] | None = None
    ) -> EmbeddingCollection:
        """One collection in place of a list of embedding layers, weights kept.

        Args:
            layers: ``nn.Embedding``, ``nn.EmbeddingBag``, ``hotbed.Embedding``, ``hotbed.EmbeddingBag``.
                Hotbed layers are shared, not copied, and go by their new name in errors. A layer may
                appear several times, or share its weight with another: the table then serves
                several features, and is called as the first of them.
            names: a name for each feature; default "0", "1", ...

        The collection takes a list of inputs in the order of the layers, and returns a list; with
        `names` it takes and returns dicts.

        Raises:
            TableError: a layer of another kind, or with an option that has no counterpart, or two
                that share a weight and differ in mode or padding_idx.
        """
        live, features = tables_of_layers(layers, names)
        collection = cls.__new__(cls)
        nn.Module.__init__(collection)
        collection._serve(live, features)
        collection.in_order = names is None
        return collection

    @property
    def features(self) -> dict[str, str]:
        """Feature name → table name, in the order of the outputs."""
        return self._features

    # -- lookup ----------------------------------------------------------------------------------

    @outside_graphs
    def forward(self, inputs: object) -> dict[str, Tensor | Jagged] | list[Tensor | Jagged]:
        with self._live[0].place.ranks.reporting("a lookup"):
            self._refuse_transforms()
            bags = self._read(inputs)
            looked_up = self._look_up(self._live, self._table_of, list(self.features), bags)
        outputs: list[Tensor | Jagged] = [*looked_up]
        for f, bag in enumerate(bags):
            if bag.jagged and self._live[self._table_of[f]].spec.combiner == "none":
                assert bag.offsets is not None
                outputs[f] = Jagged(looked_up[f], bag.offsets)
        if self.in_order:
            return outputs
        return dict(zip(self.features, outputs, strict=True))

    def _read(self, inputs: object) -> list[Bags]:
        if self.in_order:
            if isinstance(inputs, (list, tuple)):
                if len(inputs) != len(self.features):
                    raise InputError(
                        f"{len(inputs)} inputs for {len(self.features)} layers; give one each."
                    )
                inputs = dict(zip(self.features, inputs, strict=True))
            else:
                raise InputError(
                    f"Give a list of inputs, one a layer, not {type(inputs).__name__}."
                )
        if not isinstance(inputs, Mapping):
            split = split_keyed(inputs)
            if split is None:
                raise InputError(
                    f"Give a dict feature → input (or a keyed jagged tensor), not "
                    f"{type(inputs).__name__}."
                )
            inputs = split
        if len(inputs) != len(self.features):
            for feature in inputs:
                if feature not in self.features:
                    raise InputError(
                        f"Feature {feature!r} is unknown; this collection has "
                        f"{', '.join(map(repr, self.features))}."
                    )
        bags = []
        batch = -1
        first = ""
        for feature, t in zip(self.features, self._table_of, strict=True):
            if feature not in inputs:
                raise InputError(
                    f"Feature {feature!r} is missing; the batch has "
                    f"{', '.join(repr(name) for name in inputs) or 'none'}."
                )
            table = self._live[t]
            bag = read_bags(
                feature,
                inputs[feature],
                table.compute_dtype,
                table.spec.combiner,
                table.place.device,
            )
            if batch < 0:
                batch, first = bag.batch, feature
            elif bag.batch != batch:
                raise InputError(
                    f"Feature {feature!r} has a batch of {bag.batch}, feature {first!r} of {batch}; "
                    "all features of a batch must have as many samples."
                )
            bags.append(bag)
        return bags

    # -- look-ahead ------------------------------------------------------------------------------

    def prepare(self, inputs: object) -> BatchAhead:
        """Read and group a batch that a training forward will come with. Changes nothing.

        Raises:
            TableError: there are no tiers, from which rows could be brought up.
            InputError: `inputs` that forward would refuse.
        """
        names = list(self.features)
        call = CallAhead(inputs, self._live, self._table_of, names, self._read)
        return lookups_of(self._live).prepare(call)

    def features_of(self, name: str) -> dict[str, LiveTable]:
        return {feature: self._owned[table] for feature, table in self.features.items()}

    def inputs_from(self, batch: Mapping[str, object], name: str) -> object:
        return {feature: batch[feature] for feature in self.features if feature in batch}

    def required(self, inputs: object, depth: int = 2) -> dict[str, int]:
        """Return the bytes that ``Storage(host=..., ssd=...)`` needs for batches like this one.

        The total is in ``"total"``. Its parts are ``rows`` of ``depth`` + 1 such batches with their
        optimizer states, their ``bookkeeping``, rows that are ``moving``, queues and write ``buffers`` and
        ``index`` of the SSD, ``announced`` ids, and ``other_rows``: slots that tables with other records get
        beside them. For ``Storage(device=...)`` it is the device's budget.

        Call it after the optimizer is made, whose states count; the collection's own budget, if any, does
        not matter. A loop that calls ``zero_grad()`` only before ``backward()`` holds one batch more, and
        one that accumulates over n batches n - 1 more: add them to `depth`. The index counts rows that
        exist; each new id of a dynamic table adds about 23 bytes to it, twice as many after it has grown.

        Raises:
            InputError, IdError: `inputs` that forward would refuse.
            TableError: `depth` is no count, or above a million.
        """
        bags = [bag.on_host() for bag in self._read(inputs)]
        call = Call(self._live, self._table_of, list(self.features), bags, [], False)
        check(core_batch(self._live, self._table_of, bags), call)
        return required(self._live, self._table_of, bags, depth)

    def stats(self) -> dict[str, float]:
        """Return counters of training and of the tiers since the start.

        ``rows_used`` by training batches (distinct rows of each), of which ``rows_missed`` had to be
        brought up and ``rows_created`` were new; ``hit_rate``; ``rows_written_back``,
        ``rows_evicted``; ``rows_read_past`` by evaluation and lookups, stored or not; ``batches``, of
        which ``batches_ahead`` were resident before they were asked for and ``batches_unprepared`` only
        in their forward; ``wait_ms`` that training waited for rows, in look-ahead's loop or in a
        forward; ``move_ms`` moving them, on any thread; ``memory_bytes`` that rows, states, indices and
        buffers take by now, in RAM and on a device together.

        ``rows_from_host`` were found in RAM below a device and ``rows_from_ssd`` on the SSD, by
        training, evaluation, lookups and `assign`; ``rows_to_host`` and ``rows_to_ssd`` went there.
        In a training with nothing beside it ``rows_from_host`` + ``rows_from_ssd`` =
        ``rows_missed`` - ``rows_created``, if each batch that look-ahead brought up was used.

        Of a collection that shares a `Group` with tiers they are those of the group.

        Where all rows lie in RAM there are ``rows_used``, ``rows_missed`` and ``rows_created`` (equal),
        ``hit_rate``, ``batches``, ``wait_ms``, ``memory_bytes``; whole on a device only the last.
        """
        return lookups_of(self._live).stats(self._live)

    def flush(self) -> None:
        """Write every row that the lowest tier lacks to the disk, where ``hotbed inspect`` can read it."""
        lookups_of(self._live).flush(self._live)

    def hottest(self, name: str, count: int = hottest.COUNT) -> list[hottest.Used]:
        """Return the most used ids of a table as (id, uses, excess), wherever their rows lie.

        A use is an occurrence in a batch of training, padding aside. An id was used at most ``uses``
        times and at least ``uses - excess`` times; one that is missing was used no more often than
        the last one that is there. ``excess`` is 0 while a table has met no more than 256 ids, and
        then about a 2048th of what rarer ids were used together. Of a distributed model they are the
        rows that this rank keeps, and an id is used once by a batch of a rank, however often that has it.

        Raises:
            TableError: uses are not counted: without `Storage`, or of a table whole on a device; or
                `count` is no count.
        """
        most = integer(count)
        if most is None or most < 0:
            raise TableError(f"count must be a count of ids, 0 or more, got {count!r}.")
        table = self.table(name)
        if not all(own.core.counts_uses for own in table.place.tables_here(table)):
            raise TableError(
                f"Table {name!r} counts no uses, as that takes time in every step. Pass "
                "storage=hotbed.Storage(host=...) to count them; a device that holds a whole table cannot."
            )
        return [
            hottest.Used(own.spec.origin.ids_in_table(row), uses, excess)
            for own in table.place.tables_here(table)
            for row, uses, excess in own.core.hottest(min(most, sys.maxsize))
        ]

    def extra_repr(self) -> str:
        lines = []
        for name, table in self._owned.items():
            spec = table.spec
            size = "dynamic" if spec.rows is None else f"{spec.rows:,} rows"
            used = [f for f, t in self.features.items() if t == name]
            shared = "" if used == [name] else f" ← {', '.join(used)}"
            dtype = str(spec.dtype).removeprefix("torch.")
            lines.append(
                f"({repr(name)[1:-1]}): {size} × {spec.dim} {dtype}, {spec.combiner}{shared}"
            )
        return "\n".join(lines)
