"""Models that are made again from their checkpoints."""

import json
from pathlib import Path

import pytest
import torch
from checkpoint.saved_models import DENSE, ROWS, replace_file, rewrite, saved, trained, with_bias
from kept_in import PLACES, step, storage_of
from safetensors.torch import load_file, save

import hotbed as hb
from hotbed.checkpoint import CheckpointError, load_model, rows
from hotbed.data import synthetic_clicks
from hotbed.models import DLRM, WideDeep


@pytest.mark.parametrize("kind", [DLRM, WideDeep])
def test_round_trip(tmp_path, kind):
    model = trained(kind)
    saved(tmp_path, model)
    torch.manual_seed(99)
    loaded = load_model(tmp_path)
    assert type(loaded) is kind and not loaded.training
    # Rows 100 and on hold ids that training never met: they need the table key.
    batch = next(iter(synthetic_clicks(300, 300)))
    assert torch.equal(loaded(batch), model(batch))
    assert loaded.embeddings.count() == model.embeddings.count() > 1000


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
    saved(tmp_path, model)
    loaded = load_model(tmp_path)
    assert loaded.embeddings.tables == model.embeddings.tables
    assert torch.equal(loaded(batch), expected)


def test_other_models_are_made_by_their_user(tmp_path):
    saved(tmp_path / "linear", torch.nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match="of a model that is none of hotbed.models .*hb|hotb"):
        load_model(tmp_path / "linear")

    class Own:
        def resolve(self, rows, dim):
            return hb.init.Zeros().resolve(rows, dim)

    model = DLRM([hb.Table("a", 16, init=Own())])
    saved(tmp_path / "own", model)
    with pytest.raises(CheckpointError, match=r"'a' starts from an initializer that is none of"):
        load_model(tmp_path / "own")
    assert hb.load(tmp_path / "own", model).step == 0


def test_the_generator_is_not_drawn_from_for_shapes(tmp_path):
    """Loading draws what making the model draws, and no more."""
    saved(tmp_path, with_bias(1))
    arguments = dict(dim=4, num_dense=1, bottom=[64, 4], top=[3])
    torch.manual_seed(3)
    DLRM(["a", "b"], **arguments)
    expected = torch.rand(1)
    torch.manual_seed(3)
    load_model(tmp_path)
    assert torch.equal(torch.rand(1), expected)


def of_model(change):
    return lambda folder: rewrite(folder, lambda manifest: change(manifest["model"]))


def argument(**arguments):
    return of_model(lambda model: model["arguments"].update(arguments))


def of_table(**fields):
    return of_model(lambda model: model["arguments"]["tables"][0].update(fields))


def tensors(name, change):
    """A file of tensors that somebody else wrote, its checksums right."""

    def damage(folder):
        held = load_file(folder / name)
        change(held)
        replace_file(folder, name, save(held))

    return damage


BIAS = "model.top.layers.0.bias"
NESTED = "[" * 500 + "]" * 500
NONE = r"checkpoint.json tells of no model"
CANNOT = "checkpoint.json tells of a model that cannot be made"

