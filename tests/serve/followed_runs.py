"""A model that is trained, saved and followed, and what is to be served of its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import torch
from kept_in import storage_of
from numpy.typing import NDArray
from torch import Tensor, nn

import hotbed as hb
from hotbed.checkpoint.files import write_json_sealed
from hotbed.modules.owner import tables_left_out, tables_of
from hotbed.serve.bundles.reading import BundleTable, Ids, MappedRows, looked_up
from hotbed.serve.bundles.row_formats import ROW_FORMATS
from hotbed.serve.bundles.table_files import write_table
from hotbed.serve.bundles.versions import Layers, current, open_layers
from hotbed.serve.following.follower import Applied, Follower

ITEMS, USERS = 60, 40
B = 8
OF_TABLE = {"vectors.item": np.arange(ITEMS), "vectors.user": np.arange(-1, USERS + 9) * 2**33}


class Model(nn.Module):
    """A static and a dynamic table, and layers with parameters and buffers, some of them equal at first."""

    def __init__(
        self, place: str = "memory", folder: Path = Path(), width: int = 3, **about: Any
    ) -> None:
        super().__init__()
        tables = [hb.Table("item", 4, ITEMS, **about), hb.Table("user", 3, padding_idx=-1, **about)]
        self.vectors = hb.EmbeddingCollection(tables, seed=0, storage=storage_of(place, folder))
        self.middle = nn.Sequential(nn.BatchNorm1d(7), nn.LayerNorm(7), nn.Linear(7, width))
        self.top = nn.Linear(width, 1)
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        found = self.vectors({name: batch[name] for name in ("item", "user")})
        inside = self.middle(torch.cat([*found.values()], 1).float()).relu()
        answer: Tensor = self.top(inside).squeeze(1) * self.scale.exp()
        return answer


def batch_of(step: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    users = torch.randint(0, USERS, (B, 3), generator=drawn) * 2**33
    return {"item": torch.randint(0, ITEMS, (B, 2), generator=drawn), "user": users}


class Run:
    """A training whose checkpoints are in a folder.

    Args:
        folder: of all that belongs to it.
        root: where checkpoints are saved.
        about: of the tables.
    """

    def __init__(
        self,
        folder: Path,
        *,
        place: str = "memory",
        root: str = "",
        rule: str = "Adam",
        about: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(3)
        self.folder, self.root = folder, root or str(folder / "run")
        self.about = about or {}
        self.model = Model(place, folder, **self.about)
        self.optimizer = getattr(hb.optim, rule)(self.model.parameters(), lr=0.05, **options)
        self.step = 0
        self.train()

    def train(self, steps: int = 1) -> None:
        self.model.train()
        for _ in range(steps):
            self.step += 1
            loss = (self.model(batch_of(self.step)) - 1).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self, **how: Any) -> hb.checkpoint.Saved:
        saved: hb.checkpoint.Saved = hb.save(
            self.root, self.model, self.optimizer, step=self.step, **how
        )
        return saved

    def erase(self, numbers: set[int]) -> None:
        ids = torch.tensor(sorted(numbers))
        hb.erase(self.model, {"user": ids * 2**33, "item": ids})

    def export(self, name: str = "bundle", **how: Any) -> Path:
        return hb.export(
            self.model, self.folder / name, sample=batch_of(0), **{"step": self.step, **how}
        )

    def loaded(self, checkpoint: str = "") -> Model:
        """What was saved, in a model with the same seed."""
        model = Model(**self.about)
        hb.load(checkpoint or self.root, model)
        return model


def rows_in(tables: Mapping[str, BundleTable]) -> dict[str, NDArray[np.float32]]:
    return {stem: tables[stem].rows(ids) for stem, ids in OF_TABLE.items()}


def initialisers(dense: bytes) -> dict[str, bytes]:
    graph = onnx.load_from_string(dense).graph
    return {each.name: onnx.numpy_helper.to_array(each).tobytes() for each in graph.initializer}


class Contents(NamedTuple):
    """Rows of some ids, by table, and bytes of weights, by name."""

    rows: dict[str, NDArray[np.float32]]
    weights: dict[str, bytes]

    def check(self, served: Layers) -> None:
        """They are served, to the bit."""
        found = rows_in(served.tables)
        for stem, expected in self.rows.items():
            np.testing.assert_array_equal(found[stem], expected, stem)
        there, own = initialisers(served.dense), served.about["parameters"]
        assert {"scale", "middle.1.weight", "middle.0.running_mean"} <= {*own.values()}
        for initialiser, name in own.items():
            assert there[initialiser] == self.weights[name], name


def contents_of(
    model: Model, folder: Path, rows: str = "float32", default: str = "zeros"
) -> Contents:
    """What an export of a model would have."""
    (folder / "tables").mkdir(parents=True, exist_ok=True)
    tables = {}
    for number, (stem, table) in enumerate(tables_of(model).items()):
        entry = write_table(
            str(folder), f"tables/{number}", table, ROW_FORMATS[rows], None, default
        )
        tables[stem] = BundleTable([MappedRows(str(folder), entry)])
    with tables_left_out():
        weights = {name: each.numpy().tobytes() for name, each in model.state_dict().items()}
    return Contents(rows_in(tables), weights)


def check_rows_and_weights(
    served: Layers, model: Model, folder: Path, rows: str = "float32", default: str = "zeros"
) -> None:
    """What is served are the rows and the weights of a model, to the bit."""
    contents_of(model, folder, rows, default).check(served)


def answers(served: Layers, batch: dict[str, Tensor]) -> NDArray[np.float32]:
    session = onnxruntime.InferenceSession(served.dense, providers=["CPUExecutionProvider"])
    fed = {}
    for lookup in served.about["lookups"]:
        ids = batch[lookup["input"]].numpy()
        bags = ids.reshape(-1), np.arange(len(ids) + 1) * ids.shape[1]
        asked = Ids.of(lookup, served.tables[lookup["table"]], *bags)
        (fed[lookup["vectors"]],) = looked_up([asked])
    (found,) = session.run(None, fed)
    return np.asarray(found)


def reseal(path: Path, contents: dict[str, Any]) -> None:
    """Write a manifest with other contents."""
    path.unlink()
    write_json_sealed(str(path), {k: v for k, v in contents.items() if k != "crc32c"})


def applied(follower: Follower) -> Applied:
    found = follower.poll()
    assert found is not None
    return found


def served_from(bundle: Path) -> Layers:
    return open_layers(bundle, current(bundle))
