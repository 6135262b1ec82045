"""Models made of a schema, trained on its files, saved and made again with it."""

from typing import Any

import pytest
import torch

import hotbed as hb
from hotbed.data import Id, Ids, Label, Number, Schema, Sequence

LINES = """clicked,bought,price,user,item,genres,seen
1,0,3.5,anna,x1,crime|poetry,x2|x3
0,1,,ben,x2,,
1,,10,anna,x3,travel,x1
0,0,2,zoe,x1,crime,x3|x2|x1
"""


def schema_of(*labels, sequence=False):
    columns = {name: Label() for name in labels}
    columns |= {"price": Number("log"), "user": Id(), "item": Id(), "genres": Ids()}
    return Schema(columns | ({"seen": Sequence(length=2, table="item")} if sequence else {}))


@pytest.fixture
def path(tmp_path):
    (tmp_path / "clicks.csv").write_text(LINES)
    return tmp_path / "clicks.csv"


@pytest.mark.parametrize("kind", ["dlrm", "deepfm", "dcn", "pnn", "autoint", "final-mlp"])
def test_a_model_fits_its_schema(kind, path, tmp_path):
    schema = schema_of("clicked")
    torch.manual_seed(0)
    known: Any = hb.models.MODELS[kind]
    model = known.from_schema(schema, dim=4, seed=0)
    batches = hb.data.open(path, schema, batch_size=3)
    optimizer = hb.optim.Adam(model.parameters(), lr=0.01)
    result = hb.train.fit(model, batches, optimizer, epochs=2)
    assert result.rows == 8
    hb.save(tmp_path / "run", model, optimizer, step=result.steps)
    again = hb.checkpoint.load_model(tmp_path / "run")
    assert again.schema == schema and again.config == model.config
    for batch in hb.data.open(path, again.schema, batch_size=4):
        assert torch.equal(again(batch), model.eval()(batch))
    assert model.embeddings.contains("user", hb.data.hash_ids(["anna", "bob"])).tolist() == [1, 0]


def test_tasks_follow_from_the_labels(path):
    schema = schema_of("clicked", "bought")
    model = hb.models.MMoE.from_schema(schema, dim=4)
    (batch,) = hb.data.open(path, schema, batch_size=4)
    assert model(batch).shape == batch["label"].shape == (4, 2)
    assert hb.models.MMoE.from_schema(schema_of("clicked"), dim=4)(batch).shape == (4,)


def test_histories_follow_from_the_sequences(path, tmp_path):
    schema = schema_of("clicked", sequence=True)
    model = hb.models.DIN.from_schema(schema, dim=4, activation="relu", seed=0)
    assert (model.settings.target, model.settings.history) == (("item",), ("seen",))
    (batch,) = hb.data.open(path, schema, batch_size=4)
    logits = model(batch)
    assert logits.shape == (4,)
    hb.save(tmp_path / "run", model, step=0)
    assert torch.equal(hb.checkpoint.load_model(tmp_path / "run")(batch), model.eval()(batch))
    with pytest.raises(hb.TableError, match="DeepFM: feature 'seen' is a sequence"):
        hb.models.DeepFM.from_schema(schema)
    alone = Schema({"seen": Sequence(length=2), "user": Id()})
    with pytest.raises(hb.TableError, match="sequence 'seen' needs one feature of the candidate"):
        hb.models.DIN.from_schema(alone)


def test_settings_that_are_none():
    with pytest.raises(TypeError, match="DeepFM: there is no setting 'widths'"):
        hb.models.DeepFM.from_schema(schema_of("clicked"), widths=[3])
