"""Shapes that products of vectors refuse."""

import pytest
import torch

import hotbed as hb

LAYERS = [hb.nn.FactorizationMachine(), hb.nn.CompressedInteraction(2, [3])]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_refuses_shapes_that_do_not_fit(layer):
    for wrong, message in (
        ([], "there are no vectors"),
        ([torch.zeros(4, 2), torch.zeros(4, 3)], r"vector 1 has shape \(4, 3\), and the first"),
        ({"a": torch.zeros(4, 2), "b": torch.zeros(3, 2)}, r"vector 'b' has shape \(3, 2\)"),
        ([torch.zeros(4), torch.zeros(4)], r"vector 0 has shape \(4,\)"),
        (torch.zeros(4, 2), r"stacked vectors have shape \(4, 2\). Pass \(B, F, d\)"),
    ):
        with pytest.raises(hb.InputError, match=f"{type(layer).__name__}: .*{message}"):
            layer(wrong)
    vectors = [torch.ones(4, 2), torch.ones(4, 2)]
    assert torch.equal(layer(vectors), layer(torch.stack(vectors, 1)))


def test_refuses_another_number_of_vectors():
    with pytest.raises(hb.InputError, match="CompressedInteraction: there are 3 vectors. Pass 2"):
        hb.nn.CompressedInteraction(2, [3])(torch.ones(4, 3, 2))
