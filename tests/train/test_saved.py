import json
import os

import pytest
import torch
from kept_in import PLACES, step, storage_of
from safetensors.torch import load_file, save
from saved_models import data_files, replace_file, seal, trained, with_bias

import hotbed as hb
from hotbed.checkpoint.files import CheckpointError
from hotbed.data import synthetic_clicks
from hotbed.models import DLRM, WideDeep
from hotbed.train import saved
from hotbed.train.saved import load_model, save_model, stored_rows


@pytest.mark.parametrize("kind", [DLRM, WideDeep])
def test_round_trip(tmp_path, kind):
    model = trained(kind)
    save_model(model, str(tmp_path / "m"))
    torch.manual_seed(99)
    loaded = load_model(str(tmp_path / "m"))
    assert type(loaded) is kind and not loaded.training
    # Rows 100 and on hold ids that training never met: they need the table key.
    batch = next(iter(synthetic_clicks(300, 300)))
    assert torch.equal(loaded(batch), model(batch))
    assert stored_rows(loaded) == stored_rows(model) > 1000


def test_described_tables_round_trip(tmp_path):
    tables = [
        hb.Table("a", 4, rows=9, combiner="mean", init=hb.init.XavierUniform(2.0), padding_idx=3),
        hb.Table("b/ä", 4, dtype=torch.bfloat16, init=hb.init.TruncatedNormal(0, 1, -1, 0.5)),
        hb.Table("c", 4, dtype=torch.float16, combiner="max"),
    ]
    model = DLRM(tables, dim=4, num_dense=1, top=[3], seed=7).train()
    batch = {"a": torch.tensor([0, 8]), "b/ä": torch.tensor([-1, 2**63 - 1])}
    batch |= {"c": torch.tensor([5, 5]), "dense": torch.ones(2, 1)}
    expected = model(batch)
    save_model(model, str(tmp_path / "m"))
    loaded = load_model(str(tmp_path / "m"))
    assert loaded.embeddings.tables == model.embeddings.tables
    assert torch.equal(loaded(batch), expected)


def test_other_models_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="Linear is not one of hotbed.models"):
        save_model(torch.nn.Linear(1, 1), str(tmp_path / "m"))

    class Own:
        def resolve(self, rows, dim):
            return hb.init.Zeros().resolve(rows, dim)

    with pytest.raises(CheckpointError, match="cannot be saved. Use .*initializers"):
        save_model(DLRM([hb.Table("a", 16, init=Own())]), str(tmp_path / "m"))
    assert os.listdir(tmp_path) == []


def test_the_generator_is_not_drawn_from_for_shapes(tmp_path):
    """Loading draws what making the model draws, and no more."""
    save_model(with_bias(1), str(tmp_path / "m"))
    arguments = dict(dim=4, num_dense=1, bottom=[64, 4], top=[3])
    torch.manual_seed(3)
    DLRM(["a", "b"], **arguments)
    expected = torch.rand(1)
    torch.manual_seed(3)
    load_model(str(tmp_path / "m"))
    assert torch.equal(torch.rand(1), expected)


def edit(change):
    """A manifest that somebody else wrote, its checksum right."""

    def damage(path):
        manifest = json.loads((path / "model.json").read_text())
        change(manifest)
        seal(path / "model.json", manifest)

    return damage


def argument(**arguments):
    return edit(lambda manifest: manifest["arguments"].update(arguments))


def of_table(**fields):
    return edit(lambda manifest: manifest["arguments"]["tables"][0].update(fields))


def tensors(part, change):
    """A file of tensors that somebody else wrote, its checksums right."""

    def damage(path):
        held = load_file(data_files(path)[("dense", "tables").index(part)])
        change(held)
        replace_file(path, part, save(held))

    return damage


BIAS = "top.layers.0.bias"
NESTED = "[" * 500 + "]" * 500

