"""Models of users beside those of `hotbed.models`, and settings as objects."""

import dataclasses
import inspect

import pytest
import torch

import hotbed as hb
from hotbed.models import DCN, MODELS, ClickModel, DCNSettings, ModelSettings, register


@dataclasses.dataclass(frozen=True)
class MineSettings(ModelSettings):
    scale: float = 2.0
    widths: tuple[int, ...] = (3,)


@pytest.fixture
def mine():
    @register("mine-of-tests")
    class Mine(ClickModel):
        Settings = MineSettings
        settings: MineSettings

        def make_layers(self):
            self.top = hb.nn.MLP(self.width, [*self.settings.widths, 1])

        def forward(self, batch):
            vectors, _ = self.look_up(batch)
            return self.settings.scale * self.top(self.side_by_side(batch, vectors)).squeeze(1)

    yield Mine
    del MODELS["mine-of-tests"]


def test_a_model_of_a_user_is_saved_and_made_again(mine, tmp_path):
    model = mine(["a", hb.Table("b", 4, rows=9)], 4, 1, scale=3.0, widths=[5], seed=1)
    batch = {"a": torch.tensor([1, 2]), "b": torch.tensor([3, 4]), "dense": torch.ones(2, 1)}
    model(batch)
    hb.save(tmp_path, model, step=0)
    again = hb.checkpoint.load_model(tmp_path)
    assert type(again) is mine and again.settings == MineSettings(4, 1, 3.0, (5,))
    assert torch.equal(again(batch), model.eval()(batch))


def test_a_module_of_its_own_needs_config(tmp_path):
    @register("plain-of-tests")
    class Plain(torch.nn.Module):
        def __init__(self, tables, *, bias=True, seed=None, storage=None, device=None):
            super().__init__()
            self.config = {"tables": list(tables), "bias": bias}
            self.embeddings = hb.EmbeddingCollection(tables, seed=seed, storage=storage)
            self.top = torch.nn.Linear(4, 1, bias=bias)

        def forward(self, batch):
            return self.top(self.embeddings({"a": batch["a"]})["a"]).squeeze(1)

    try:
        model = Plain([hb.Table("a", 4)], bias=False)
        batch = {"a": torch.tensor([1, 2])}
        model(batch)
        hb.save(tmp_path, model, step=0)
        again = hb.checkpoint.load_model(tmp_path)
        assert again.top.bias is None
        assert torch.equal(again(batch), model.eval()(batch))
    finally:
        del MODELS["plain-of-tests"]


def test_a_checkpoint_of_a_model_that_is_not_registered_says_so(mine, tmp_path):
    hb.save(tmp_path, mine(["a"], 4, 1), step=0)
    kind = MODELS.pop("mine-of-tests")
    with pytest.raises(
        hb.checkpoint.CheckpointError, match="'mine-of-tests' is unknown.*hb.models.register"
    ):
        hb.checkpoint.load_model(tmp_path)
    MODELS["mine-of-tests"] = kind


def test_a_name_is_that_of_one_class(mine):
    assert register("mine-of-tests")(mine) is mine
    with pytest.raises(
        hb.TableError, match=r"register\('mine-of-tests'\): the name is that of .*Mine"
    ):
        register("mine-of-tests")(DCN)
    with pytest.raises(hb.TableError, match=r"'dcn'\): the name is that of hotbed.models.dcn.DCN"):
        register("dcn")(mine)


def test_settings_as_an_object_and_by_name():
    settings = DCNSettings(dim=4, num_dense=1, layers=2)
    one, other = DCN(["a"], settings, hidden=[5]), DCN(["a"], 4, 1, [5], layers=2)
    assert one.settings == other.settings == DCNSettings(4, 1, (5,), 0.0, 2)
    assert one.config == {"tables": one.described, **dataclasses.asdict(one.settings)}
    with pytest.raises(
        TypeError, match="DCN: there is no setting 'laters'; there are dim, num_dense"
    ):
        DCN(["a"], laters=3)
    with pytest.raises(TypeError, match="DCN: there is no setting 'laters'"):
        DCN(["a"], settings, laters=3)


@pytest.mark.parametrize("kind", [*MODELS.values()])
def test_a_signature_shows_the_settings(kind):
    parameters = inspect.signature(kind).parameters
    fields = {field.name: field.default for field in dataclasses.fields(kind.Settings)}
    assert {*parameters} == {"tables", *fields, "features", "seed", "storage", "device"}
    assert {name: parameters[name].default for name in fields} == fields


def test_features_that_share_a_table():
    model = hb.models.DeepFM(
        ["page", "user"], 4, 1, features={"from": "page", "to": "page", "user": "user"}
    )
    batch = {name: torch.tensor([1, 2]) for name in ("from", "to", "user")}
    batch["dense"] = torch.zeros(2, 1)
    assert model(batch).shape == (2,)
    assert sorted(model.embeddings.tables) == ["page", "page.wide", "user", "user.wide"]
    vectors, _ = model.look_up(batch)
    assert torch.equal(vectors[0], vectors[1])
    assert model.config["features"] == {"from": "page", "to": "page", "user": "user"}
