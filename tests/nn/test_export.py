"""Layers become programs of `torch.export` and ONNX models, for batches of any size."""

import io

import numpy as np
import onnxruntime
import pytest
import torch

import hotbed as hb

B, F, D = 5, 3, 4
BATCH = torch.export.Dim("batch")


class Concat(torch.nn.Module):
    def forward(self, vectors):
        return hb.nn.concat(vectors)


def vectors(rows):
    return list(torch.randn(rows, F, D).unbind(1))


def flat(rows):
    return torch.randn(rows, 8)


LAYERS = {
    "MLP": (lambda: hb.nn.MLP(8, [6, 1], dropout=0.5), lambda n: (flat(n),)),
    "cross, matrix": (lambda: hb.nn.CrossInteraction(8, 2), lambda n: (flat(n),)),
    "cross, vector": (lambda: hb.nn.CrossInteraction(8, 2, "vector"), lambda n: (flat(n),)),
    "cross, rank": (lambda: hb.nn.CrossInteraction(8, 2, rank=3), lambda n: (flat(n),)),
    "dot": (hb.nn.DotInteraction, lambda n: (torch.randn(n, D), vectors(n))),
    "factorization": (hb.nn.FactorizationMachine, lambda n: (vectors(n),)),
    "compressed": (lambda: hb.nn.CompressedInteraction(F, [2, 2]), lambda n: (vectors(n),)),
    "self-attention": (lambda: hb.nn.SelfAttentionInteraction(D, 2, 3), lambda n: (vectors(n),)),
    "target attention": (
        lambda: hb.nn.TargetAttention(D, [3]),
        lambda n: (torch.randn(n, D), torch.randn(n, F, D), torch.rand(n, F) > 0.5),
    ),
    "dice": (lambda: hb.nn.Dice(8), lambda n: (flat(n),)),
    "mixture": (lambda: hb.nn.MixtureOfExperts(8, 2), lambda n: (flat(n),)),
    "gate": (lambda: hb.nn.FeatureGate(8), lambda n: (flat(n),)),
    "gate of a context": (lambda: hb.nn.FeatureGate(8, 8), lambda n: (flat(n), flat(n))),
    "fusion": (lambda: hb.nn.BilinearFusion(8, 8, 2), lambda n: (flat(n), flat(n))),
    "concat": (Concat, lambda n: (vectors(n),)),
}


def any_batch(value):
    if isinstance(value, torch.Tensor):
        return {0: BATCH}
    return type(value)(any_batch(each) for each in value)


def arrays(values):
    if isinstance(values, torch.Tensor):
        return [values.detach().numpy()]
    return [array for each in values for array in arrays(each)]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_layer_lowers(name):
    torch.manual_seed(0)
    make, inputs = LAYERS[name]
    layer, sample = make().eval(), inputs(B)
    shapes = any_batch(sample)
    program = torch.export.export(layer, sample, dynamic_shapes=shapes)
    model = io.BytesIO()
    torch.onnx.export(program, dynamo=True, verbose=False).save(model)
    session = onnxruntime.InferenceSession(model.getvalue(), providers=["CPUExecutionProvider"])
    for rows in (1, B, 9):
        given = inputs(rows)
        if rows > 1:
            torch.testing.assert_close(program.module()(*given), layer(*given))
        fed = {
            each.name: array
            for each, array in zip(session.get_inputs(), arrays(given), strict=True)
        }
        for found, wanted in zip(session.run(None, fed), arrays(layer(*given)), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_every_layer_is_here():
    public = {getattr(hb.nn, name) for name in hb.nn.__all__}
    layers = {
        each for each in public if isinstance(each, type) and issubclass(each, torch.nn.Module)
    }
    lowered = {type(make()) for make, _ in LAYERS.values()} | {
        hb.nn.FrequencyEstimate
    }  # counts, in training
    assert layers <= lowered, layers - lowered
