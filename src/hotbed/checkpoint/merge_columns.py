"""Rows whose columns lie in several files, as writers that have some columns each leave them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hotbed import _core
from hotbed.checkpoint.entries import Manifest, RuleEntry, Source
from hotbed.checkpoint.errors import DamagedError
from hotbed.checkpoint.linked import linked_rows
from hotbed.checkpoint.manifest import all_files, sources
from hotbed.checkpoint.rows import IdFilter, TableRows, read_rows

__all__ = ["whole_rows"]

_SPREAD = 0x9E3779B97F4A7C1
"""Odd: ids that rise by equal steps go into all passes alike."""
_SHARE_OF_MEMORY = 4
"""Of what is free, rows that are put together take a fourth."""


def whole_rows(
    folder: str,
    manifest: Manifest,
    columns: Mapping[str, slice],
    as_stored: Collection[str],
    *,
    again: bool = False,
    any_wanted: IdFilter | None = None,
) -> Iterator[tuple[str, TableRows]]:
    """Rows with these columns of each table at least, as `read_rows` gives them.

    Args:
        as_stored: tables whose states and steps matter.
        again, any_wanted: see `read_rows`; columns that are put together are read nevertheless.

    Raises:
        DamagedError: a file is missing or damaged, or they do not fit together.
    """
    split = [
        stem
        for stem, own in columns.items()
        if any(_has(one, stem, own) and not _has_all(one, stem, own) for one in sources(manifest))
    ]
    others = [stem for stem in columns if stem not in split]
    with_columns: Manifest = {
        **manifest,
        "files": [f for f in manifest["files"] if any(_has(f, s, columns[s]) for s in others)],
    }
    for path, rows in _rows(folder, with_columns, others, again=again, any_wanted=any_wanted):
        own = columns[rows.stem]
        if rows.columns.start < own.stop and own.start < rows.columns.stop:
            yield path, rows
    for stem in split:
        rule = manifest["tables"][stem]["rule"] if stem in as_stored else None
        yield from _joined_rows(folder, manifest, stem, columns[stem], rule)


def _joined_rows(
    folder: str,
    manifest: Manifest,
    stem: str,
    columns: slice,
    rule: RuleEntry | None,
) -> Iterator[tuple[str, TableRows]]:
    """Where they do not fit into a part of the free memory, the files are read several times.

    Args:
        rule: what the manifest says of the states; None: they are left out.
    """
    own = [one for one in manifest["files"] if _has(one, stem, columns)]
    logs = [one for one in manifest.get("linked", ()) if _has(one, stem, columns)]
    only: Manifest = {**manifest, "files": own, "linked": logs}
    states = {f"states/{name}": width for name, width in (rule["states"] if rule else ())}
    one_a_row = {"steps", *(name for name, width in states.items() if width == 1)}
    wanted = {"ids", "weights", *states, *(("steps",) if rule else ())}
    size = 2 * sum(file["bytes"] for file in all_files(own, logs))  # with what is put together
    passes = 1 + size // max(1, _core.available_memory() // _SHARE_OF_MEMORY)
    for turn in range(passes):
        pieces = []
        for _, rows in _rows(folder, only, [stem]):
            here = (rows.tensors["ids"] * _SPREAD >> 32) % passes == turn
            some = {name: t[here] for name, t in rows.tensors.items() if name in wanted}
            pieces.append(rows._replace(tensors=some))
        pieces.sort(key=lambda piece: piece.columns.start)
        try:
            yield folder, _joined(stem, columns, pieces, one_a_row)
        except (IndexError, ValueError) as error:
            raise DamagedError(
                f"{folder}: columns of {stem!r} do not fit together: {error}"
            ) from None


def _rows(
    folder: str,
    manifest: Manifest,
    stems: Sequence[str],
    *,
    again: bool = False,
    any_wanted: IdFilter | None = None,
) -> Iterator[tuple[str, TableRows]]:
    """Rows of files, then those of linked logs."""
    yield from read_rows(folder, manifest, stems, again=again, any_wanted=any_wanted)
    yield from linked_rows(folder, manifest, stems)


def _has(one: Source, stem: str, columns: slice) -> bool:
    if stem not in one["rows"]:
        return False
    first, end = one["rows"][stem]["columns"]
    return bool(first < columns.stop and columns.start < end)


def _has_all(one: Source, stem: str, columns: slice) -> bool:
    first, end = one["rows"][stem]["columns"]
    return bool(first <= columns.start and columns.stop <= end)


def _joined(
    stem: str, columns: slice, pieces: Sequence[TableRows], one_a_row: set[str]
) -> TableRows:
    """`pieces`: by their first columns."""
    ids = torch.unique(torch.cat([piece.tensors["ids"] for piece in pieces]))
    width, filled = columns.stop - columns.start, 0
    there: dict[int, list[Tensor]] = {}  # rows by their first column
    tensors: dict[str, Tensor] = {}
    for piece in pieces:
        at = torch.searchsorted(ids, piece.tensors["ids"])
        first, end = max(piece.columns.start, columns.start), min(piece.columns.stop, columns.stop)
        filled += len(at) * (end - first)
        there.setdefault(first, []).append(at)
        for name, tensor in piece.tensors.items():
            if name == "ids":
                continue
            shape = tensor.shape[1:] if name in one_a_row else (width,)
            whole = tensors.setdefault(name, tensor.new_zeros(len(ids), *shape))
            if name not in one_a_row:
                own = tensor[:, first - piece.columns.start : end - piece.columns.start]
                whole[at, first - columns.start : end - columns.start] = own
            elif first == columns.start:
                whole[at] = tensor
            elif not torch.equal(whole[at], tensor):
                raise ValueError(f"some of a row have other {name} than others")
    twice = any(len(torch.unique(own)) < len(own) for own in map(torch.cat, there.values()))
    if twice or filled != len(ids) * width:
        raise ValueError("some rows have not all of them, or twice")
    return TableRows(stem, columns, {"ids": ids, **tensors}, is_copy=True)
