"""Triton's interpreter without what it does again at each call: tests spend most of their time there."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any


def patch_once() -> None:
    """Let a call of one jit function from another leave `triton.language` as the launch has patched it.

    The interpreter replaces the functions of `triton.language` at each launch, and again at each call within it,
    when they are replaced already. Does nothing if no kernel was imported.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or hasattr(interpreter, "patches_once"):
        return
    language, patch = interpreter.tl, interpreter._patch_lang

    @cache
    def modules(fn: Any) -> list[Any]:
        return [
            each
            for each in (language, language.core)
            if any(each is value for value in fn.__globals__.values())
        ]

    class Nothing:
        def restore(self) -> None:
            """There is nothing to restore: the launch does it."""

    def patch_unless_patched(fn: Any) -> Any:
        is_patched = [not language.core.is_builtin(each.load) for each in modules(fn)]
        return Nothing() if is_patched and all(is_patched) else patch(fn)

    interpreter._patch_lang, interpreter.patches_once = patch_unless_patched, True
