"""Spares Triton's interpreter work that it does again and again, most of the time of small kernels.

Each change is left out where this Triton is built in another way.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


class _Nothing:
    def restore(self) -> None:
        pass


def install() -> None:
    """For this process, in which nothing but the interpreter is to use `triton.language` from now on."""
    _prepare_once()
    _call_builtins_at_once()
    _leave_out_unread_checks()
    _make_handles_quickly()
    _remember_dtypes()
    _share_types()
    _remember_shapes()
    _remember_conversions()
    _remember_broadcasts()


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


def _call_builtins_at_once() -> None:
    """It copies their keyword arguments, and has each look whether it is called in a kernel."""
    replace = getattr(interpreter, "_patch_attr", None)
    semantic = getattr(interpreter, "interpreter_semantic", None)
    if replace is None or list(inspect.signature(replace).parameters) != _OF_PATCH_ATTR:
        return

    def quickly(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner = getattr(member, "__wrapped__", member)

        def called(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        scope.set_attr(obj, name, called)

    interpreter._patch_attr = quickly


_OF_PATCH_ATTR = ["obj", "name", "member", "builder", "scope"]


def _make_handles_quickly() -> None:
    """Each array is checked against its dtype, which what computes it has seen to."""
    kind = getattr(interpreter, "TensorHandle", None)
    names = [field.name for field in dataclasses.fields(kind)] if kind is not None else []
    if names != ["data", "dtype", "attr"]:
        return

    def quickly(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype = data, dtype
        self.attr = {} if attr is None else attr

    kind.__init__ = quickly


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
    """It makes the type of a block anew for each result, and that of a pointer for each launch."""
    kind, known = tl.core.block_type, {}
    make, with_element, to_ir = kind.__init__, kind.with_element_ty, kind.to_ir

    def shared(cls: Any, element_ty: Any = None, shape: Any = ()) -> Any:
        key = (str(element_ty), *(getattr(length, "value", length) for length in shape))
        if key not in known:
            known[key] = object.__new__(cls)
        return known[key]

    def once(self: Any, element_ty: Any, shape: Any) -> None:
        if "name" not in vars(self):  # which is set last
            make(self, element_ty, shape)

    def remembered(self: Any, element_ty: Any) -> Any:
        others = vars(self).setdefault("of_elements", {})
        found = others.get(id(element_ty))
        if found is None:
            found = others[id(element_ty)] = element_ty, with_element(self, element_ty)
        return found[1]

    def interpreted(self: Any, builder: Any) -> Any:
        if "of_interpreter" not in vars(self):
            self.of_interpreter = to_ir(self, builder)
        return self.of_interpreter

    kind.__new__, kind.__init__ = shared, once
    kind.with_element_ty, kind.to_ir = remembered, interpreted
    if hasattr(tl, "str_to_ty"):
        tl.str_to_ty = functools.cache(tl.str_to_ty)


def _remember_shapes() -> None:
    """Each tensor wraps the lengths of its type, and multiplies them; to compare them it wraps them again."""
    kind, lengths = tl.core.tensor, tl.core.tuple
    make, equal = kind.__init__, lengths.__eq__

    def quickly(self: Any, handle: Any, type: Any) -> None:
        kept = vars(type).get("of_tensors")
        if kept is None:
            make(self, handle, type)
            if vars(self).keys() == {"handle", "type", "dtype", "shape", "numel"}:
                type.of_tensors = self.dtype, self.shape, self.numel
        else:
            self.handle, self.type = handle, type
            self.dtype, self.shape, self.numel = kept

    def equally(self: Any, other: Any) -> Any:
        if type(other) is lengths:
            return tl.core.constexpr(self is other or self.values == other.values)
        return equal(self, other)

    kind.__init__, lengths.__eq__ = quickly, equally


def _remember_conversions() -> None:
    """Operands of a type that need none are looked at again and again, and constants made anew."""
    kind: Any = type(getattr(interpreter, "interpreter_semantic", None))
    convert = getattr(kind, "binary_op_type_checking_impl", None)
    cast = getattr(kind, "cast", None)
    if convert is None or cast is None:
        return
    # By the types' addresses, which are those of no other type as long as they are kept here.
    fitting: dict[tuple[Any, ...], Any] = {}
    constants: dict[tuple[Any, ...], Any] = {}

    def quickly(self: Any, lhs: Any, rhs: Any, *options: Any, **more: Any) -> Any:
        key: tuple[Any, ...] = id(getattr(lhs, "type", None)), id(getattr(rhs, "type", None))
        key += (*options, *more.items())
        if key in fitting:
            return self.broadcast_impl_value(lhs, rhs)
        for one, other, side in ((lhs, rhs, 1), (rhs, lhs, 0)):
            if type(other) in (int, float, bool) and isinstance(one, tl.core.tensor):
                key += (type(other), repr(other))
                if key in constants:
                    constant = constants[key][0]
                    return (lhs, constant) if side else (constant, rhs)
                found = convert(self, lhs, rhs, *options, **more)
                if found[1 - side] is one:
                    constants[key] = found[side], one.type
                return found
        found = convert(self, lhs, rhs, *options, **more)
        if all(type(operand) is tl.core.tensor for operand in (lhs, rhs)) and all(
            new.type.scalar is old.type.scalar for new, old in zip(found, (lhs, rhs), strict=True)
        ):
            fitting[key] = lhs.type, rhs.type
        return found

    def cast_others(self: Any, input: Any, dst_ty: Any, *options: Any, **more: Any) -> Any:
        if input.type.scalar is dst_ty.scalar:
            return input
        return cast(self, input, dst_ty, *options, **more)

    kind.binary_op_type_checking_impl, kind.cast = quickly, cast_others


def _remember_broadcasts() -> None:
    """It compares the lengths of two operands to find how one is to be broadcast."""
    kind: Any = type(getattr(interpreter, "interpreter_semantic", None))
    broadcast = getattr(kind, "broadcast_impl_value", None)
    if broadcast is None:
        return
    known: dict[tuple[int, int], tuple[Any, ...]] = {}

    def as_of(self: Any, operand: Any, type: Any, splat: bool) -> Any:
        make = self.builder.create_splat if splat else self.builder.create_broadcast
        lengths = tuple(type.shape.values)
        handle = make(_Lengths(lengths), operand.handle) if splat else make(operand.handle, lengths)
        return tl.core.tensor(handle, type)

    def quickly(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        if one is other:
            return lhs, rhs
        found = known.get((id(one), id(other)))
        if found is None:
            both = broadcast(self, lhs, rhs)
            if not (one.is_block() and other.is_block() and len(one.shape) != len(other.shape)):
                # The first two are kept, so that their addresses are those of no other type.
                known[id(one), id(other)] = one, other, both[0].type, both[1].type
            return both
        if found[2] is not one:
            lhs = as_of(self, lhs, found[2], not one.is_block())
        if found[3] is not other:
            rhs = as_of(self, rhs, found[3], not other.is_block())
        return lhs, rhs

    kind.broadcast_impl_value = quickly


class _Lengths:
    """What a splat reads of a block's type."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
