"""Devices on which tables can lie, and how they are named."""

from __future__ import annotations

import importlib.util

import torch

from hotbed.errors import TableError

__all__ = ["Device", "KINDS", "has_kernels", "named_device", "refuse_without_kernels"]

Device = torch.device | str | int
"""A device, or its name or number."""

KINDS: tuple[str, ...] = ("cuda",)
"""Types of devices for which there are kernels."""


def has_kernels(device: torch.device) -> bool:
    """Whether kernels compute on rows that lie there; else the core does."""
    return device.type in KINDS


def refuse_without_kernels(table: str, device: torch.device) -> None:
    """Raises TableError where nothing compiles kernels."""
    if importlib.util.find_spec("triton") is None:
        raise TableError(
            f"Table {table!r} cannot be moved to {device}: Triton, which compiles the kernels, is not "
            "installed. pip install triton."
        )


def named_device(device: Device | None) -> torch.device | None:
    """The device that is meant, with its number; None: the host.

    Raises:
        TableError: what names no device, or one that is not there.
    """
    if device is None:
        return None
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise TableError(f'device={device!r} names no device; give "cpu" or "cuda".') from None
    if device.type == "meta":
        return device
    if device.type == "cpu":
        return device if has_kernels(device) else None
    if device.type != "cuda":
        raise TableError(
            f"device={str(device)!r} cannot be honoured; tables lie on the CPU or on a CUDA device."
        )
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError) as error:
        raise TableError(
            f"device={str(device)!r} is not there: torch.cuda.device_count() is "
            f"{torch.cuda.device_count()} ({str(error).splitlines()[0].rstrip('.')}). Leave device= out, "
            "and tables lie on the CPU; a GPU needs a torch that is built for CUDA, and a driver."
        ) from error
