"""The flag that tells whether gradients are finite."""

import pytest
import torch
from devices import DEVICE

from hotbed.errors import InputError
from hotbed.ops.gpu.finite import check_finite

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def flag(arrays):
    apply = torch.ones(1, dtype=torch.int32, device=DEVICE)
    check_finite(arrays, apply)
    return apply.item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("shape", [(1,), (7,), (5000,), (4096 * 2,), (9, 12), (3, 1025)])
def test_one_bad_value_is_found_wherever_it_is(dtype, bad, shape):
    array = torch.randn(shape).to(dtype).to(DEVICE)
    other = torch.full((6,), torch.finfo(dtype).max, dtype=dtype, device=DEVICE)
    assert flag([other, array]) == 1
    for at in (0, array.numel() // 2, array.numel() - 1):
        wrong = array.clone()
        wrong.view(-1)[at] = bad
        assert flag([other, wrong]) == 0


def test_columns_of_a_wider_buffer():
    buffer = torch.full((6, 30), float("nan"), device=DEVICE)
    for begin, end in ((0, 8), (8, 12), (13, 20), (29, 30)):
        buffer[:, begin:end] = 1.0
        assert flag([buffer[:, begin:end]]) == 1
        buffer[5, end - 1] = float("inf")
        assert flag([buffer[:, begin:end]]) == 0


def test_nothing_sets_the_flag():
    apply = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    check_finite([torch.ones(5, device=DEVICE), torch.ones(0, 3, device=DEVICE)], apply)
    assert apply.item() == 0
    check_finite([], apply)
    assert flag([torch.ones(0, device=DEVICE)]) == 1


@pytest.mark.parametrize(
    "array",
    [
        torch.zeros(3, dtype=torch.float64),
        torch.zeros(2, 2, 2),
        torch.zeros(4, 3).t(),
        torch.zeros(1, device=DEVICE).expand(3),  # what is moved lies side by side
    ],
)
def test_refuses(array):
    with pytest.raises(InputError, match="array 0 is"):
        flag([array.to(DEVICE)])
