"""Base of click models: tables, dense columns, and a weight of its own for each id.

Shapes: B samples, F features, d columns of a vector.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from hotbed import data
from hotbed.arrays import iterated
from hotbed.collection import EmbeddingCollection
from hotbed.data import Schema
from hotbed.devices import Device
from hotbed.errors import TableError
from hotbed.init import Columns, Normal, Zeros
from hotbed.models.dense_columns import check_num_dense, check_samples, dense_of
from hotbed.models.settings import LinearSettings, ModelSettings
from hotbed.nn import concat
from hotbed.sharding import ColumnWise
from hotbed.storage import Storage
from hotbed.tables import Table

__all__ = ["ClickModel"]


class ClickModel(nn.Module):
    """Base of models that turn a batch into a logit a sample.

    A subclass names the dataclass of its `Settings`, makes its dense layers in `make_layers`, and maps a
    batch to logits in `forward`, most easily with what `look_up` returns.

    Args:
        tables: names of dynamic tables, which start from Normal(0, 0.01), or `Table`s of the settings'
            ``dim``. With a linear part table ``C1`` has the twin ``C1.wide`` of width 1, from zero.
        values, named: settings in their order, or by name; or an object of `Settings`.
        features: the table of each feature of a batch. Default: each table is a feature.
        seed: fixes the tables' first values; None draws it from torch's generator, which also
            gives the dense layers theirs.
        storage: budgets for the tiers that rows may lie in.
        device: where the model is made, as ``to(device)`` would have it but without tables in RAM first;
            "meta": the tables take no memory before `hotbed.distribute`, and all else lies in RAM.

    ``model(batch)`` takes a dict with every feature and ``"dense"``, float (B, num_dense), which may be left
    out where that is 0, and returns logits (B,).

    Raises:
        TableError: a table has another width than ``dim``, or there is none; a setting has a wrong value; a
            feature has the name of something else.
        TypeError: there is no such setting.
    """

    Settings: ClassVar[type[ModelSettings]] = ModelSettings
    """Dataclass of the model's settings."""
    least_dense: ClassVar[int] = 0
    """Dense columns that the model needs at least."""
    settings: ModelSettings
    schema: Schema | None = None
    """Schema of the data that the model was made for, by `from_schema`; checkpoints keep it."""

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        cls.__signature__ = inspect.Signature([*_parameters(cls.Settings)])  # type: ignore[attr-defined]

    def __init__(
        self,
        tables: Sequence[str | Table],
        *values: object,
        features: Mapping[str, str] | None = None,
        seed: int | None = None,
        storage: Storage | None = None,
        device: Device | None = None,
        **named: object,
    ) -> None:
        super().__init__()
        self.settings = self._settings(values, named)
        self.dim, self.num_dense = self.settings.dim, self.settings.num_dense
        check_num_dense(self, self.num_dense, self.least_dense)
        self.described = _tables_of(tables, self.dim)
        """The tables, but for those of the linear part."""
        if not self.described:
            raise TableError(f"{type(self).__name__}: tables is empty. Name at least one.")
        has_linear = isinstance(self.settings, LinearSettings)
        self.one_row = isinstance(self.settings, LinearSettings) and self.settings.one_row
        self.table_of = self._features_of(features, has_twins=has_linear and not self.one_row)
        """Name of the table of each feature."""
        self.features = [*self.table_of]
        """Names of the features, in the order of their vectors."""
        stored: list[Table] = self.described
        twins: dict[str, str] = {}
        if self.one_row:
            stored = [*map(_with_weight, self.described)]
        elif has_linear:
            # One collection for both, so that a batch is resolved and looked up in one call.
            stored = [*self.described, *map(_weight_of, self.described)]
            twins = {f"{name}.wide": f"{table}.wide" for name, table in self.table_of.items()}
        self.embeddings = EmbeddingCollection(
            stored, {**self.table_of, **twins}, seed=seed, storage=storage, device=device
        )
        self.wide = _linear(self.num_dense) if has_linear else None
        self.make_layers()
        if device is not None and torch.device(device).type != "meta":
            self.to(device)

    def _features_of(
        self, features: Mapping[str, str] | None, *, has_twins: bool
    ) -> dict[str, str]:
        if features is None:
            features = {table.name: table.name for table in self.described}
        model = type(self).__name__
        if not isinstance(features, Mapping) or not features:
            raise TableError(
                f"{model}: features is {features!r}. Pass a dict feature → table, such as {{'seen': 'item'}}."
            )
        if "dense" in features:
            raise TableError(
                f"{model}: a feature is named 'dense', where a batch has its dense columns. Rename it."
            )
        for name in features:
            if has_twins and f"{name}.wide" in features:
                raise TableError(
                    f"{model}: feature '{name}.wide' has the name of {name!r} in the linear part. Rename it, "
                    "or pass one_row=True."
                )
        return dict(features)

    @classmethod
    def _settings(cls, values: tuple[object, ...], named: dict[str, object]) -> ModelSettings:
        try:
            if len(values) == 1 and isinstance(values[0], cls.Settings):
                return dataclasses.replace(values[0], **named)  # type: ignore[arg-type]
            return cls.Settings(*values, **named)  # type: ignore[arg-type]
        except TypeError as error:
            known = ", ".join(field.name for field in dataclasses.fields(cls.Settings))
            unknown = [name for name in named if name not in known.split(", ")]
            if not unknown:
                raise
            raise TypeError(
                f"{cls.__name__}: there is no setting {unknown[0]!r}; there are {known}."
            ) from error

    @classmethod
    def from_schema(
        cls,
        schema: Schema,
        *,
        seed: int | None = None,
        storage: Storage | None = None,
        device: Device | None = None,
        **settings: object,
    ) -> Self:
        """Return a model for the batches of `hotbed.data.open`, with tables, features and dense columns of
        a schema.

        Args:
            settings: by name, beside those that follow from the schema.

        Raises:
            TableError: the model has no use for a feature of the schema; or as of the constructor.
        """
        made = cls._settings((), {**cls.settings_of(schema), **settings})
        model = cls(
            schema.tables(made.dim),
            made,
            features=schema.features,
            seed=seed,
            storage=storage,
            device=device,
        )
        model.schema = schema
        return model

    @classmethod
    def settings_of(cls, schema: Schema) -> dict[str, object]:
        """Return the settings that follow from a schema, by name.

        Raises:
            TableError: the model has no use for a feature of the schema.
        """
        for name, column in schema.columns.items():
            if isinstance(column, data.Sequence):
                raise TableError(
                    f"{cls.__name__}: feature {name!r} is a sequence, of which it can make nothing. Take "
                    'DIN, or make the column one of the kind "ids".'
                )
        return {"num_dense": len(schema.numbers)}

    def make_layers(self) -> None:
        """Make the dense layers; called once, when `settings`, `features` and `embeddings` are there."""

    @property
    def config(self) -> dict[str, object]:
        """Arguments that make a model of the same shape."""
        config: dict[str, object] = {"tables": self.described, **dataclasses.asdict(self.settings)}
        if self.table_of != {table.name: table.name for table in self.described}:
            config["features"] = self.table_of
        return config

    @property
    def width(self) -> int:
        """Columns of the dense features and all vectors side by side."""
        return self.num_dense + self.dim * len(self.features)

    def embedding_inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what `embeddings` looks up of a batch; `hotbed.lookahead` asks for it."""
        # The collection names a feature that is missing.
        inputs = {name: batch[name] for name in self.features if name in batch}
        if self.wide is not None and not self.one_row:
            inputs.update({f"{name}.wide": values for name, values in inputs.items()})
        return inputs

    def look_up(self, batch: Mapping[str, Tensor]) -> tuple[list[Tensor], Tensor | None]:
        """Return F vectors (B, d), and the linear part (B, 1) if there is one.

        Raises:
            InputError: ``batch["dense"]`` is not of shape (B, `num_dense`); or a feature cannot be looked up.
        """
        has_none = not self.num_dense and "dense" not in batch
        dense = None if has_none else dense_of(self, batch, self.num_dense)
        vectors = list(self.embeddings(self.embedding_inputs(batch)).values())
        dense = vectors[0].new_empty(vectors[0].shape[0], 0) if dense is None else dense
        check_samples(self, dense, self.features[0], vectors[0])
        if self.wide is None:
            return vectors, None
        if self.one_row:
            weights = [each[:, self.dim :] for each in vectors]
            vectors = [each[:, : self.dim] for each in vectors]
        else:
            count = len(self.features)
            vectors, weights = vectors[:count], vectors[count:]
        return vectors, self.wide(dense) + concat(weights).sum(1, keepdim=True)

    @staticmethod
    def side_by_side(batch: Mapping[str, Tensor], vectors: Sequence[Tensor]) -> Tensor:
        """Return (B, `width`): dense columns, if there are some, then the vectors."""
        joined = concat(vectors)
        return torch.cat([batch["dense"], joined], 1) if "dense" in batch else joined


def _linear(columns: int) -> nn.Linear:
    """A layer with one output; of no columns it is a bias, without torch's warning."""
    if columns:
        return nn.Linear(columns, 1)
    layer = nn.Linear(1, 1)
    layer.in_features, layer.weight = 0, nn.Parameter(layer.weight.detach()[:, :0].clone())
    nn.init.zeros_(layer.bias)
    return layer


