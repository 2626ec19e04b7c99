"""Triton's keys of compiled kernels, made independent of the order in which a process meets kernels.

Triton 3.6 counts the constants that a kernel's functions use only if these functions were hashed before the
kernel, so two processes may give one kernel two keys. Triton 3.9 hashes them first itself. Compiles nothing.
"""

from __future__ import annotations

from typing import Any

from nanovllm.kernels.compat import HAS_TRITON, INTERPRET, triton


def hash_functions_first() -> None:
    """From now on, let Triton hash what a kernel calls before the kernel. Twice is as once."""
    finder: Any = getattr(triton.runtime.jit, "DependenciesFinder", None) if HAS_TRITON else None
    update = getattr(finder, "_update_hash", None)
    if INTERPRET or update is None or getattr(update, "hashes_first", False):
        return

    def hashes_first(self: Any, function: Any) -> Any:
        function.cache_key  # noqa: B018  a property that hashes, and notes the constants
        return update(self, function)

    hashes_first.hashes_first = True  # type: ignore[attr-defined]
    finder._update_hash = hashes_first