HOSTILE = {
    "an unknown model": (edit(lambda m: m.update(model="os.system")), "model.json: the model 'os"),
    "a model that is no name": (edit(lambda m: m.update(model=["dlrm"])), "model.json is not what"),
    "no arguments": (edit(lambda m: m.pop("arguments")), "model.json is not what"),
    "arguments in a list": (edit(lambda m: m.update(arguments=[])), "model.json is not what"),
    "an unknown argument": (argument(depth=3), "model.json: the argument 'depth' is unknown"),
    "a device": (argument(device="cuda"), "model.json: the argument 'device' is unknown"),
    "a storage": (argument(storage={"ssd": "/"}), "model.json: the argument 'storage' is unknown"),
    "another width": (argument(dim=8), "model.json cannot be loaded: .*8"),
    "a width that is text": (argument(dim="4"), "model.json cannot be loaded"),
    "no tables": (argument(tables=None), "model.json: the argument 'tables' is no list"),
    "tables by name": (argument(tables=["a"]), "model.json: the argument 'tables' is no list"),
    "deep arguments": (argument(top=json.loads(NESTED)), "model.json cannot be loaded"),
    "a dtype that is a function": (of_table(dtype="load"), "model.json cannot be loaded"),
    "a dtype that is a number": (of_table(dtype=7), "model.json cannot be loaded"),
    "an unknown kind": (of_table(kind="Tensor"), "the initializer 'Tensor' is unknown"),
    "a kind that is a list": (of_table(kind=[]), "model.json cannot be loaded"),
    "a function for an initializer": (
        edit(lambda m: m["arguments"]["tables"][0]["init"].update(kind="table_key2")),
        "the initializer 'table_key2' is unknown",
    ),
    "400 TB of dense layers": (argument(top=[10**7, 10**7]), r"dense.1.* 'top.layers.0.bias'"),
    "40 TB of rows": (of_table(rows=10**12), r"model.json: its tables have 16,000,000,000,000 byt"),
    "more rows than ids": (
        tensors("tables", lambda held: held.update({"embeddings.a": torch.zeros(9, 4)})),
        r"tables.1.*Table 'a': 2 ids need values of shape \(2, 4\), got \(9, 4\)",
    ),
    "rows of another width": (
        tensors("tables", lambda held: held.update({"embeddings.a": torch.zeros(2, 5)})),
        r"tables.1.*Table 'a'",
    ),
    "a layer less": (
        tensors("dense", lambda held: held.pop(BIAS)),
        rf"dense.1.*'{BIAS}' is missing, and in the model of .*model.json float32 \(3,\)",
    ),
    "a layer more": (
        tensors("dense", lambda held: held.update(more=torch.zeros(2))),
        r"dense.1.*'more' is float32 \(2,\), and in the model of .*model.json there is none",
    ),
    "a layer of another dtype": (
        tensors("dense", lambda held: held.update({BIAS: held[BIAS].half()})),
        rf"dense.1.*'{BIAS}' is float16 \(3,\), and .* float32",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_model_that_somebody_else_wrote_is_checked(tmp_path, what):
    damage, message = HOSTILE[what]
    path = tmp_path / "m"
    save_model(with_bias(1), str(path))
    damage(path)
    with pytest.raises(CheckpointError, match=f"(?s)m/.*{message}"):
        load_model(str(path))


def test_no_folder(tmp_path):
    with pytest.raises(CheckpointError, match="There is no folder '.*nowhere'"):
        load_model(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("untouched", ["lazy", "exact"])
@pytest.mark.parametrize("into", PLACES)
@pytest.mark.parametrize("of", PLACES)
def test_rows_go_from_any_place_into_any(tmp_path, of, into, untouched, monkeypatch):
    """Static tables in tiers save what was touched, and the key of the rest."""
    monkeypatch.setattr(saved, "_BYTES_OF_A_FILE", 10_000)
    tables = [hb.Table("a", dim=48, rows=400), hb.Table("b", dim=48)]
    model = DLRM(tables, dim=48, num_dense=1, storage=storage_of(of, tmp_path / "of"), seed=3)
    optimizer = hb.optim.AdamW(
        model.embeddings.parameters(), lr=0.1, weight_decay=0.1, untouched=untouched
    )
    for number in range(9):
        chance = torch.Generator().manual_seed(number)
        ids = torch.randint(0, 300, (40,), generator=chance)
        step(model.embeddings, optimizer, {"a": ids, "b": ids * 10**9})
    save_model(model, str(tmp_path / "m"))
    other = load_model(str(tmp_path / "m"), storage_of(into, tmp_path / "into"))
    for name in ("a", "b"):
        assert all(map(torch.equal, other.embeddings.rows(name), model.embeddings.rows(name)))
    fresh = torch.tensor([123, -7])  # a row that there is not begins as it would have
    if untouched == "lazy":
        assert torch.equal(other.embeddings.lookup("b", fresh), model.embeddings.lookup("b", fresh))
    save_model(other, str(tmp_path / "m"))
    again = load_model(str(tmp_path / "m"))
    assert torch.equal(again.embeddings.rows("a").values, model.embeddings.rows("a").values)
