"""The folder that 4paradigm's OpenEmbedding saves, which is not read."""

from __future__ import annotations

import os

from hotbed.formats.tables import FormatError, Found, Hints

__all__ = ["OpenEmbedding"]


class OpenEmbedding:
    hints: tuple[str, ...] = ("dim", "snapshot")
    endings: tuple[str, ...] = ()

    def is_in(self, folder: str) -> bool:
        places = ("model_meta", os.path.join("openembedding", "model_meta"))
        return any(os.path.isfile(os.path.join(folder, place)) for place in places)

    def read(self, path: str, hints: Hints) -> Found:
        raise FormatError(
            f"{path} is in OpenEmbedding's own serialization, which is documented nowhere and has changed "
            "between its versions; pull the rows there, write them as Parquet (id, vector), and import that."
        )


FORMAT = OpenEmbedding()
