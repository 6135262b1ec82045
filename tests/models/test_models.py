import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hotbed as hb
from hotbed.data import CATEGORIES, synthetic_clicks
from hotbed.models import (
    DCN,
    DLRM,
    PNN,
    AutoInt,
    DCNv1,
    DeepFM,
    FinalMLP,
    MMoE,
    WideDeep,
    XDeepFM,
)

MODELS = [DLRM, WideDeep, DCN, DCNv1, DeepFM, XDeepFM, PNN, AutoInt, FinalMLP, MMoE]


def perceptron(mlp, x, last_relu):
    """Linear layers by hand, ReLU between them and, if asked for, after them."""
    for position, layer in enumerate(mlp.layers):
        x = x @ layer.weight.T + layer.bias
        if last_relu or position + 1 < len(mlp.layers):
            x = x.clamp(min=0)
    return x


def plain_dlrm(model, batch):
    dense = perceptron(model.bottom, batch["dense"], True)
    vectors = [dense, *(model.embeddings.lookup(name, batch[name]) for name in model.features)]
    pairs = [
        (vectors[i] * vectors[j]).sum(1, keepdim=True)
        for i in range(len(vectors))
        for j in range(i)
    ]
    return perceptron(model.top, torch.cat([dense, *pairs], 1), False)[:, 0]


def plain_wide_deep(model, batch):
    dense = batch["dense"]
    vectors = [model.embeddings.lookup(name, batch[name]) for name in model.features]
    weights = [model.embeddings.lookup(f"{name}.wide", batch[name]) for name in model.features]
    deep = perceptron(model.deep, torch.cat([dense, *vectors], 1), False)
    wide = dense @ model.wide.weight.T + model.wide.bias + sum(weights)
    return (deep + wide)[:, 0]


def vectors_of(model, batch):
    return [model.embeddings.lookup(name, batch[name]) for name in model.features]


def linear_of(model, batch):
    weights = [model.embeddings.lookup(f"{name}.wide", batch[name]) for name in model.features]
    return batch["dense"] @ model.wide.weight.T + model.wide.bias + sum(weights)


def plain_deepfm(model, batch):
    vectors = vectors_of(model, batch)
    pairs = torch.zeros(len(batch["dense"]), 1)
    for i, one in enumerate(vectors):
        for other in vectors[:i]:
            pairs = pairs + (one * other).sum(1, keepdim=True)
    deep = perceptron(model.deep, torch.cat([batch["dense"], *vectors], 1), False)
    return (linear_of(model, batch) + pairs + deep)[:, 0]


def plain_xdeepfm(model, batch):
    vectors = vectors_of(model, batch)
    before, sums = vectors, []
    for maps in model.interaction.maps:
        weight = maps.weight.view(len(maps.weight), len(before), len(vectors))
        before = [
            sum(
                weight[h, i, j] * before[i] * vectors[j]
                for i in range(len(before))
                for j in range(len(vectors))
            )
            for h in range(len(weight))
        ]
        sums += [one.sum(1) for one in before]
    products = torch.stack(sums, 1) @ model.of_maps.weight.T + model.of_maps.bias
    deep = perceptron(model.deep, torch.cat([batch["dense"], *vectors], 1), False)
    return (linear_of(model, batch) + products + deep)[:, 0]


def plain_dcn(model, batch):
    x = crossed = torch.cat([batch["dense"], *vectors_of(model, batch)], 1)
    for weight, bias in zip(model.cross.weight, model.cross.bias, strict=True):
        if model.cross.form == "vector":
            crossed = x * (crossed @ weight)[:, None] + bias + crossed
        else:
            crossed = x * (crossed @ weight.T + bias) + crossed
    both = torch.cat([crossed, perceptron(model.deep, x, True)], 1)
    return (both @ model.top.weight.T + model.top.bias)[:, 0]


def plain_pnn(model, batch):
    vectors = vectors_of(model, batch)
    if model.product == "inner":
        products = [(vectors[i] * vectors[j]).sum(1) for i in range(len(vectors)) for j in range(i)]
    else:
        total = sum(vectors)
        products = [a * b for a in total.unbind(1) for b in total.unbind(1)]
    columns = [batch["dense"], *vectors, *(one[:, None] for one in products)]
    return perceptron(model.deep, torch.cat(columns, 1), False)[:, 0]


