"""Checks of further arguments of calls: `on_error`, and those of vLLM that are not ours."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from nanovllm.sampling_params import SamplingParams
from nanovllm.vllm_arguments import SAMPLING, Absent, refuse_absent


def check_on_error(on_error: object) -> None:
    """Raise ValueError unless `on_error` is "raise" or "return"."""
    if on_error not in ("raise", "return"):
        raise ValueError(f"on_error must be 'raise' or 'return', not {on_error!r}")


def refuse_others(
    call: Callable[..., Any], others: Mapping[str, object], table: Mapping[str, Absent], hint: str = ""
) -> None:
    """Check keyword arguments that `call` of LLM does not have; `table` holds vLLM's arguments.

    ValueError for an unsupported value. TypeError for a field of SamplingParams, and for an unknown name;
    that message ends with `hint`.
    """
    function = f"LLM.{call.__name__}()"
    for name in others:
        if name not in table and (name in SamplingParams.__dataclass_fields__ or name in SAMPLING):
            raise TypeError(f"{function} got {name!r}; pass it as SamplingParams({name}=...)")
    known = [name for name in inspect.signature(call).parameters if name not in ("self", "others")]
    try:
        refuse_absent(function, others, table, known)
    except TypeError as error:
        raise TypeError(f"{error}{hint}") from None
