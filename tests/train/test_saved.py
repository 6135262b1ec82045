import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import hotbed as hb
from hotbed.data import CATEGORIES, synthetic_clicks
from hotbed.models import DLRM, WideDeep
from hotbed.train import saved
from hotbed.train.report import OutputError
from hotbed.train.saved import (
    SavedModelError,
    check_writable_folder,
    load_model,
    save_model,
    stored_rows,
)


def trained(kind=DLRM, tables=CATEGORIES, **options):
    """A model whose tables have met some ids, with rows that are not first values."""
    torch.manual_seed(5)
    model = kind(tables, dim=4, **options)
    model(next(iter(synthetic_clicks(100, 100))))
    for name in model.embeddings.tables:
        ids = model.embeddings.rows(name).ids
        width = model.embeddings.tables[name].dim
        model.embeddings.assign(name, ids, torch.randn(len(ids), width))
    return model.eval()


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
    assert sorted(os.listdir(tmp_path / "m")) == [
        "dense.safetensors",
        "model.json",
        "tables.safetensors",
    ]
    assert os.listdir(tmp_path) == ["m"]
    modes = {os.stat(tmp_path / "m" / name).st_mode for name in os.listdir(tmp_path / "m")}
    assert len(modes) == 1


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


def test_a_saved_model_is_replaced_and_nothing_else(tmp_path):
    path = str(tmp_path / "new" / "m")
    check_writable_folder(path)
    model = trained()
    save_model(model, path)
    check_writable_folder(path)
    with torch.no_grad():
        model.top.layers[0].bias.fill_(3)
    save_model(model, path)
    assert load_model(path).top.layers[0].bias[0] == 3
    (tmp_path / "other").mkdir()
    check_writable_folder(str(tmp_path / "other"))
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="the folder holds other files"):
        check_writable_folder(str(tmp_path / "other"))
    with pytest.raises(OutputError, match="it is a file"):
        check_writable_folder(str(tmp_path / "other" / "notes.txt"))
    with pytest.raises(OutputError, match="Not a directory"):
        check_writable_folder(str(tmp_path / "other" / "notes.txt" / "m"))


def test_other_models_are_refused(tmp_path):
    with pytest.raises(SavedModelError, match="Linear is not one of hotbed.models"):
        save_model(torch.nn.Linear(1, 1), str(tmp_path / "m"))

    class Own:
        def resolve(self, rows, dim):
            return hb.init.Zeros().resolve(rows, dim)

    with pytest.raises(SavedModelError, match="cannot be saved. Use .*initializers"):
        save_model(DLRM([hb.Table("a", 16, init=Own())]), str(tmp_path / "m"))
    assert os.listdir(tmp_path) == []


def edit(change):
    def damage(path):
        manifest = json.loads((path / "model.json").read_text())
        change(manifest)
        (path / "model.json").write_text(json.dumps(manifest))

    return damage


def shorten(path):
    data = (path / "tables.safetensors").read_bytes()
    (path / "tables.safetensors").write_bytes(data[:-5])


def drop_rows(path):
    tensors = load_file(path / "tables.safetensors")
    tensors["embeddings.C1"] = tensors["embeddings.C1"][:-1]
    save_file(tensors, path / "tables.safetensors")