def plain_autoint(model, batch):
    every = [
        batch["dense"][:, i : i + 1] * model.of_dense[i] for i in range(model.num_dense)
    ] + vectors_of(model, batch)
    for layer in model.attention:
        following = []
        for one in every:
            heads = []
            for h in range(layer.heads):
                part = slice(h * layer.width, (h + 1) * layer.width)
                query, keys, values = (
                    one @ layer.query.weight[part].T,
                    [other @ layer.key.weight[part].T for other in every],
                    [other @ layer.value.weight[part].T for other in every],
                )
                scores = torch.stack([(query * key).sum(1) for key in keys], 1).exp()
                scores = scores / scores.sum(1, keepdim=True)
                heads.append(sum(scores[:, k : k + 1] * v for k, v in enumerate(values)))
            x = torch.cat(heads, 1) + one @ layer.residual.weight.T
            following.append(x.clamp(min=0))
        every = following
    logits = torch.cat(every, 1) @ model.top.weight.T + model.top.bias
    x = torch.cat([batch["dense"], *vectors_of(model, batch)], 1)
    return (logits + perceptron(model.deep, x, False))[:, 0]


def plain_final_mlp(model, batch):
    x = torch.cat([batch["dense"], *vectors_of(model, batch)], 1)
    outputs = []
    for gate, stream in zip(model.gates, (model.first, model.second), strict=True):
        scale = 2 / (1 + (-perceptron(gate.gate, gate.constant, False)).exp())
        outputs.append(perceptron(stream, x * scale, True))
    left, right = outputs
    fusion, heads = model.fusion, model.fusion.heads
    total = torch.cat(outputs, 1) @ fusion.linear.weight.T + fusion.linear.bias
    a, b = left.shape[1] // heads, right.shape[1] // heads
    for h in range(heads):
        x, y = left[:, h * a : (h + 1) * a], right[:, h * b : (h + 1) * b]
        total = total + torch.einsum("bi,ij,bj->b", x, fusion.bilinear[h], y)[:, None]
    return total[:, 0]


def plain_mmoe(model, batch):
    x = torch.cat([batch["dense"], *vectors_of(model, batch)], 1)
    experts = [perceptron(expert, x, False) for expert in model.mixture.experts]
    logits = []
    for t, tower in enumerate(model.towers):
        gate = (x @ model.mixture.gates.weight[t * len(experts) : (t + 1) * len(experts)].T).exp()
        gate = gate / gate.sum(1, keepdim=True)
        mixed = sum(gate[:, e : e + 1] * expert for e, expert in enumerate(experts))
        logits.append(perceptron(tower, mixed, False))
    return torch.cat(logits, 1)


PLAIN = {
    AutoInt: plain_autoint,
    FinalMLP: plain_final_mlp,
    MMoE: plain_mmoe,
    DLRM: plain_dlrm,
    WideDeep: plain_wide_deep,
    DCN: plain_dcn,
    DCNv1: plain_dcn,
    DeepFM: plain_deepfm,
    XDeepFM: plain_xdeepfm,
    PNN: plain_pnn,
}


@pytest.mark.parametrize("kind", MODELS)
@given(
    features=st.integers(1, 5),
    dim=st.integers(1, 9),
    num_dense=st.integers(1, 4),
    rows=st.integers(1, 6),
    training=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_a_model_is_its_formula(kind, features, dim, num_dense, rows, training, seed):
    generator = torch.Generator().manual_seed(seed)
    names = [f"f{i}" for i in range(features)]
    torch.manual_seed(seed)
    model = kind(names, dim, num_dense, seed=seed).train(training)
    batch = {name: torch.randint(-3, 3, (rows,), generator=generator) for name in names}
    batch["dense"] = torch.randn(rows, num_dense, generator=generator)
    logits = model(batch)
    assert logits.shape == ((rows, 2) if kind is MMoE else (rows,))
    torch.testing.assert_close(logits, PLAIN[kind](model, batch), rtol=1e-5, atol=1e-6)
    assert (model.embeddings.count() > 0) == training


@pytest.mark.parametrize("kind", MODELS)
def test_every_parameter_gets_a_gradient(kind):
    batch = next(iter(synthetic_clicks(64, 64)))
    model = kind(CATEGORIES, dim=4, seed=0)
    logits = model(batch)
    labels = batch["label"] if logits.dim() == 1 else batch["label"][:, None].expand_as(logits)
    torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradient = (
            parameter.grad.coalesce().values() if parameter.grad.is_sparse else parameter.grad
        )
        assert gradient.isfinite().all() and gradient.abs().sum() > 0, name


@pytest.mark.parametrize("kind", MODELS)
def test_a_seed_fixes_the_rows(kind):
    ids = torch.arange(5)
    first, second, other = (kind(["a"], dim=3, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.embeddings.lookup("a", ids), second.embeddings.lookup("a", ids))
    assert not torch.equal(first.embeddings.lookup("a", ids), other.embeddings.lookup("a", ids))


def test_shapes_of_the_criteo_dlrm():
    model = DLRM(CATEGORIES)
    shapes = [tuple(layer.weight.shape) for layer in (*model.bottom.layers, *model.top.layers)]
    assert shapes == [(64, 13), (16, 64), (256, 16 + 351), (128, 256), (1, 128)]
    table = model.embeddings.tables["C7"]
    assert (table.dim, table.rows, table.init) == (16, None, hb.init.Normal(0.0, 0.01))


def test_tables_may_be_described():
    tables = [hb.Table("s", 4, rows=10, combiner="mean"), "d"]
    for kind in MODELS:
        model = kind(tables, dim=4, num_dense=2)
        bags = hb.Jagged(torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]))
        batch = {"s": bags, "d": torch.tensor([7, 8]), "dense": torch.zeros(2, 2)}
        assert len(model(batch)) == 2
        assert model.embeddings.tables["s"] is tables[0]
    wide = WideDeep(tables, dim=4).embeddings.tables["s.wide"]
    assert (wide.dim, wide.rows, wide.combiner) == (1, 10, "mean")


