"""The fields of SamplingParams that few requests have: about logits, logprobs, and which tokens may follow.

Checks them; `params.py` declares them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nanovllm.checks import PENALTIES, check_float, check_int, check_texts, check_token_ids, show, wrong
from nanovllm.extras.logits_processors import takes_prompt
from nanovllm.extras.structured_outputs import StructuredOutputsParams
from nanovllm.params import SamplingParams

MAX_ASKED = 128  # tokens of logprob_token_ids; vLLM's


def checked(params: SamplingParams, max_tokens: int | None) -> dict[str, Any]:
    """The fields as plain Python values. ValueError or TypeError names the field, the value and the fix.

    max_tokens: the checked one.
    """
    return _checked_logits(params) | _checked_rules(params, max_tokens) | _checked_words(params)


def replayed(values: Mapping[str, Any]) -> dict[str, Any]:
    """What changes in checked fields so that the output is `trace_decode_token_ids`: nothing else ends it, or
    decides on a token. ValueError for a field that would have to be obeyed too."""
    for name in ("structured_outputs", "thinking_token_budget", "bad_words", "allowed_token_ids"):
        if values[name] not in (None, []):
            raise ValueError(f"trace_decode_token_ids needs {name} at its default; leave one of them out")
    if values["n"] > 1:
        raise ValueError(f"trace_decode_token_ids needs n=1, not {values['n']}: all outputs would be equal")
    ends = {"max_tokens": len(values["trace_decode_token_ids"]), "min_tokens": 0, "ignore_eos": True}
    neutral = {name: column.neutral for name, column in PENALTIES.items()}
    lists: dict[str, Any] = {"stop": [], "stop_token_ids": [], "logit_bias": {}, "logits_processors": []}
    return ends | neutral | lists | {"repetition_detection": None}


def _checked_words(params: SamplingParams) -> dict[str, Any]:
    """What the request tells classes of logits processors, and the tokens of a known answer."""
    told, trace = params.extra_args, params.trace_decode_token_ids
    if told is not None and not (isinstance(told, Mapping) and all(isinstance(key, str) for key in told)):
        raise TypeError(f"extra_args must be a dictionary with strings as keys, not {show(told)}")
    ids = None if trace is None else check_token_ids("trace_decode_token_ids", trace)
    if trace is not None and not ids:
        raise ValueError("trace_decode_token_ids is empty; pass at least one token id, or None")
    return {"extra_args": None if told is None else dict(told), "trace_decode_token_ids": ids}


def _checked_logits(params: SamplingParams) -> dict[str, Any]:
    """The fields about logits and logprobs, as plain Python values."""
    values: dict[str, Any] = {}
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        expected = "None, an integer of at least 0, or -1 for the whole vocabulary"
        value = 1 if value is True else value
        values[name] = None if value is None else check_int(name, value, -1, expected)
    ids = list(dict.fromkeys(check_token_ids("logprob_token_ids", params.logprob_token_ids)))
    if len(ids) > MAX_ASKED:
        raise ValueError(f"logprob_token_ids has {len(ids)} tokens, and may have {MAX_ASKED}; pass fewer")
    if ids and values["logprobs"] not in (None, len(ids)):
        raise ValueError(
            f"logprobs={params.logprobs} must be None or {len(ids)}, the number of logprob_token_ids"
        )
    values["logprob_token_ids"] = ids
    values["logit_bias"] = _biases(params.logit_bias)
    functions = [] if params.logits_processors is None else params.logits_processors
    if not isinstance(functions, (list, tuple)) or not all(map(callable, functions)):
        raise TypeError(f"logits_processors must be a list of functions, not {show(functions)}")
    for function in functions:
        takes_prompt(function)
    values["logits_processors"] = list(functions)
    return values


def _biases(value: Any) -> dict[int, float]:
    """Checked `logit_bias`; keys may be strings of digits, as in JSON."""
    expected = "a dict of token ids and numbers"
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"logit_bias must be {expected}, not {show(value)}")
    biases = {}
    for key, bias in value.items():
        token_id = int(key) if isinstance(key, str) and key.isdecimal() else key
        where = f"logit_bias[{show(key)}]"
        number = -math.inf if bias == -math.inf else check_float(where, bias, "finite, or -inf")
        biases[check_int("a token id of logit_bias", token_id, 0, "an integer of at least 0")] = number
    return biases


def _checked_rules(params: SamplingParams, max_tokens: int | None) -> dict[str, Any]:
    """The fields that restrict which tokens may follow, as plain Python values."""
    values: dict[str, Any] = {}
    expected = "an integer of at least 0 and at most max_tokens"
    values["min_tokens"] = (
        0 if params.min_tokens is None else check_int("min_tokens", params.min_tokens, 0, expected)
    )
    if max_tokens is not None and values["min_tokens"] > max_tokens:
        raise ValueError(f"min_tokens must be {expected}={max_tokens}, not {params.min_tokens}")
    allowed = params.allowed_token_ids
    ids = None if allowed is None else check_token_ids("allowed_token_ids", allowed)
    values["allowed_token_ids"] = ids
    if allowed is not None and not ids:
        raise wrong("allowed_token_ids", allowed, "a list of at least one token id, or None for all")
    if isinstance(params.bad_words, str):
        raise TypeError(f"bad_words must be a list of strings, not {show(params.bad_words)}")
    values["bad_words"] = list(dict.fromkeys(check_texts("bad_words", params.bad_words)))
    budget = params.thinking_token_budget
    if budget is not None:
        expected = "an integer of at least 0, or None or -1 for no limit"
        budget = check_int("thinking_token_budget", budget, -1, expected)
    values["thinking_token_budget"] = None if budget == -1 else budget
    structured = values["structured_outputs"] = params.structured_outputs
    if structured is not None and not isinstance(structured, StructuredOutputsParams):
        expected = "StructuredOutputsParams, such as StructuredOutputsParams(json=schema), or None"
        raise TypeError(f"structured_outputs must be {expected}, not {show(structured)}")
    return values
