"""Answers of a bundle that hotbed.export has written, with NumPy and onnxruntime alone (no torch, no Hotbed):
python read_bundle.py DIR"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime


class Table:
    """Rows of a table, mapped into memory."""

    def __init__(self, folder, about):
        def part(name):
            path = folder / f"{about['files']}.{name}.npy"
            return np.load(path, mmap_mode="r" if about["rows"] else None)

        if "first" in about:
            raise ValueError("Hotbed alone computes first values: export with default='zeros'")
        self.about, self.stored, self.default = about, part("rows"), part("default")
        self.scales = part("scales") if about["stored_as"] in ("int8", "int4") else None
        self.ids = None if about["static"] else part("ids")

    def rows(self, ids):
        """(n, dim) float32 rows of (n,) ids; one without a row has the table's default."""
        if self.ids is None:
            if len(ids) and not 0 <= ids.min() <= ids.max() < self.about["rows"]:
                raise ValueError(f"ids must lie in [0, {self.about['rows']})")
            return self.decoded(ids)
        at = np.minimum(np.searchsorted(self.ids, ids), max(0, len(self.ids) - 1))
        found = self.ids[at] == ids if len(self.ids) else np.zeros(len(ids), bool)
        rows = np.repeat(self.default[None], len(ids), 0)
        rows[found] = self.decoded(at[found])
        return rows

    def decoded(self, at):
        stored, dim = self.stored[at], self.about["dim"]
        if self.about["stored_as"] == "int4":
            both = np.stack([stored & 15, stored >> 4], 2)
            stored = both.reshape(len(at), 2 * stored.shape[1])[:, :dim]
        rows = stored.astype(np.float32)
        if self.scales is not None:
            scale, offset = self.scales[at].astype(np.float32).T
            rows = rows * scale[:, None] + offset[:, None]
        return rows


def combined(rows, bag_of, lengths, combiner):
    """(B, dim) of (n, dim) rows, whose bags `bag_of` (n,) says, rising; (B,) `lengths`."""
    if combiner == "max":
        out = np.full((len(lengths), rows.shape[1]), -np.inf, rows.dtype)
        np.maximum.at(out, bag_of, rows)
        return np.where(lengths[:, None] > 0, out, 0)
    out = np.zeros((len(lengths), rows.shape[1]), rows.dtype)
    np.add.at(out, bag_of, rows)  # in their order, as training does
    counts = np.maximum(lengths, 1).astype(rows.dtype)[:, None]
    return out / {"sum": 1, "mean": counts, "sqrtn": np.sqrt(counts)}[combiner]


class Bundle:
    def __init__(self, folder):
        folder = Path(folder)
        self.about = json.loads((folder / "bundle.json").read_text())
        self.tables = {name: Table(folder, each) for name, each in self.about["tables"].items()}
        self.dense = onnxruntime.InferenceSession(str(folder / "dense.onnx"))

    def predict(self, asked):
        """Outputs by name, of inputs by name: for each sample an id, a list of ids, or numbers."""
        fed = {
            each["name"]: np.asarray(asked[each["name"]], each["dtype"])
            for each in self.about["inputs"]
            if each["dense"]
        }
        for each in self.about["lookups"]:
            fed[each["vectors"]] = self.vectors(each, asked[each["input"]]).astype(each["dtype"])
        names = [each["name"] for each in self.about["outputs"]]
        return dict(zip(names, self.dense.run(names, fed), strict=True))

    def vectors(self, lookup, asked):
        table, padding = self.tables[lookup["table"]], lookup["padding_idx"]
        if lookup["combiner"] == "none":
            ids = np.asarray(asked, np.int64)
            rows = table.rows(np.where(ids == padding, 0, ids).ravel())
            rows[(ids == padding).ravel()] = 0
            return rows.reshape(*ids.shape, rows.shape[1])
        bags = [np.atleast_1d(np.asarray(ids, np.int64)) for ids in asked]
        bags = [ids[ids != padding] for ids in bags]
        lengths = np.array([len(ids) for ids in bags])
        rows = table.rows(np.concatenate(bags))
        return combined(rows, np.repeat(np.arange(len(bags)), lengths), lengths, lookup["combiner"])


if __name__ == "__main__":
    bundle = Bundle(sys.argv[1])
    sample = json.loads((Path(sys.argv[1]) / "sample.json").read_text())["instances"]
    answers = bundle.predict({name: [each[name] for each in sample] for name in sample[0]})
    print(json.dumps({name: each.tolist() for name, each in answers.items()}))