def _weight_of(table: Table) -> Table:
    """The twin that has a table's weights in the linear part."""
    sharding = None if isinstance(table.sharding, ColumnWise) else table.sharding
    return dataclasses.replace(
        table, name=f"{table.name}.wide", dim=1, init=Zeros(), sharding=sharding
    )


def _with_weight(table: Table) -> Table:
    """The table with one more column, the weights in the linear part."""
    parts = table.init.parts if isinstance(table.init, Columns) else [(table.dim, table.init)]
    init, sharding = Columns([*parts, (1, Zeros())]), table.sharding
    if isinstance(sharding, ColumnWise) and sharding.widths is not None:
        *widths, last = sharding.widths
        sharding = dataclasses.replace(sharding, widths=(*widths, last + 1))
    return dataclasses.replace(table, dim=table.dim + 1, init=init, sharding=sharding)


def _parameters(settings: type[ModelSettings]) -> Iterator[inspect.Parameter]:
    """Parameters of a model's constructor, for ``help()`` and checks of names."""
    normal, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    yield inspect.Parameter("tables", normal)
    for field in sorted(dataclasses.fields(settings), key=lambda field: bool(field.kw_only)):
        kind = keyword if field.kw_only else normal
        yield inspect.Parameter(field.name, kind, default=field.default, annotation=field.type)
    for name in ("features", "seed", "storage", "device"):
        yield inspect.Parameter(name, keyword, default=None)


def _tables_of(tables: Sequence[str | Table], dim: int) -> list[Table]:
    """`tables`, with a dynamic table that starts from Normal(0, 0.01) for every name.

    Raises:
        TableError: one is no table or name, or has another width than `dim`.
    """
    each = iterated(tables)
    if isinstance(tables, str) or each is None:
        raise TableError(f"tables is {tables!r}. Pass a list of names or hotbed.Table objects.")
    made = []
    for table in each:
        if isinstance(table, str):
            table = Table(table, dim, init=Normal(0.0, 0.01))
        if not isinstance(table, Table):
            raise TableError(f"tables must be names or hotbed.Table objects, got {table!r}.")
        if table.dim != dim:
            raise TableError(
                f"Table {table.name!r} has dim {table.dim}, and the model {dim}. Make them equal."
            )
        made.append(table)
    return made
