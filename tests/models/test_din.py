"""DIN against its formula, sample by sample."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hotbed as hb
from hotbed.models import DIN

FEATURES = {"item": "item", "history": "item", "shop": "shop", "shops": "shop", "user": "user"}
PAIRS = {"target": ["item", "shop"], "history": ["history", "shops"]}


def tables(rows=None):
    sequence = {"combiner": None, "padding_idx": -1, "init": hb.init.Normal(std=0.5)}
    return [
        hb.Table("item", 4, rows, **sequence),
        hb.Table("shop", 4, rows, **sequence),
        hb.Table("user", 4),
    ]


def activated(unit, x):
    """An MLP with a sigmoid behind each inner layer."""
    *inner, last = unit.weight.layers
    for layer in inner:
        x = 1 / (1 + (-(layer.weight @ x + layer.bias)).exp())
    return last.weight @ x + last.bias


def plain(model, batch):
    """Logits of the batch, in which only the batch norms see more than a sample."""
    padding = model.padding["history"]
    columns = []
    for b in range(len(batch["user"])):
        parts = [batch["dense"][b]]
        for name, table in FEATURES.items():
            if name in model.interests:
                target = model.embeddings.lookup(table, batch[model.interests[name]][b : b + 1])[0]
                unit = model.attention[list(model.interests).index(name)]
                total = torch.zeros(4)
                for id_ in batch[name][b].tolist():
                    if id_ != padding:
                        item = model.embeddings.lookup(table, torch.tensor([id_]))[0]
                        seen = torch.cat([target, item, target - item, target * item])
                        total = total + activated(unit, seen) * item
                parts.append(total)
            else:
                parts.append(model.embeddings.lookup(table, batch[name][b : b + 1])[0])
        columns.append(torch.cat(parts))
    x = torch.stack(columns)
    for layer in model.deep:
        if isinstance(layer, torch.nn.Linear):
            x = x @ layer.weight.T + layer.bias
        elif isinstance(layer, hb.nn.Dice):
            mean, variance = x.mean(0), x.var(0, unbiased=False)
            gate = 1 / (1 + (-(x - mean) / (variance + layer.norm.eps).sqrt()).exp())
            x = gate * x + (1 - gate) * layer.alpha * x
        elif isinstance(layer, torch.nn.PReLU):
            x = torch.where(x > 0, x, layer.weight * x)
        else:
            x = x.clamp(min=0)
    return x[:, 0]


@given(
    samples=st.integers(3, 6),
    length=st.integers(1, 4),
    activation=st.sampled_from(["dice", "prelu", "relu"]),
    rows=st.sampled_from([None, 9]),
    seed=st.integers(0, 2**31),
)
def test_it_is_its_formula(samples, length, activation, rows, seed):
    torch.manual_seed(seed)
    model = DIN(
        tables(rows),
        4,
        2,
        **PAIRS,
        hidden=[5, 3],
        activation=activation,
        features=FEATURES,
        seed=seed,
    )
    padding = -1 if rows is None else rows - 1
    draw = torch.Generator().manual_seed(seed)
    batch = {name: torch.randint(0, 8, (samples,), generator=draw) for name in FEATURES}
    for name in model.interests:
        items = torch.randint(0, 8, (samples, length), generator=draw)
        lengths = torch.randint(0, length + 1, (samples, 1), generator=draw)
        batch[name] = torch.where(torch.arange(length) < lengths, items, padding)
    batch["dense"] = torch.randn(samples, 2, generator=draw)
    logits = model(batch)
    torch.testing.assert_close(logits, plain(model, batch), rtol=1e-4, atol=1e-5)


def test_padding_changes_nothing_and_gets_no_gradient():
    model = DIN(tables(), 4, 0, **PAIRS, features=FEATURES, activation="relu", seed=0)
    batch = {name: torch.tensor([1, 2]) for name in FEATURES}
    batch |= {"history": torch.tensor([[3, 4], [5, -1]]), "shops": torch.tensor([[6], [-1]])}
    longer = batch | {"history": torch.tensor([[3, 4, -1], [5, -1, -1]])}
    logits = model(batch)
    torch.testing.assert_close(logits, model(longer))
    logits.sum().backward()
    with_gradient = model.embeddings.parameter("item").grad.coalesce()
    assert (with_gradient.values().abs().sum(1) > 0).sum() == 5  # 1 to 5, but not the padding
    assert not model.embeddings.lookup("item", torch.tensor([-1])).any()


def test_padding_counts_nothing_whatever_its_row_holds():
    model = DIN(tables(), 4, 0, **PAIRS, features=FEATURES, activation="relu", seed=0)
    batch = {name: torch.tensor([1, 2]) for name in FEATURES}
    batch |= {
        "history": torch.tensor([[3, -1], [-1, -1]]),
        "shops": torch.tensor([[6, 5], [-1, 4]]),
    }
    before = model.eval()(batch)
    for table in ("item", "shop"):
        model.embeddings.assign(table, torch.tensor([-1]), torch.full((1, 4), 9.0))
    assert model.embeddings.lookup("item", torch.tensor([-1])).tolist() == [[9.0] * 4]
    assert torch.equal(model(batch), before)


def test_what_it_refuses():
    one = {"item": "item", "history": "item", "user": "user"}
    with pytest.raises(hb.TableError, match="target is .'item'. and history .'a', 'b'."):
        DIN(tables(), history=["a", "b"])
    with pytest.raises(hb.TableError, match="activation is 'gelu'. Pass one of dice, prelu, relu"):
        DIN(tables(), activation="gelu")
    with pytest.raises(hb.TableError, match="must be features that share a table"):
        DIN(["item", "history"])
    with pytest.raises(hb.TableError, match="needs padding_idx=-1 and combiner=None"):
        DIN(["item", "user"], features=one)
    model = DIN([tables()[0], hb.Table("user", 4, combiner=None)], 4, features=one)
    batch = {"item": torch.tensor([1]), "history": torch.tensor([[1]])}
    with pytest.raises(hb.InputError, match="feature 'user' has more than a vector a sample"):
        model(batch | {"user": torch.tensor([[1, 2]])})


def test_a_checkpoint_makes_it_again(tmp_path):
    model = DIN(tables(), 4, 0, **PAIRS, features=FEATURES, seed=3)
    batch = {name: torch.tensor([1, 2, 3]) for name in FEATURES}
    batch |= {"history": torch.tensor([[3], [5], [-1]]), "shops": torch.tensor([[6], [-1], [2]])}
    model(batch)
    hb.save(tmp_path, model, step=1)
    again = hb.checkpoint.load_model(tmp_path)
    assert again.config == model.config
    assert torch.equal(again(batch), model.eval()(batch))
