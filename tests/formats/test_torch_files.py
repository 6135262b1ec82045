"""state_dicts: of torch.save and as safetensors."""

from __future__ import annotations

import json
import os
import resource
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from copies import in_a_copy
from formats.format_tables import a_checkpoint, about, imported, refused, run, same, tables_in
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import hotbed as hb
from hotbed.checkpoint.stores.local import LocalStore

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


class Model(nn.Module):
    """A model as others write it; `layers` is torch.nn or hotbed."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.user = layers.Embedding(50, 4)
        self.bags = nn.ModuleList([layers.EmbeddingBag(20, 4, mode="sum") for _ in range(2)])
        self.norm = nn.LayerNorm(4)
        self.top = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        sums = self.user(ids[:, 0]) + self.bags[0](ids % 20) + self.bags[1](ids % 7)
        return self.top(self.norm(sums))


NAMES = ["user.weight", "bags.0.weight", "bags.1.weight"]


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_a_model_of_torch_goes_over(tmp_path: Path, ending: str) -> None:
    old, new = Model(nn), Model(hb)
    path = tmp_path / f"model{ending}"
    save = save_file if ending == ".safetensors" else torch.save
    save(old.state_dict(), path)
    code, said = run("import", path, "--to", tmp_path / "run")
    assert code == 0 and "top.weight" in said and "looks like a linear layer's" in said
    assert [*about(tmp_path / "run")] == sorted(NAMES) if ending != ".pt" else NAMES
    loaded = hb.load(tmp_path / "run", new, strict=False)
    assert sorted(loaded.missing) == ["norm.bias", "norm.weight", "top.bias", "top.weight"]
    new.load_state_dict(old.state_dict(), strict=False)  # which has the dense layers, too
    again = Model(hb)
    again.top.load_state_dict(old.top.state_dict())
    hb.load(tmp_path / "run", again, strict=False)
    ids = torch.randint(0, 50, (64, 3))
    assert torch.equal(again(ids), old(ids)) and torch.equal(new(ids), old(ids))


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_there_and_back(tmp_path: Path, ending: str, dtype: torch.dtype) -> None:
    expected = a_checkpoint(tmp_path / "run", dtype)
    path = tmp_path / f"tables{ending}"
    code, said = run("dump", tmp_path / "run", "--to", path)
    assert code == 0 and "0 .. 9" in said and "any" in said
    state = load_file(path) if ending == ".safetensors" else torch.load(path, weights_only=True)
    assert set(state) == {"item.weight", "user", "user.ids"}
    assert torch.equal(state["item.weight"], expected["item.weight"][1])
    order = state["user.ids"].argsort()
    assert torch.equal(state["user.ids"][order], expected["user"][0])
    assert torch.equal(state["user"][order], expected["user"][1])
    same(imported(path, tmp_path / "back"), expected)
    assert about(tmp_path / "back")["item.weight"]["rows"] == 10
    assert about(tmp_path / "back")["user"]["rows"] is None
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".part")]


def test_modules_read_what_was_dumped(tmp_path: Path) -> None:
    model = hb.EmbeddingCollection([hb.Table("user", 3), hb.Table("item", 2, rows=8)], seed=1)
    model.assign("user", [3, -(2**60)], torch.randn(2, 3))
    hb.save(tmp_path / "run", model, step=0)
    for ending, read in ((".pt", torch.load), (".safetensors", load_file)):
        assert run("dump", tmp_path / "run", "--to", tmp_path / f"t{ending}")[0] == 0
        other = hb.EmbeddingCollection([hb.Table("user", 3), hb.Table("item", 2, rows=8)], seed=2)
        other.load_state_dict(read(tmp_path / f"t{ending}"), strict=False)
        assert torch.equal(other.rows("user").values, model.rows("user").values)
        ids = torch.arange(8)
        assert torch.equal(other.lookup("item", ids), model.lookup("item", ids))


def test_a_state_dict_of_hotbed_itself(tmp_path: Path) -> None:
    model = hb.EmbeddingCollection([hb.Table("user", 3), hb.Table("item", 2, rows=8)], seed=1)
    model.assign("user", [3, -(2**60)], torch.randn(2, 3))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    found = imported(tmp_path / "model.pt", tmp_path / "run")
    (user,) = [name for name in found if "user" in name]
    assert found[user][0].tolist() == [-(2**60), 3]
    assert torch.equal(found[user][1], model.rows("user").values)


@pytest.mark.parametrize("inner", ["state_dict", "model_state_dict", "model"])
def test_the_state_dict_of_a_training_script(tmp_path: Path, inner: str) -> None:
    state = {"e.weight": torch.randn(4, 2), "n": 3}
    torch.save({inner: state, "epoch": 3, "optimizer": {}}, tmp_path / "a.pth")
    assert [*imported(tmp_path / "a.pth", tmp_path / "run")] == ["e.weight"]


def test_the_old_format_of_torch(tmp_path: Path) -> None:
    weight = torch.randn(6, 2)
    torch.save({"e.weight": weight}, tmp_path / "a.bin", _use_new_zipfile_serialization=False)
    found = imported(tmp_path / "a.bin", tmp_path / "run")
    same(found, {"e.weight": (torch.arange(6), weight)})


def test_views_shared_and_negative_tensors(tmp_path: Path) -> None:
    base = torch.randn(6, 8)
    base[0, 0] = float("nan")
    state = {
        "turned.weight": base.T,
        "part.weight": base[1:5, 2:7:2],
        "tied.weight": base,
        "tied_too.weight": base,
        "wide.weight": base[:1].expand(5, 8),
        "negative.weight": torch._neg_view(base),
    }
    torch.save(state, tmp_path / "a.pt")
    found = imported(tmp_path / "a.pt", tmp_path / "run")
    expected = {n: (torch.arange(len(t)), t.resolve_neg().contiguous()) for n, t in state.items()}
    same(found, expected)


def test_which_tensors_are_tables(tmp_path: Path) -> None:
    state = {
        "e.weight": torch.randn(4, 2),
        "linear.weight": torch.randn(4, 2),
        "linear.bias": torch.randn(4),
        "weight": torch.randn(3, 1),
        "rows": torch.randn(4, 2),
        "attention.in_proj_weight": torch.randn(4, 2),
        "ints.weight": torch.ones(4, 2, dtype=torch.int32),
        "empty.weight": torch.empty(4, 0),
        "conv.weight": torch.randn(2, 2, 3, 3),
        "sparse.weight": torch.eye(3).to_sparse(),
    }
    path = tmp_path / "a.pt"
    torch.save(state, path)
    code, said = run("import", path, "--to", tmp_path / "run")
    assert code == 0 and [*about(tmp_path / "run")] == ["e.weight", "weight"]
    for told in ("is int32", "has 0 columns", "is 4-D", "no dense tensor", "not named like"):
        assert told in said
    taken = imported(path, tmp_path / "two", "--table", "rows", "--table", "linear.weight")
    assert [*taken] == ["rows", "linear.weight"]
    options = ("--table", "rows", "--rename", "rows=user.weight")
    assert [*imported(path, tmp_path / "three", *options)] == ["user.weight"]
    for name, why in (
        ("conv.weight", "is 4-D"),
        ("linear.bias", "is 1-D"),
        ("x", "has no table 'x'"),
    ):
        assert why in refused("import", path, "--to", tmp_path / "no", "--table", name)
    for rename, why in (
        ("rows=x", "'rows' is to be renamed, and is not taken"),
        ("e.weight=weight", "two tables would be named 'weight'"),
        ("e.weight=a\nb", "cannot name a table"),
        ("e.weight", "takes OLD=NEW"),
        ("e.weight=", "takes OLD=NEW"),
    ):
        assert why in refused("import", path, "--to", tmp_path / "no", "--rename", rename)
    assert not (tmp_path / "no").exists()


def test_a_file_without_tables(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.ones(3), "b": torch.ones(2, 2)}, tmp_path / "a.pt")
    said = refused("import", tmp_path / "a.pt", "--to", tmp_path / "run")
    assert "has no table: 'b' is not named" in said and "--table takes one" in said
    torch.save({}, tmp_path / "b.pt")
    assert "has no table: it is empty." in refused(
        "import", tmp_path / "b.pt", "--to", tmp_path / "r"
    )


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


@pytest.mark.parametrize("kind", ["object", "module", "code", "list", "garbage", "cut", "empty"])
def test_files_that_are_none(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.pt"
    good = {"e.weight": torch.ones(100, 100)}
    match kind:
        case "object":
            torch.save({**good, "config": Path("x"), "h": Harmful()}, path)
        case "module":
            torch.save(Model(nn), path)
        case "code":
            torch.save(Harmful(), path)
        case "list":
            torch.save([torch.ones(2, 2)], path)
        case "garbage":
            path.write_bytes(b"garbage" * 100)
        case "cut":
            torch.save(good, path)
            path.write_bytes(path.read_bytes()[:20_000])
        case "empty":
            path.write_bytes(b"")
    said = refused("import", path, "--to", tmp_path / "run")
    why = {"list": "holds no state_dict", "cut": "is cut off", "empty": "a.pt is empty."}
    assert why.get(kind, "cannot be read by torch.load(weights_only=True)") in said
    assert "a.pt" in said
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


@pytest.mark.parametrize("kind", ["garbage", "cut", "empty", "header"])
def test_safetensors_files_that_are_none(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"e.weight": torch.ones(100, 100)}, path)
    raw = path.read_bytes()
    files = {
        "garbage": b"garbage" * 9,
        "cut": raw[:9000],
        "empty": b"",
        "header": b"\xff" * 8 + raw[8:],
    }
    path.write_bytes(files[kind])
    said = refused("import", path, "--to", tmp_path / "run")
    assert "a.safetensors is no safetensors file that can be read" in said
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_other_types_of_safetensors_are_left(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn),
        "b.weight": torch.ones(2, 2).long(),
        "c.weight": torch.randn(2, 2),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    code, said = run("import", tmp_path / "a.safetensors", "--to", tmp_path / "run")
    assert code == 0 and "is F8_E4M3" in said and "is int64" in said
    assert [*about(tmp_path / "run")] == ["c.weight"]


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        (torch.tensor([1, 2]), "has 3 rows and 2 ids"),
        (torch.tensor([1.0, 2.0, 3.0]), "no integers in one dimension"),
        (torch.tensor([[1], [2], [3]]), "no integers in one dimension"),
        (torch.tensor([4, 9, 4]), "has the id 4 twice"),
    ],
)
def test_ids_that_are_none(tmp_path: Path, ids: torch.Tensor, why: str) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"user": torch.randn(3, 2), "user.ids": ids}, path)
    said = refused("import", path, "--to", tmp_path / "run")
    assert "a.safetensors: " in said and "'user'" in said and why in said
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("name", ["int8", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_ids_of_any_integers(tmp_path: Path, name: str) -> None:
    most = np.iinfo(name).max
    array = np.array([most, 0, 3], name)
    state = {"user": torch.randn(3, 2), "user.ids": torch.from_numpy(array)}
    torch.save(state, tmp_path / "a.pt")
    save_file(state, tmp_path / "a.safetensors")
    for path in ("a.pt", "a.safetensors"):
        ids = imported(tmp_path / path, tmp_path / f"{path}.run")["user"][0]
        assert ids.tolist() == np.sort(array.astype(np.int64)).tolist()
        assert -1 in ids if name == "uint64" else most in ids


names = st.text(st.characters(categories=("L", "N"), include_characters="._- "), min_size=1).filter(
    lambda name: not name.endswith((".ids", ".key")) and name != "__metadata__"
)


@given(
    st.dictionaries(
        names, st.tuples(st.integers(1, 9), st.integers(1, 9), st.booleans()), max_size=4
    ),
    st.sampled_from(DTYPES),
)
def test_any_tables_there_and_back(
    tmp_path_factory: pytest.TempPathFactory, shapes: dict[str, Any], dtype: torch.dtype
) -> None:
    from hotbed.formats import READERS, WRITERS
    from hotbed.formats.tables import Hints
    from hotbed.formats.writing import tables_in

    folder = tmp_path_factory.mktemp("any")
    given_ = {
        name: (torch.randperm(n) if static else torch.randint(-(2**63), 2**63 - 1, (n,)).unique())
        for name, (n, _, static) in shapes.items()
    }
    rows = {name: torch.randn(len(ids), shapes[name][1]).to(dtype) for name, ids in given_.items()}
    static = {name: n for name, (n, _, static) in shapes.items() if static}
    path = hb.checkpoint.write(folder, {n: [(given_[n], rows[n])] for n in shapes}, rows=static)
    for format_ in ("torch", "safetensors"):
        WRITERS[format_].write(str(folder / format_), tables_in(path).tables)
        found = READERS[format_].read(str(folder / format_), Hints()).tables
        assert {t.name: t.rows for t in found} == {n: static.get(n) for n in shapes}
        for table in found:
            ids, weights = (torch.cat(parts) for parts in zip(*table.chunks(), strict=True))
            own = given_[table.name]
            assert torch.equal(ids.sort().values, own.sort().values)
            assert torch.equal(weights[ids.argsort()], rows[table.name][own.argsort()])


def test_a_table_named_as_the_metadata_of_safetensors(tmp_path: Path) -> None:
    from hotbed.formats import WRITERS
    from hotbed.formats.writing import tables_in

    path = hb.checkpoint.write(
        tmp_path / "run", {"__metadata__": [(torch.tensor([7]), torch.ones(1, 2))]}
    )
    with pytest.raises(
        hb.HotbedError, match="cannot hold a table .__metadata__.,.*another --format"
    ):
        WRITERS["safetensors"].write(str(tmp_path / "to"), tables_in(path).tables)
    assert not (tmp_path / "to").exists()
    WRITERS["torch"].write(str(tmp_path / "to.pt"), tables_in(path).tables)
    assert [*imported(tmp_path / "to.pt", tmp_path / "back")] == ["__metadata__"]


def test_a_table_comes_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("formats.tables", "checkpoint.rows"):
        monkeypatch.setattr(f"hotbed.{module}.FILE_BYTES", 100)
    weight = torch.randn(50, 4)
    torch.save({"e.weight": weight}, tmp_path / "a.pt")
    same(imported(tmp_path / "a.pt", tmp_path / "run"), {"e.weight": (torch.arange(50), weight)})
    (step,) = (tmp_path / "run").iterdir()
    assert len(json.loads((step / "checkpoint.json").read_text())["files"]) == 8
    assert len(list(hb.checkpoint.read(tmp_path / "run", "e.weight"))) == 7


def test_links_to_a_file_are_followed(tmp_path: Path) -> None:
    torch.save(OrderedDict({"e.weight": torch.ones(2, 2)}), tmp_path / "blob")
    (tmp_path / "model.pt").symlink_to(tmp_path / "blob")
    assert [*imported(tmp_path / "model.pt", tmp_path / "run")] == ["e.weight"]
    os.mkfifo(tmp_path / "pipe.pt")
    assert "is no plain file" in refused("import", tmp_path / "pipe.pt", "--to", tmp_path / "no")
    assert [*tables_in(tmp_path / "run")] == ["e.weight"]


def test_a_tensor_that_repeats_itself_without_end_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"e.weight": torch.randn(1, 1).expand(10**9, 64)}, path)
    assert path.stat().st_size < 3000
    said = refused("import", path, "--to", tmp_path / "run")
    assert "'e.weight' repeats" in said and "to 256,000,000,000" in said
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


def test_tables_that_no_disk_holds_are_refused_before_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"e.weight": torch.ones(10, 4)}, tmp_path / "a.pt")
    monkeypatch.setattr(LocalStore, "free_bytes", lambda self, path: 239)
    said = refused("import", tmp_path / "a.pt", "--to", tmp_path / "new" / "run")
    assert "run would have 240 bytes, and 239 are free there" in said
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


def test_a_compressed_archive_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", bytes(1 << 24))
    assert path.stat().st_size < 1 << 16
    said = refused("import", path, "--to", tmp_path / "run")
    assert "a.pt cannot be read" in said and "compressed archive" in said


def refused_to_map(path: Path) -> str:
    """What an import says in a process that may map no file of that size."""
    small = path.with_name(f"small{path.suffix}")
    run("import", small, "--to", path.parent / "first")  # loads whatever it needs
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + path.stat().st_size // 2, -1))
    code, said = run("import", path, "--to", path.parent / "second")
    assert code == 2
    return said


@pytest.mark.process
@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_a_file_that_cannot_be_mapped(tmp_path: Path, ending: str) -> None:
    save = save_file if ending == ".safetensors" else torch.save
    for name, rows in (("small", 1), ("large", 1 << 18)):
        save({"user.weight": torch.zeros(rows, 128)}, tmp_path / f"{name}{ending}")
    path = tmp_path / f"large{ending}"
    said = in_a_copy(refused_to_map, path)
    assert f"has {path.stat().st_size:,} bytes, and the system maps no file of that size" in said