def drop_layer(path):
    tensors = load_file(path / "dense.safetensors")
    tensors.pop("top.layers.0.bias")
    save_file(tensors, path / "dense.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "model.json").unlink(), "model.json is missing"),
        (lambda path: (path / "dense.safetensors").unlink(), "dense.safetensors.* is missing"),
        (lambda path: (path / "model.json").write_text("{"), "cannot be loaded"),
        (lambda path: (path / "model.json").write_text("[]"), "model.json is not what"),
        (edit(lambda m: m.pop("format")), "model.json is not what `hotbed train --save` writes"),
        (lambda path: (path / "model.json").write_bytes(b"\xff\xfe\x00"), "cannot be loaded"),
        (edit(lambda m: m.update(format=2)), "format 2; this version reads 1"),
        (edit(lambda m: m.update(model="os.system")), "the model 'os.system' is unknown"),
        (edit(lambda m: m["arguments"].update(depth=3)), "unexpected keyword argument 'depth'"),
        (edit(lambda m: m["arguments"].update(dim=8)), "cannot be loaded: .*8"),
        (edit(lambda m: m["arguments"]["tables"][0].update(dtype="load")), "cannot be loaded"),
        (
            edit(lambda m: m["arguments"]["tables"][0]["init"].update(kind="table_key2")),
            "the initializer 'table_key2' is unknown",
        ),
        (shorten, "cannot be loaded"),
        (drop_rows, r"Table 'C1': .* has \d+ rows and \d+ ids"),
        (drop_layer, "Missing key.*top.layers.0.bias"),
    ],
)
def test_a_damaged_model_is_an_error_that_names_it(tmp_path, damage, message):
    path = tmp_path / "m"
    save_model(trained(), str(path))
    damage(path)
    with pytest.raises(SavedModelError, match=f"(?s)m.*{message}"):
        load_model(str(path))


def bias_of(path):
    return float(load_model(str(path)).top.layers[0].bias[0].detach())


def with_bias(value):
    model = trained()
    with torch.no_grad():
        model.top.layers[0].bias.fill_(value)
    return model


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("linked", [True, False])
def test_a_model_is_replaced_at_one_stroke(tmp_path, monkeypatch, exchange, linked):
    if not exchange:  # as on file systems that cannot
        monkeypatch.setattr(saved, "_exchange", lambda one, other: False)
    save_model(with_bias(1), str(tmp_path / "m"))
    path = tmp_path / "m"
    if linked:
        path = tmp_path / "link"
        path.symlink_to(tmp_path / "m")
    save_model(with_bias(2), str(path))
    assert bias_of(tmp_path / "m") == 2 == bias_of(path)
    assert sorted(os.listdir(tmp_path)) == (["link", "m"] if linked else ["m"])


@pytest.mark.parametrize("file", ["dense.safetensors", "tables.safetensors"])
@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left on device")],
)
def test_a_full_disk_costs_nothing_that_was_there(tmp_path, monkeypatch, file, error):
    path = tmp_path / "m"
    save_model(with_bias(1), str(path))

    def full(tensors, name):
        if name.endswith(file):
            raise error
        save_file(tensors, name)

    monkeypatch.setattr(saved, "save_file", full)
    with pytest.raises(OutputError, match="Cannot save to '.*m': .*No space left on device"):
        save_model(with_bias(2), str(path))
    assert os.listdir(tmp_path) == ["m"] and bias_of(path) == 1


KILLED = """
import os, sys, torch
from hotbed.models import DLRM
from hotbed.train import saved
name = sys.argv[2]
plain = getattr(saved, name)
def killed(*arguments):
    if sys.argv[3] == "after":
        plain(*arguments)
    os._exit(9)
setattr(saved, name, killed)
model = saved.load_model(sys.argv[1])
with torch.no_grad():
    model.top.layers[0].bias.fill_(2)
saved.save_model(model, sys.argv[1])
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("step", "when", "left"),
    [("save_file", "after", 1), ("_put_in_place", "before", 1), ("_exchange", "after", 2)],
)
def test_a_process_killed_while_saving_leaves_one_of_the_two(tmp_path, step, when, left):
    path = tmp_path / "m"
    save_model(with_bias(1), str(path))
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), step, when])
    assert done.returncode == 9
    assert bias_of(path) == left and len(os.listdir(tmp_path)) == 2  # the rest of the other one
    check_writable_folder(str(path))
    save_model(with_bias(3), str(path))
    assert bias_of(path) == 3 and os.listdir(tmp_path) == ["m"]


def test_no_folder(tmp_path):
    with pytest.raises(SavedModelError, match="There is no folder '.*nowhere'"):
        load_model(str(tmp_path / "nowhere"))
