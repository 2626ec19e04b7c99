"""The engine's own exceptions. A caller's mistake raises ValueError or TypeError instead, or stands in
place of the row that has it.

Every message names the value at fault and what to change. This module formats no message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar

_Value = TypeVar("_Value")
BadRow: TypeAlias = "TypeError | ValueError"


class NanoVLLMError(Exception):
    """Base class of all errors below."""


class ModelLoadError(NanoVLLMError):
    """A checkpoint is missing, unreadable, or does not match its config."""


class KVCacheMemoryError(NanoVLLMError):
    """The device memory left after loading the model does not hold one KV cache block."""


class WorkerError(NanoVLLMError):
    """A tensor-parallel worker failed, died, or could not be started."""


class EngineClosedError(NanoVLLMError):
    """A method was called on an engine after `close()`, or in a process forked from the engine's."""


def attempt(check: Callable[..., _Value], *args: Any) -> _Value | BadRow:
    """Return `check(*args)`, or the TypeError or ValueError that it raises. Values that are nested too deeply
    for Python to read or print give an error too."""
    try:
        return check(*args)
    except RecursionError:
        return ValueError("it is nested too deeply")
    except (TypeError, ValueError) as error:
        return error.with_traceback(None)  # a traceback would keep the row's values alive


def raise_first(rows: Iterable[object]) -> None:
    for row in rows:
        if isinstance(row, Exception):
            raise row
