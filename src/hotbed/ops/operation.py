"""Declaring functions as operations of torch, which compiled graphs keep whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef

__all__ = ["Context", "operation"]

# Annotation → type in an operation's schema.
_TYPES = {Tensor: "Tensor", list[Tensor]: "Tensor[]", int: "SymInt", float: "float", bool: "bool"}


class Context(Protocol):
    """An autograd context, which keeps for the backward what the forward puts into it."""

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...
    @property
    def needs_input_grad(self) -> tuple[bool, ...]: ...
    def save_for_backward(self, *tensors: Tensor | None) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


def operation(name: str) -> Callable[[Callable[..., object]], CustomOpDef]:
    """Makes a function of tensors and numbers, which changes none of them, ``torch.ops.hotbed.<name>``.

    torch would find the schema by itself, but before 2.6 it knows no ``list[Tensor]``, and before 2.5
    no annotations that are strings.
    """

    def made(function: Callable[..., object]) -> CustomOpDef:
        hints = get_type_hints(function)
        returned = hints.pop("return")
        results = get_args(returned) if get_origin(returned) is tuple else (returned,)
        given = ", ".join(f"{_TYPES[hint]} {argument}" for argument, hint in hints.items())
        gives = ", ".join(_TYPES[result] for result in results)
        schema = f"({given}) -> {gives if len(results) == 1 else f'({gives})'}"
        return torch.library.custom_op(f"hotbed::{name}", function, mutates_args=(), schema=schema)

    return made
