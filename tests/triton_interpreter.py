"""Triton's interpreter without work that has no effect: tests would spend most of their time there."""

from __future__ import annotations

import dataclasses
import sys
from functools import cache
from typing import Any


def speed_up() -> None:
    """Leave out what the interpreter does in vain, if a kernel was imported.

    - It replaces the functions of `triton.language` at each launch, and again at each call of a jit function
      within one, when they are replaced already.
    - It computes whether sums of integers overflow, and asserts it only with `debug`, which it does not set.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or hasattr(interpreter, "is_quick"):
        return
    interpreter.is_quick = True
    language, patch, builder = interpreter.tl, interpreter._patch_lang, interpreter.interpreter_builder

    @cache
    def modules(fn: Any) -> list[Any]:
        found = [*fn.__globals__.values()]
        return [each for each in (language, language.core) if any(each is value for value in found)]

    class Nothing:
        def restore(self) -> None:
            """The launch restores what it has replaced."""

    def patch_unless_patched(fn: Any) -> Any:
        is_patched = [not language.core.is_builtin(each.load) for each in modules(fn)]
        return Nothing() if is_patched and all(is_patched) else patch(fn)

    interpreter._patch_lang = patch_unless_patched
    if not builder.options.debug and hasattr(builder.options, "sanitize_overflow"):
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
