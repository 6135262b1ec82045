"""Ids that were erased, against a training that never had them."""

from __future__ import annotations

from typing import Any

import torch
from kept_in import step
from torch import Tensor


def check_forgotten(model: Any, other: Any, make: Any) -> None:
    """Trains `model` with the ids of a person, forgets them, and `other` without; then both with them.

    Args:
        make: the optimizer of a collection.
    """
    person = torch.tensor([3, 41, 97])
    others = torch.tensor([i for i in range(100) if i not in person.tolist()])
    optimizers = [make(model), make(other)]

    def train(model: Any, optimizer: Any, number: int, ids: Tensor) -> None:
        chance = torch.Generator().manual_seed(number)
        some = others[torch.randint(0, len(others), (9,), generator=chance)]
        step(model, optimizer, {name: torch.cat([some, ids]) for name in model.tables})

    for number in range(5):
        train(model, optimizers[0], number, person)
        train(other, optimizers[1], number, person[:0])
    for name in model.tables:
        assert not torch.equal(model.lookup(name, person), other.lookup(name, person))
        assert model.erase(name, torch.cat([person, person])) == 3
    for number in range(5, 9):  # one more without them, then with some
        for name in model.tables:
            assert torch.equal(model.lookup(name, person), other.lookup(name, person))
            assert all(map(torch.equal, model.rows(name), other.rows(name)))
        ours, theirs = (optimizer.state_dict()["state"] for optimizer in optimizers)
        for at, state in ours.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    assert torch.equal(value, theirs[at][key]), (key, at)
        for one, optimizer in zip((model, other), optimizers, strict=True):
            train(one, optimizer, number, person[number % 2 :] if number > 5 else person[:0])
