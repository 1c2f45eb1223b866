"""Triton's interpreter without work that it repeats.

A launch exchanges all names of `triton.language` for interpreted ones and takes that back at its end. Each call of a
device function inside it exchanges them once more, which took a third of the time of tests with kernels. Half of the
rest went into types: each result of an operation has its own, with a text that names it and a checked shape. And each
sum of integers was made again, as tensors of 64 bits, for an assertion that is dropped unless Triton debugs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any


def prepare_interpreter() -> None:
    """Spare the interpreter what it did before. Does nothing before it is imported, and on cards, which need none."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or os.environ.get("TRITON_INTERPRET") != "1" or hasattr(interpreter._patch_lang, "once"):
        return
    exchange_names_once(interpreter)
    remember_types(interpreter)
    leave_out(interpreter)


def exchange_names_once(interpreter: Any) -> None:  # noqa: ANN401
    """Leave names alone that the launch has exchanged already."""
    exchange: Callable[[Any], Any] = interpreter._patch_lang
    language = interpreter.tl

    def once(function: Any) -> Any:  # noqa: ANN401
        used = [value for value in function.__globals__.values() if value is language or value is language.core]
        if any(language.core.is_builtin(each.load) for each in used):
            return exchange(function)
        return interpreter._LangPatchScope()

    once.once = True  # type: ignore[attr-defined]
    interpreter._patch_lang = once


def remember_types(interpreter: Any) -> None:  # noqa: ANN401
    """Make what describes a type and a shape once."""
    core = interpreter.tl.core
    make_block, make_tensor, find_dtype = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}
    dtypes: dict[str, Any] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:  # noqa: ANN401
        sizes = tuple(one.value if isinstance(one, core.constexpr) else one for one in shape)
        key = element_ty.name, sizes
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = dict(self.__dict__)
        else:
            self.__dict__.update(blocks[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: ANN401 - by Triton's names
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = self.numel, self.shape
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = shapes[key]

    def dtype(kind: Any) -> Any:  # noqa: ANN401
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = find_dtype(kind)
        return dtypes[name]

    core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype = block, tensor, dtype


def leave_out(interpreter: Any) -> None:  # noqa: ANN401
    """Prepare no assertion that is dropped, and leave operands alone that have one shape."""
    semantic = type(interpreter.interpreter_semantic)
    broadcast, sanitize = semantic.broadcast_impl_value, semantic.binary_op_sanitize_overflow_impl

    def sanitized(self: Any, *operands: Any) -> None:  # noqa: ANN401
        if self.builder.options.debug:
            sanitize(self, *operands)

    def shaped(self: Any, one: Any, other: Any) -> tuple[Any, Any]:  # noqa: ANN401
        first, second = one.type, other.type
        if first.is_block() and second.is_block() and first.shape.values == second.shape.values:
            return one, other
        made: tuple[Any, Any] = broadcast(self, one, other)
        return made

    semantic.binary_op_sanitize_overflow_impl, semantic.broadcast_impl_value = sanitized, shaped
