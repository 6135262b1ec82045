"""Iterators over rows that are dropped half way."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import hotbed as hb
from hotbed.checkpoint import rows
from hotbed.checkpoint.manifest import read_manifest


def test_their_threads_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector ends an iterator in any thread, one that begins or ends another among them."""
    monkeypatch.setattr(rows, "FILE_BYTES", 1000)
    model = hb.EmbeddingCollection([hb.Table(f"t{n}", 8, rows=400) for n in range(8)])
    folder = hb.save(tmp_path, model, step=1).path
    manifest = read_manifest(folder)
    files = len(manifest["files"])
    assert files >= 6
    may, begun, read = threading.Event(), threading.Event(), rows._read
    seen: list[str] = []

    def slowly(stems: Any, wanted: Any, path: str, *more: Any) -> Any:
        seen.append(path)
        if len(seen) > 1:
            begun.set()
            assert may.wait(60)
        return read(stems, wanted, path, *more)

    monkeypatch.setattr(rows, "_read", slowly)
    iterator = rows.read_rows(folder, manifest, [*manifest["tables"]])
    next(iterator)
    assert begun.wait(60)
    closing = threading.Thread(target=iterator.close)  # type: ignore[attr-defined]
    closing.start()
    closing.join(20)
    ended = not closing.is_alive()
    may.set()
    closing.join()
    assert ended
    assert len(seen) < files  # files that were not begun are not read
