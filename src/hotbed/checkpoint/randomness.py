"""The states of all random generators that a training draws from."""

from __future__ import annotations

import random

import numpy as np
import torch

from hotbed.data.position import RandomStates

__all__ = ["give_random_states", "random_states"]


def random_states() -> RandomStates:
    """Random states of Python, NumPy, and torch on all its devices."""
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = torch.cuda.get_rng_state_all() if used else []
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def give_random_states(states: RandomStates) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, device)
