"""Rows of a checkpoint of changes with those of its bases, read as if it were whole.

Of each row the newest checkpoint counts that has it, or says that it is no more.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hotbed.checkpoint.chain import Link, is_of_removed
from hotbed.checkpoint.errors import DamagedError
from hotbed.checkpoint.linked import linked_rows
from hotbed.checkpoint.merge_columns import whole_rows
from hotbed.checkpoint.rows import IdFilter, TableRows
from hotbed.checkpoint.seen_ids import SeenIds, seen_ids
from hotbed.checkpoint.tensors import read_views

__all__ = ["ids_of_chain", "removed_in", "rows_of_chain"]


def removed_in(link: Link, stems: Collection[str]) -> dict[str, Tensor]:
    """Return by table (n,) int64: ids that were no more at some time since the base.

    Raises:
        DamagedError: a file is missing or damaged, or holds something else.
    """
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    wanted = {stem: link.manifest["tables"][stem]["removed"] or 0 for stem in stems}
    found = {stem: [none] for stem in stems}
    for file in filter(is_of_removed, link.manifest["files"] if any(wanted.values()) else ()):
        path = os.path.join(link.folder, file["name"])
        tensors = read_views(path, file)
        for stem in found.keys() & tensors.keys():
            ids = tensors[stem]
            if ids.dtype != torch.int64 or ids.dim() != 1:
                raise DamagedError(f"{path} has no ids of {stem!r}.")
            found[stem].append(ids)
    joined = {stem: torch.cat(parts) for stem, parts in found.items()}
    for stem, ids in joined.items():
        if len(ids) != wanted[stem]:
            raise DamagedError(
                f"{link.folder} has {len(ids):,} removed ids of {stem!r}, and tells of {wanted[stem]:,}."
            )
    return joined


def rows_of_chain(
    links: Sequence[Link],
    columns: Mapping[str, slice],
    as_stored: Collection[str],
    *,
    again: bool = False,
    any_wanted: IdFilter | None = None,
) -> Iterator[tuple[str, TableRows]]:
    """Rows with these columns of each table at least, each row once, as `whole_rows` gives them. Holds
    `SeenIds` of those that bases have no more to give.

    Args:
        again, any_wanted: see `whole_rows`.

    Raises:
        DamagedError: a file is missing or damaged, or they do not fit together.
    """
    wanted = dict(columns)
    later: dict[str, SeenIds] = {}  # ids that newer links have or have removed
    for link in links:
        entries = link.manifest["tables"]
        with_base = [s for s in wanted if s in entries and entries[s]["removed"] is not None]
        own = {stem: [ids] for stem, ids in removed_in(link, with_base).items()}
        for path, rows in whole_rows(
            link.folder, link.manifest, wanted, as_stored, again=again, any_wanted=any_wanted
        ):
            if rows.stem in own:
                own[rows.stem].append(rows.tensors["ids"].clone())
            rows = _new_rows(rows, later[rows.stem]) if rows.stem in later else rows
            if len(rows.tensors["ids"]) or rows.stem not in later:
                yield path, rows
        wanted = {stem: wanted[stem] for stem in own}
        for stem, ids in own.items():
            later.setdefault(stem, seen_ids(entries[stem]["rows"])).add(torch.cat(ids))
        if not wanted:
            return


def ids_of_chain(links: Sequence[Link], stem: str) -> Iterator[Tensor]:
    """Yield (n,) int64 ids of the rows of one table, each once, file by file; of files little else is read.

    Raises:
        DamagedError: a file is missing or damaged, or holds something else.
    """
    later: SeenIds | None = None
    for link in links:
        if stem not in link.manifest["tables"]:
            return
        entry = link.manifest["tables"][stem]
        is_whole = entry["removed"] is None
        own = [] if is_whole else [removed_in(link, [stem])[stem]]
        for ids in _ids_in(link, stem):
            if not is_whole:
                own.append(ids)
            yield ids if later is None else ids[later.are_new(ids)]
        if is_whole:
            return
        later = later or seen_ids(entry["rows"])
        later.add(torch.cat(own))


def _ids_in(link: Link, stem: str) -> Iterator[Tensor]:
    """Yield the ids of the rows that a link has itself."""
    for file in link.manifest["files"]:
        rows = file["rows"].get(stem)
        if rows is None or rows["columns"][0]:  # whose ids come with the first columns
            continue
        path, name = os.path.join(link.folder, file["name"]), f"{stem}/ids"
        ids = read_views(path, file, only=[name]).get(name)
        if ids is None or ids.shape != (rows["count"],) or ids.dtype != torch.int64:
            raise DamagedError(f"{path} has no ids of {stem!r} as its manifest says.")
        yield ids.clone()  # and let go of the room for the rest
    for _, found in linked_rows(link.folder, link.manifest, [stem]):
        if not found.columns.start:
            yield found.tensors["ids"]


def _new_rows(rows: TableRows, later: SeenIds) -> TableRows:
    """Rows but for those that newer links have."""
    keep = later.are_new(rows.tensors["ids"])
    if bool(keep.all()):
        return rows
    at = keep.nonzero().squeeze(1)
    return rows._replace(
        is_copy=True,
        tensors={name: torch.index_select(each, 0, at) for name, each in rows.tensors.items()},
    )
