"""What one process owns: it is freed once, and never by a process that was forked from it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any


def finalize(owner: object, free: Callable[..., object], *args: Any) -> weakref.finalize[..., Any]:
    """As `weakref.finalize`: `free(*args)` is called once, when `owner` is collected or Python exits.

    A forked process has a copy of `owner` but does not own its resources: there nothing is freed.
    """
    pid = os.getpid()

    def free_here() -> None:
        if os.getpid() == pid:
            free(*args)

    return weakref.finalize(owner, free_here)
