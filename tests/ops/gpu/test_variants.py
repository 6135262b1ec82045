"""How a variant is chosen, remembered, and told from others."""

import json

import pytest
import torch
from devices import DEVICE

from hotbed.errors import InputError
from hotbed.ops.gpu import codec, variants


@pytest.fixture
def candidates():
    return [v for v in variants.all_variants() if v.name == "encode_half_kernel"][:3]


@pytest.fixture
def tuning(monkeypatch, tmp_path):
    """A card on which the third candidate is the fastest; counts what is measured."""
    measured = []

    def milliseconds(run, candidate):
        run(candidate)
        measured.append(candidate)
        return 10.0 - len(measured)

    monkeypatch.setenv("HOTBED_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HOTBED_TUNE", "1")
    monkeypatch.setattr(variants, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(variants, "_card", lambda index: "a card")
    monkeypatch.setattr(variants, "_milliseconds", milliseconds)
    variants._choices.cache_clear()
    yield measured
    variants._choices.cache_clear()


def test_the_guess_is_used_and_nothing_is_run_without_tuning(tuning, candidates, monkeypatch):
    monkeypatch.setenv("HOTBED_TUNE", "0")
    assert variants.choose(candidates, "any", lambda v: 1 / 0) is candidates[0]
    assert tuning == []


def test_a_measured_choice_is_remembered_by_card_and_shape(
    tuning, candidates, monkeypatch, tmp_path
):
    assert variants.choose(candidates, "large", lambda v: None) is candidates[2]
    assert tuning == candidates
    assert variants.choose(candidates, "large", lambda v: 1 / 0) is candidates[2]
    stored = json.loads((tmp_path / "cache" / "kernels.json").read_text())
    assert stored == {"a card": {"encode_half_kernel, large": candidates[2].key}}
    # Another process, which does not tune.
    variants._choices.cache_clear()
    monkeypatch.setenv("HOTBED_TUNE", "")
    assert variants.choose(candidates, "large", lambda v: 1 / 0) is candidates[2]
    assert variants.choose(candidates, "small", lambda v: 1 / 0) is candidates[0]
    monkeypatch.setattr(variants, "_card", lambda index: "another card")
    assert variants.choose(candidates, "large", lambda v: 1 / 0) is candidates[0]
    assert variants.choose(candidates[:1], "large", lambda v: 1 / 0) is candidates[0]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a card": {"encode_half_kernel, x": "gone"}}'])
def test_a_file_that_says_nothing_of_use_is_passed_over(
    tuning, candidates, monkeypatch, tmp_path, text
):
    monkeypatch.setenv("HOTBED_TUNE", "")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels.json").write_text(text)
    assert variants.choose(candidates, "x", lambda v: 1 / 0) is candidates[0]


def test_what_is_launched_is_recorded():
    values = torch.zeros(16, device=DEVICE)
    with variants.launched() as keys:
        codec.encode_half(values, torch.float16)
        with variants.launched() as inner:
            codec.encode_half(values[:0], torch.bfloat16)
    assert len(keys) == 1 and "BRAIN=False" in next(iter(keys))
    assert len(inner) == 1 and "BRAIN=True" in next(iter(inner))


def test_tensors_must_lie_together():
    elsewhere = torch.zeros(2, device="meta")
    with pytest.raises(InputError, match="meta.*one device"):
        variants.require_gpu("test", torch.zeros(2, device=DEVICE), elsewhere)


def test_a_failure_inside_does_not_keep_recording():
    with pytest.raises(ZeroDivisionError), variants.launched() as keys:
        raise ZeroDivisionError
    codec.encode_half(torch.zeros(3, device=DEVICE), torch.float16)
    assert keys == set()


def test_either_setting_of_torch_allows_tf32():
    x = torch.zeros(2, device=DEVICE)
    before = torch.get_float32_matmul_precision()
    try:
        for setting, allowed in (("high", True), ("medium", True), ("highest", False)):
            torch.set_float32_matmul_precision(setting)
            assert variants.tensor_cores(x) == allowed
            assert variants.tensor_cores(x.half())
        if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
            torch.backends.cuda.matmul.fp32_precision = "tf32"
            assert variants.tensor_cores(x)
            torch.backends.cuda.matmul.fp32_precision = "ieee"
            assert not variants.tensor_cores(x)
    finally:
        torch.set_float32_matmul_precision(before)