@pytest.mark.parametrize("kind", MODELS)
def test_wrong_widths(kind):
    with pytest.raises(hb.TableError, match="Table 'a' has dim 5, and the model 4"):
        kind([hb.Table("a", 5)], dim=4)


def test_outer_products_are_their_formula():
    torch.manual_seed(0)
    model = PNN(["a", "b", "c"], 5, 2, seed=0, product="outer")
    batch = {name: torch.randint(-3, 3, (7,)) for name in "abc"} | {"dense": torch.randn(7, 2)}
    logits = model(batch)
    torch.testing.assert_close(logits, plain_pnn(model, batch), rtol=1e-5, atol=1e-6)


def test_wrong_arguments():
    for kind in (DCN, DeepFM, XDeepFM, PNN):
        with pytest.raises(hb.TableError, match=f"{kind.__name__}: tables is empty"):
            kind([])
    with pytest.raises(hb.TableError, match="product is 'both'"):
        PNN(["a"], product="both")
    with pytest.raises(hb.TableError, match=r"layers is \[\]"):
        XDeepFM(["a"], maps=[])
    with pytest.raises(hb.TableError, match="layers is .*0"):
        hb.nn.CompressedInteraction(2, [3, 0])


@pytest.mark.parametrize("kind", MODELS)
def test_arguments_that_are_none(kind):
    for wrong in (-1, 2.0, True, "3"):
        with pytest.raises(hb.TableError, match=f"{kind.__name__}: num_dense must be an integer"):
            kind(["a"], dim=4, num_dense=wrong)
    with pytest.raises(hb.TableError, match=r"tables must be names or hotbed.Table .*, got 1"):
        kind([1], dim=4, num_dense=3)


@pytest.mark.parametrize("kind", MODELS)
def test_dense_columns_that_do_not_fit(kind):
    model = kind(["a", "b"], dim=4, num_dense=3)
    ids = {"a": torch.tensor([1, 2]), "b": torch.tensor([3, 4])}
    for wrong, found in (
        ({}, "got none"),
        ({"dense": [[1.0, 2.0, 3.0]]}, "got list"),
        ({"dense": torch.ones(2, 5)}, r"got shape \(2, 5\)"),
        ({"dense": torch.ones(3)}, r"got shape \(3,\)"),
    ):
        with pytest.raises(hb.InputError, match=rf"'dense'\] must .* of shape \(B, 3\), {found}"):
            model(ids | wrong)
        assert model.embeddings.count() == 0
    with pytest.raises(hb.InputError, match="has 1 samples, and feature 'a' 2. Give all"):
        model(ids | {"dense": torch.ones(1, 3)})
    assert len(model(ids | {"dense": torch.ones(2, 3)})) == 2


@pytest.mark.parametrize("kind", MODELS)
def test_a_checkpoint_makes_the_model_again(kind, tmp_path):
    tables = [hb.Table("s", 4, rows=10), "d"]
    model = kind(tables, dim=4, num_dense=2, seed=1)
    batch = {"s": torch.tensor([1, 2]), "d": torch.tensor([7, 8]), "dense": torch.ones(2, 2)}
    model(batch)
    hb.save(tmp_path, model, step=0)
    again = hb.checkpoint.load_model(tmp_path)
    assert type(again) is kind
    assert torch.equal(again(batch), model.eval()(batch))


def test_a_bottom_of_another_width():
    with pytest.raises(hb.TableError, match=r"bottom is \[64, 8\].*end bottom with 16"):
        DLRM(["a"], bottom=[64, 8])
    with pytest.raises(hb.TableError, match=r"bottom is \[\]"):
        DLRM(["a"], bottom=[])


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind is not DLRM])
def test_a_model_may_have_no_dense_columns(kind):
    model = kind(["a", "b"], dim=4, num_dense=0, seed=0)
    batch = {"a": torch.tensor([1, 2]), "b": torch.tensor([3, 4]), "dense": torch.empty(2, 0)}
    logits = model(batch)
    torch.testing.assert_close(logits, PLAIN[kind](model, batch), rtol=1e-5, atol=1e-6)
    del batch["dense"]
    torch.testing.assert_close(model(batch), logits)
