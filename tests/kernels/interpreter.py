"""Triton's interpreter without work that it repeats.

A launch exchanges all names of `triton.language` for interpreted ones and takes that back at its end. Each call of a
device function inside it exchanges them once more, which took a third of the time of tests with kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def exchange_names_once() -> None:
    """Leave names alone that the launch has exchanged already. Does nothing before the interpreter is imported."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or not hasattr(interpreter, "_patch_lang") or hasattr(interpreter._patch_lang, "once"):
        return
    exchange: Callable[[Any], Any] = interpreter._patch_lang
    language = interpreter.tl

    def once(function: Any) -> Any:  # noqa: ANN401
        used = [value for value in function.__globals__.values() if value is language or value is language.core]
        if any(language.core.is_builtin(each.load) for each in used):
            return exchange(function)
        return interpreter._LangPatchScope()

    once.once = True  # type: ignore[attr-defined]
    interpreter._patch_lang = once
