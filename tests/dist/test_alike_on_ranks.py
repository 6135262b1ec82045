"""Clipping, GradScalers, loads and gradients that differ by rank are refused on all; nothing changes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from dist.test_arguments_of_ranks import Model, refused
from dist.worlds import run

import hotbed as hb
from hotbed.dist import PeerError


def made(rank: int) -> tuple[Any, Any]:
    """A model after a backward, and its optimizer."""
    model = hb.distribute(Model())
    optimizer = hb.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    model(torch.tensor([1 + rank, 2])).sum().backward()
    return model, optimizer


def gradients(model: Any) -> list[torch.Tensor]:
    parts = (*model.one.parameters(), *model.two.parameters())
    return [part.grad.clone() for part in parts if part.grad is not None]


def other_clipping(rank: int, world: int) -> None:
    model, optimizer = made(rank)
    every = list(model.parameters())
    before = gradients(model)
    norm, value = hb.nn.clip_grad_norm_, hb.nn.clip_grad_value_
    for words, call in (
        ("max_norm of clip_grad_norm_ is 0.25 on rank 0", lambda: norm(every, 0.25 + rank)),
        ("norm_type of clip_grad_norm_ is 2 on", lambda: norm(every, 0.1, 2 + rank)),
        ("error_if_nonfinite of clip", lambda: norm(every, 0.1, 2, rank == 0)),
        ("clip_value of clip_grad_value_ is 0.25 on", lambda: value(every, 0.25 + rank)),
        ("dense gradients that clip_grad_norm_ is", lambda: norm(every[: len(every) - rank], 1)),
    ):
        refused(PeerError, words, call)
        assert all(map(torch.equal, before, gradients(model)))
    hb.nn.clip_grad_norm_(every, 0.1)
    optimizer.step()


def other_scaler(rank: int, world: int) -> None:
    for words, options in (
        ("scale of the GradScaler is 8 on rank 0 and 16", {"init_scale": 8.0 * (rank + 1)}),
        ("growth_interval of the GradScaler", {"growth_interval": 1 + rank}),
        ("backoff_factor of the GradScaler", {"backoff_factor": 0.25 * (rank + 1)}),
    ):
        model, optimizer = made(rank)
        before = gradients(model)
        scaler = torch.amp.GradScaler("cpu", **options)
        scaler.scale(torch.zeros(()))
        refused(
            PeerError, words, lambda scaler=scaler, optimizer=optimizer: scaler.unscale_(optimizer)
        )
        assert all(map(torch.equal, before, gradients(model)))


def other_gradients(rank: int, world: int) -> None:
    model, optimizer = made(rank)
    before = model.tables.rows("a").values
    bias = model.one.bias.detach().clone()
    if rank:
        model.one.zero_grad()
    refused(PeerError, "dense parameters, and rank", optimizer.step)
    assert torch.equal(model.tables.rows("a").values, before)
    assert torch.equal(model.one.bias.detach(), bias)
    optimizer.zero_grad()
    model(torch.tensor([1 + rank, 2])).sum().backward()
    optimizer.step()


def broadcast(value: Any) -> Any:
    values = [value]
    torch_dist.broadcast_object_list(values)
    return values[0]


def other_states(rank: int, world: int) -> None:
    """A state of the optimizer that differs, or that one rank alone has loaded, shows in the next step."""
    model, optimizer = made(rank)
    optimizer.step()
    state = broadcast(optimizer.state_dict())
    words = "the digest of the state that was loaded last"

    def step() -> None:
        optimizer.zero_grad()
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()

    other = copy.deepcopy(state)
    for entry in other["state"].values():
        entry["momentum_buffer"] = entry["momentum_buffer"] * (1 + rank)
    optimizer.load_state_dict(other)
    before = model.tables.rows("a").values
    refused(PeerError, words, step)
    assert torch.equal(model.tables.rows("a").values, before)
    optimizer.load_state_dict(state)
    step()
    if rank:
        optimizer.load_state_dict(other)
    refused(PeerError, words, step)


def other_values(rank: int, world: int) -> None:
    model, _ = made(rank)
    before = {name: value.clone() for name, value in model.one.state_dict().items()}
    state = broadcast(model.state_dict())
    for name, change in (("one.weight", 1), ("two.bias", None)):
        other = dict(state)
        if rank and change is None:
            del other[name]
        elif rank:
            other[name] = other[name] + change
        words = f"{name!r} in the state_dict is float32"
        refused(PeerError, words, lambda other=other: model.load_state_dict(other, strict=False))
        for key, value in model.one.state_dict().items():
            assert torch.equal(value, before[key])
    model.load_state_dict(state)


def other_end(rank: int, world: int) -> None:
    with pytest.raises(hb.InputError, match='end="pad" on 1 ranks and "drop" on 1'):
        hb.dist.even([1], end="pad" if rank else "drop")
    kind = hb.InputError if rank else PeerError
    end: Any = "other" if rank else "drop"
    refused(kind, 'give "drop" or "pad"', lambda: hb.dist.even([1], end=end))


@pytest.mark.process
@pytest.mark.parametrize(
    "of",
    [other_clipping, other_scaler, other_gradients, other_states, other_values, other_end],
)
def test_what_must_be_alike(of: Any) -> None:
    run(2, of)


def other_paths(rank: int, world: int, folder: str) -> None:
    model, optimizer = made(rank)
    optimizer.step()
    optimizer.zero_grad()
    kind = hb.checkpoint.CheckpointError
    words = f"hotbed.save has path='{folder}/0' on rank 0 and '{folder}/1' on rank 1"
    refused(kind, words, lambda: hb.save(f"{folder}/{rank}", model, optimizer, step=1))
    assert not any(Path(folder).iterdir())
    hb.save(f"{folder}/0", model, optimizer, step=1)
    hb.save(f"{folder}/1", model, optimizer, step=1)
    for words, path, options in (
        ("hotbed.load has path=", f"{folder}/{rank}", {}),
        ("hotbed.load has strict=", f"{folder}/0", {"strict": rank == 0}),
        ("hotbed.load has rename={} on rank 0", f"{folder}/0/", {"rename": {"one": "x"}}),
    ):
        if "rename" in options and rank == 0:
            options = {}
        refused(kind, words, lambda path=path, options=options: hb.load(path, model, **options))
    hb.load(f"{folder}/0", model, optimizer)  # nothing is half loaded


@pytest.mark.process
def test_paths_and_names_of_save_and_load(tmp_path: Path) -> None:
    run(2, other_paths, str(tmp_path))
