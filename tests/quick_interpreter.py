"""Spares Triton's interpreter work that it does again and again, most of the time of small kernels.

Each change is left out where this Triton is built in another way.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


class _Nothing:
    def restore(self) -> None:
        pass


def install() -> None:
    """For this process, in which nothing but the interpreter is to use `triton.language` from now on."""
    _prepare_once()
    _leave_out_unread_checks()
    _remember_dtypes()
    _share_types()
    _remember_shapes()
    _broadcast_unequal_shapes()


def _prepare_once() -> None:
    """It prepares `triton.language` at every launch, and at every call of a device function, and takes
    that back at the end."""
    prepare = getattr(interpreter, "_patch_lang", None)
    if prepare is None:
        return
    prepared: set[str] = set()

    def once(function: Any) -> Any:
        if function.__module__ not in prepared:
            prepared.add(function.__module__)
            prepare(function)
        return _Nothing()

    interpreter._patch_lang = once


def _leave_out_unread_checks() -> None:
    """Of overflow: what they find is asserted in debugging mode only."""
    builder: Any = getattr(interpreter, "interpreter_builder", None)
    options: Any = getattr(builder, "options", None)
    if getattr(options, "debug", True) is False and hasattr(options, "sanitize_overflow"):
        builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _remember_dtypes() -> None:
    """It makes a dictionary of all dtypes to look one up."""
    look_up = getattr(interpreter, "_get_np_dtype", None)
    if look_up is None:
        return
    known: dict[tuple[type, str], Any] = {}

    def remembered(dtype: Any) -> Any:
        key = type(dtype), dtype.name
        if key not in known:
            known[key] = look_up(dtype)
        return known[key]

    interpreter._get_np_dtype = functools.wraps(look_up)(remembered)


def _share_types() -> None:
    """It makes the type of a block anew for each result."""
    kind, known = tl.core.block_type, {}
    make = kind.__init__

    def shared(cls: Any, element_ty: Any = None, shape: Any = ()) -> Any:
        key = (str(element_ty), *(getattr(length, "value", length) for length in shape))
        if key not in known:
            known[key] = object.__new__(cls)
        return known[key]

    def once(self: Any, element_ty: Any, shape: Any) -> None:
        if "name" not in vars(self):  # which is set last
            make(self, element_ty, shape)

    kind.__new__, kind.__init__ = shared, once


def _remember_shapes() -> None:
    """Each tensor wraps the lengths of its type, and multiplies them."""
    kind = tl.core.tensor
    make = kind.__init__

    def quickly(self: Any, handle: Any, type: Any) -> None:
        kept = vars(type).get("of_tensors")
        if kept is None:
            make(self, handle, type)
            if vars(self).keys() == {"handle", "type", "dtype", "shape", "numel"}:
                type.of_tensors = self.dtype, self.shape, self.numel
        else:
            self.handle, self.type = handle, type
            self.dtype, self.shape, self.numel = kept

    kind.__init__ = quickly


def _broadcast_unequal_shapes() -> None:
    """It compares operands of one shape length by length, to leave them as they are."""
    kind: Any = type(getattr(interpreter, "interpreter_semantic", None))
    broadcast = getattr(kind, "broadcast_impl_value", None)
    if broadcast is None:
        return

    def quickly(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.type is rhs.type else broadcast(self, lhs, rhs)

    kind.broadcast_impl_value = quickly
