"""Rerankers that answer with a token, such as "yes": the logits of tokens in place of a head's values.

vLLM's keys of config.json, mostly overrides, name the tokens. Such a model keeps its LM head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm.answers import RequestOutput
from nanovllm.params import SamplingParams

_KEY = "classifier_from_token"
_TWO, _EACH = "from_2_way_softmax", "no_post_processing"


def token_labels(raw: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The tokens and the labels that config.json states; None without tokens. With "from_2_way_softmax" the
    label is the second token, and its value the difference of both logits. ValueError names the key."""
    names, method = raw.get(_KEY), raw.get("method")
    if names is None:
        return None
    if method is None and raw.get("is_original_qwen3_reranker") is True:
        method = _TWO
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(
            f"config.json: {_KEY} must be a list of tokens, such as ['no', 'yes'], not {names!r}"
        )
    if method not in (_TWO, _EACH):
        raise ValueError(f"config.json: method must be {_TWO!r} or {_EACH!r} with {_KEY}, not {method!r}")
    if len(set(names)) < len(names) or (method == _TWO and len(names) != 2):
        expected = "two different tokens" if method == _TWO else "different tokens"
        raise ValueError(f"config.json: {_KEY} needs {expected} with method={method!r}, not {names!r}")
    return tuple(names), tuple(names[1:] if method == _TWO else names)


def token_ids(tokenizer: Any, names: Sequence[str]) -> list[int]:
    """The ids of tokens. ValueError for a name that is no token of the tokenizer's."""
    if tokenizer is None:
        raise ValueError(f"{_KEY} names tokens, and skip_tokenizer_init=True; leave that out")
    ids = [tokenizer.get_vocab().get(name) for name in names]
    for name, found in zip(names, ids, strict=True):
        if found is None:
            raise ValueError(
                f"{_KEY}: {name!r} is no token of this tokenizer; name one as its vocabulary does"
            )
    return ids


def asking(ids: Sequence[int], num_labels: int, logprobs_mode: str) -> SamplingParams:
    """What asks for the logits of tokens after a prompt. ValueError if the engine returns no such numbers."""
    is_difference = num_labels < len(ids)  # then logprobs do: they differ from logits by one number
    if logprobs_mode != "raw_logits" and not (is_difference and logprobs_mode == "raw_logprobs"):
        raise ValueError(
            f"{_KEY} needs logits, and logprobs_mode={logprobs_mode!r} returns others; make the LLM with "
            "logprobs_mode='raw_logits'"
        )
    return SamplingParams(temperature=0, max_tokens=1, logprob_token_ids=list(ids), detokenize=False)


def values_of(output: RequestOutput, ids: Sequence[int], num_labels: int) -> list[float] | None:
    """The value of each label; None if there is none."""
    logprobs = output.outputs[0].logprobs
    if output.error is not None or not logprobs:
        return None
    found = [logprobs[0][each].logprob for each in ids]
    return found if num_labels == len(ids) else [found[1] - found[0]]
