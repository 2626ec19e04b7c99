"""Logits processors: the functions of a request that change its logits, and how they are called.

Knows neither the batch nor the device.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from nanovllm.checks import show


def takes_prompt(function: Callable[..., Any]) -> bool:
    """Whether a logits processor takes (prompt ids, output ids, logits) instead of (output ids, logits).

    It does if it has three parameters or more. TypeError if it can take neither.
    """
    try:
        signature = inspect.signature(function)
        with_prompt = len(signature.parameters) >= 3
        signature.bind(*[None] * (3 if with_prompt else 2))
    except (TypeError, ValueError):  # ValueError: a C function without a signature
        raise TypeError(
            "logits_processors must take (output ids, logits) or (prompt ids, output ids, logits), and "
            f"{show(function)} does not; wrap it: lambda ids, logits: ..."
        ) from None
    return with_prompt


def call_processor(
    function: Callable[..., Any], prompt_ids: list[int], output_ids: list[int], logits: Any
) -> Any:
    """Apply a logits processor to one row of logits, a torch.Tensor [vocabulary] float32.

    It takes (output ids, logits), or (prompt ids, output ids, logits) if it has three parameters, as in vLLM.
    Raises TypeError or ValueError if it does not return a tensor of the same shape.
    """
    if takes_prompt(function):
        made = function(prompt_ids, output_ids, logits)
    else:
        made = function(output_ids, logits)
    if not isinstance(made, type(logits)):
        raise TypeError(f"the logits processor {function!r} must return a tensor, not {made!r}")
    if made.shape != logits.shape:
        shapes = f"{tuple(logits.shape)}, not {tuple(made.shape)}"
        raise ValueError(f"the logits processor {function!r} must return logits of shape {shapes}")
    return made


class GuardedProcessors:
    """All logits processors of one request as one, whose exception ends that request alone: it stays in
    `error`, and the logits become NaN, from which no token can be drawn."""

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        self._functions = functions
        self.error: str | None = None

    def __call__(self, prompt_ids: list[int], output_ids: list[int], logits: Any) -> Any:
        for index, function in enumerate(self._functions):
            try:
                logits = call_processor(function, prompt_ids, output_ids, logits)
            except Exception as error:
                self.error = f"logits_processors[{index}]: {type(error).__name__}: {error}"
                return logits.new_full(logits.shape, math.nan)
        return logits