HOSTILE = {
    "no model": (lambda f: rewrite(f, lambda m: m.pop("model")), "none of hotbed.models"),
    "an unknown model": (
        of_model(lambda m: m.update(name="os.system")),
        "the model 'os.system' is",
    ),
    "a model that is no name": (of_model(lambda m: m.update(name=["dlrm"])), NONE),
    "no arguments": (of_model(lambda m: m.pop("arguments")), NONE),
    "a schema that is none": (of_model(lambda m: m.update(schema={"columns": {"a": "x"}})), CANNOT),
    "a schema in a list": (of_model(lambda m: m.update(schema=[1])), CANNOT),
    "arguments in a list": (of_model(lambda m: m.update(arguments=[])), NONE),
    "an unknown argument": (argument(depth=3), "json: the argument 'depth' is unknown"),
    "a device": (argument(device="cuda"), "json: the argument 'device' is unknown"),
    "a storage": (argument(storage={"ssd": "/"}), "json: the argument 'storage' is unknown"),
    "another width": (argument(dim=8), f"{CANNOT}: .*8"),
    "a width that is text": (argument(dim="4"), CANNOT),
    "no tables": (argument(tables=None), NONE),
    "tables by name": (argument(tables=["a"]), CANNOT),
    "deep arguments": (argument(top=json.loads(NESTED)), CANNOT),
    "a dtype that is a function": (of_table(dtype="load"), CANNOT),
    "a dtype that is a number": (of_table(dtype=7), CANNOT),
    "an initializer that is a list": (of_table(init=[]), CANNOT),
    "a function for an initializer": (
        of_table(init={"kind": "table_key2"}),
        f"{CANNOT}: .*'table_key2'.* is unknown",
    ),
    "a type for an initializer": (of_table(init={"kind": "Kind", "value": 1}), CANNOT),
    "400 TB of dense layers": (argument(top=[10**7, 10**7]), "dense.safe.* 'top.layers.0.bias'"),
    "40 TB of rows": (of_table(rows=10**12), "json: its tables have 16,000,000,000,000 bytes"),
    "more rows than ids": (
        tensors(ROWS, lambda held: held.update({"embeddings.a/weights": torch.zeros(9, 4)})),
        rf"{ROWS} has no weights of 'embeddings.a'",
    ),
    "rows of another width": (
        tensors(ROWS, lambda held: held.update({"embeddings.a/weights": torch.zeros(2, 5)})),
        rf"{ROWS} has no weights of 'embeddings.a' as its manifest says",
    ),
    "a layer less": (tensors(DENSE, lambda held: held.pop(BIAS)), CANNOT),
    "a layer of another dtype": (
        tensors(DENSE, lambda held: held.update({BIAS: held[BIAS].half()})),
        rf"{DENSE}: the tensor 'top.layers.0.bias' is float16 \(3,\), and .* float32",
    ),
    "a layer of another shape": (
        tensors(DENSE, lambda held: held.update({BIAS: torch.zeros(4)})),
        rf"{DENSE}: the tensor 'top.layers.0.bias' is float32 \(4,\), and .* \(3,\)",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_model_that_somebody_else_wrote_is_checked(tmp_path, what):
    damage, message = HOSTILE[what]
    damage(saved(tmp_path, with_bias(1)))
    with pytest.raises(CheckpointError, match=f"(?s)step-000000000000/.*{message}"):
        load_model(tmp_path)


def test_a_model_that_is_there_is_compared_with_what_somebody_else_wrote(tmp_path):
    damage, message = HOSTILE["a schema that is none"]
    damage(saved(tmp_path, with_bias(1)))
    model = with_bias(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=f"(?s)step-000000000000/.*{message}"):
        hb.load(tmp_path, model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("untouched", ["lazy", "exact"])
@pytest.mark.parametrize("into", PLACES)
@pytest.mark.parametrize("of", PLACES)
def test_rows_go_from_any_place_into_any(tmp_path, of, into, untouched, monkeypatch):
    """Static tables in tiers save what was touched, and the key of the rest."""
    monkeypatch.setattr(rows, "FILE_BYTES", 10_000)
    tables = [hb.Table("a", dim=48, rows=400), hb.Table("b", dim=48)]
    model = DLRM(tables, dim=48, num_dense=1, storage=storage_of(of, tmp_path / "of"), seed=3)
    optimizer = hb.optim.AdamW(
        model.embeddings.parameters(), lr=0.1, weight_decay=0.1, untouched=untouched
    )
    for number in range(9):
        chance = torch.Generator().manual_seed(number)
        ids = torch.randint(0, 300, (40,), generator=chance)
        step(model.embeddings, optimizer, {"a": ids, "b": ids * 10**9})
    assert len([*Path(hb.save(tmp_path / "m", model, step=9).path).iterdir()]) == 4
    other = load_model(tmp_path / "m", storage=storage_of(into, tmp_path / "into"))
    for name in ("a", "b"):
        assert all(map(torch.equal, other.embeddings.rows(name), model.embeddings.rows(name)))
    fresh = torch.tensor([123, -7])  # a row that there is not begins as it would have
    if untouched == "lazy":
        assert torch.equal(other.embeddings.lookup("b", fresh), model.embeddings.lookup("b", fresh))
    hb.save(tmp_path / "m", other, step=10)
    again = load_model(tmp_path / "m")
    assert torch.equal(again.embeddings.rows("a").values, model.embeddings.rows("a").values)
