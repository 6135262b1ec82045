"""Bundles as they are opened to be read."""

from __future__ import annotations

import os
from typing import cast

from hotbed.checkpoint.files import read_json_sealed
from hotbed.serve.bundle import FORMAT, MANIFEST, VERSION, Bundle, BundleError

__all__ = ["read_bundle"]


def read_bundle(folder: str) -> Bundle:
    """Return what a bundle says of itself.

    Raises:
        BundleError: there is none, its version is unknown, or a file is missing or of another size.
        OSError, CheckpointError: it cannot be read.
    """
    path = os.path.join(folder, MANIFEST)
    if not os.path.isfile(path):
        raise BundleError(f"{folder} is no bundle: it has no {MANIFEST}. hotbed.export writes one.")
    contents, whole = read_json_sealed(path)
    if not isinstance(contents, dict) or contents.get("format") != FORMAT:
        raise BundleError(f"{path} is not of a bundle.")
    if contents.get("version") != VERSION:
        raise BundleError(
            f"{path} has version {contents.get('version')!r} of the format, and this Hotbed reads {VERSION}."
        )
    if not whole:
        raise BundleError(f"{path} is damaged: its checksum is another.")
    bundle = cast(Bundle, contents)
    for file in bundle["files"]:
        part = os.path.join(folder, file["name"])
        size = os.path.getsize(part) if os.path.isfile(part) else None
        if size != file["bytes"]:
            told = "is missing" if size is None else f"has {size} bytes, not {file['bytes']}"
            raise BundleError(f"{part} {told}. Export the model again.")
    return bundle
