"""The engine's own exceptions. A caller's mistake raises ValueError or TypeError instead, or stands in
place of the row that has it.

Every message names the value at fault and what to change. This module formats no message.
"""

from __future__ import annotations


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
