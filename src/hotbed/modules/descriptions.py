"""Descriptions that a collection is made of: tables, and the features that are looked up in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hotbed.arrays import iterated
from hotbed.errors import TableError
from hotbed.group.group import Group
from hotbed.storage import Storage
from hotbed.table.state_dict import refuse_ambiguous_names
from hotbed.tables import Table

__all__ = ["described", "group_for"]


def described(
    tables: Sequence[Table], features: Mapping[str, str] | None
) -> tuple[list[Table], Mapping[str, str]]:
    """The tables, and feature name → table name; each table is a feature of its own name by default.

    Raises:
        TableError: they are something else, have equal names, or name tables that there are not.
    """
    each = iterated(tables)
    if isinstance(tables, Mapping) or each is None:
        raise TableError(f"tables must be a list of hotbed.Table, got {type(tables).__name__}.")
    given = list(each)
    if not given:
        raise TableError("An EmbeddingCollection needs at least one table.")
    names: set[str] = set()
    for table in given:
        if not isinstance(table, Table):
            raise TableError(f"tables must be hotbed.Table, got {type(table).__name__}.")
        if table.name in names:
            raise TableError(f"Two tables are named {table.name!r}; names must be distinct.")
        names.add(table.name)
    refuse_ambiguous_names(names)
    if features is None:
        features = {table.name: table.name for table in given}
    if not isinstance(features, Mapping):
        raise TableError(
            "features must be a dict feature name → table name, such as "
            f'{{"watched": {given[0].name!r}}}, got {type(features).__name__}.'
        )
    if not features:
        raise TableError("An EmbeddingCollection needs at least one feature.")
    for feature, name in features.items():
        if name not in names:
            raise TableError(
                f"Feature {feature!r} names table {name!r}, which does not exist; there are "
                f"{', '.join(repr(table.name) for table in given)}."
            )
    return given, features


def group_for(group: Group | None, storage: Storage | None = None) -> Group:
    """Return the group that a module's tables go into: the one given, or a new one.

    Raises:
        TableError: it is no `Group`, or there is a `storage` beside it.
        StorageError: as from `Group`.
    """
    if group is None:
        return Group(storage)
    if not isinstance(group, Group):
        raise TableError(f"group must be a hotbed.Group, got {type(group).__name__}.")
    if storage is not None:
        raise TableError(
            "Give storage= to the Group that modules share, or to the module, not both."
        )
    return group
