"""SamplingParams: the sampling parameters of a request, checked. Doors check those that few requests have."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np

from nanovllm.batch import PENALTIES, SAMPLING_PARAMETERS
from nanovllm.checks import check_bool, check_float, check_int, check_texts, check_token_ids, show, wrong
from nanovllm.doors import EXTRAS, Table
from nanovllm.names import FieldsOfOthers, takes_others

SEED_LIMIT = 2**63
MAX_N = 16_384  # vLLM's
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens")
_NUMBER_FIELDS = SAMPLING_PARAMETERS | PENALTIES
_EXTRAS: Table[Any] = Table(EXTRAS)
_EXTRA_FIELDS: dict[str, Any] = {  # with the values that ask for nothing
    **dict.fromkeys(("logprobs", "prompt_logprobs", "allowed_token_ids", "structured_outputs")),
    "thinking_token_budget": None,
    **{"logit_bias": {}, "logits_processors": [], "logprob_token_ids": [], "bad_words": [], "min_tokens": 0},
}
_Params = TypeVar("_Params", bound="SamplingParams")


class Default(int):
    """The default of a field: equal to the plain number, and known as nobody's choice."""


MAX_TOKENS = Default(64)


@takes_others
@dataclass(kw_only=True)
class SamplingParams(FieldsOfOthers):
    """The sampling parameters of one request. All are keyword arguments; a request keeps its own copy.

    Values are checked here and when a request is made: ValueError or TypeError names the field, the value and
    the fix. vLLM's further arguments accept only their neutral value.

    temperature: 0 is greedy; otherwise logits are divided by it.
    top_k: keep the k likeliest tokens; 0 and -1 keep all.
    top_p: keep the smallest set of likeliest tokens whose probabilities sum to at least top_p, in (0, 1].
    min_p: drop tokens less likely than min_p times the likeliest, in [0, 1].
    n: the number of completions of the prompt; must be 1 with temperature 0, where all would be equal.
    seed: the request's own seed; its random numbers do not depend on the batch. None or -1 derives a seed
        from the engine's.
    max_tokens: the maximum number of tokens to generate; None: as many as `max_model_len` leaves room for.
    repetition_penalty: above 1 makes tokens of prompt and output less likely, below 1 more likely; above 0.
    frequency_penalty: subtracted from a token's logit once for each occurrence in the output; from -2 to 2.
    presence_penalty: subtracted once from the logit of each token in the output; from -2 to 2.
    logit_bias: added to the logits of token ids, `{id: number}`; -inf forbids a token.
    logits_processors: functions (output ids, logits) -> logits, or (prompt ids, output ids, logits).
        Each is called for every token, before other processing, with a float32 tensor [vocabulary]. Not with
        several GPUs.
    logprobs: return the logprob of each output token and of this number of likeliest tokens. 0: the output
        tokens alone; True: 1; -1: the whole vocabulary; None: no logprobs. At most `max_logprobs` of `LLM`.
    logprob_token_ids: return the logprobs of these tokens at each position, and the output token's, instead
        of the likeliest tokens'; at most 128, and `logprobs` None or their number.
    prompt_logprobs: as `logprobs`, for prompt tokens; `max_tokens` may then be 0.
    min_tokens: the number of tokens to generate before a token or stop string may end the output. With
        `structured_outputs`, a complete text may end earlier.
    ignore_eos: continue after an end-of-sequence token; no effect with `structured_outputs`.
    stop_token_ids: further tokens that end the output; the stop token is its last token.
    stop: a string or a list of strings; the first one found in the output's text ends it and is cut off.
    include_stop_str_in_output: keep the stop string, or the stop token's text, in the output's text.
    detokenize: decode the output; stop strings need it.
    skip_special_tokens: leave special tokens out of the text.
    allowed_token_ids: the only tokens that may be drawn; None: all.
    bad_words: strings that must not be generated. Each is tokenised with and without a leading space; the
        last token of either form never follows its other tokens. Other tokens may still write the same text.
    structured_outputs: the required form of the text; None: any.
    thinking_token_budget: the most tokens of thinking, with `reasoning_parser` of `LLM`; None, -1: no limit.
    """

    _call: ClassVar[str] = "SamplingParams"
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    n: int = 1
    seed: int | None = None
    max_tokens: int | None = MAX_TOKENS
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    logits_processors: Sequence[Callable[..., Any]] | None = None
    logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] | None = None
    stop: str | Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    structured_outputs: Any = None  # StructuredOutputsParams
    thinking_token_budget: int | None = None

    def __post_init__(self) -> None:
        vars(self).update(self._checked())

    @classmethod
    def from_optional(cls: type[_Params], **values: Any) -> _Params:
        """vLLM's form: None means the default, except for `max_tokens`, which it does not limit."""
        return cls(
            **{name: each for name, each in values.items() if each is not None or name == "max_tokens"}
        )

    @property
    def num_logprobs(self) -> int | None:
        """The number of tokens whose logprobs come with each output token's; -1: the vocabulary; None: none
        are requested, not even the output token's."""
        return len(self.logprob_token_ids) if self.logprob_token_ids else self.logprobs

    def clone(self: _Params) -> _Params:
        """A copy that shares nothing with this one."""
        clone = object.__new__(type(self))
        vars(clone).update(vars(self))
        for name, value in vars(self).items():
            if isinstance(value, (list, dict)):
                vars(clone)[name] = value.copy()
        return clone

    def guarded(self: _Params) -> _Params:
        """These parameters for one request, which alone ends if one of its logits processors raises."""
        if not self.logits_processors:
            return self
        guarded = self.clone()
        guarded.logits_processors = [_EXTRAS["guarded"](self.logits_processors)]
        return guarded

    def checked(self: _Params) -> _Params:
        """A copy with plain values. Checks fields set since construction: ValueError or TypeError."""
        checked = object.__new__(type(self))
        vars(checked).update(vars(self) | self._checked())  # lists and dictionaries are new
        return checked

    def _checked(self) -> dict[str, Any]:
        """All fields as plain Python values."""
        values: dict[str, Any] = {}
        for name, column in _NUMBER_FIELDS.items():
            given, expected = getattr(self, name), column.expected
            if column.dtype is np.float32:
                values[name] = check_float(name, given, expected)
            else:
                values[name] = check_int(name, given, -math.inf, expected)
            if not column.is_right(values[name]):
                raise wrong(name, given, expected)
        expected = f"an integer from 1 to {MAX_N}"
        values["n"] = 1 if self.n is None else check_int("n", self.n, 1, expected, MAX_N)
        if values["n"] > 1 and values["temperature"] == 0:
            fix = "they would all be equal; set a temperature above 0, or pass the prompt several times"
            raise ValueError(f"n must be 1 with temperature=0, not {values['n']}: {fix}")
        values["max_tokens"] = values["seed"] = None
        if self.max_tokens is not None:
            least = 1 if self.prompt_logprobs is None else 0
            expected = f"an integer of at least {least}, or None for as many as fit"
            values["max_tokens"] = check_int("max_tokens", self.max_tokens, least, expected)
            if isinstance(self.max_tokens, Default):
                values["max_tokens"] = self.max_tokens
        if self.seed is not None:
            expected = "None or an integer from -2**63 to 2**63 - 1"
            seed = check_int("seed", self.seed, -SEED_LIMIT, expected, SEED_LIMIT - 1)
            values["seed"] = None if seed == -1 else seed  # vLLM's other name of None
        for name in _FLAGS:
            check_bool(name, getattr(self, name))
        stop_token_ids = check_token_ids("stop_token_ids", self.stop_token_ids)
        values["stop_token_ids"] = list(dict.fromkeys(stop_token_ids))
        values["stop"] = check_texts("stop", self.stop)
        if values["stop"] and not self.detokenize:
            raise ValueError(f"stop={show(self.stop)} needs detokenize=True, because it is found in the text")
        return values | self._checked_extras(values["max_tokens"])

    @property
    def has_extras(self) -> bool:
        """Whether a field asks for what few requests have: see `extras/params.py`."""
        return not all(
            value is None or (type(value) is type(plain) and value == plain)
            for value, plain in [(getattr(self, name), plain) for name, plain in _EXTRA_FIELDS.items()]
        )

    def _checked_extras(self, max_tokens: int | None) -> dict[str, Any]:
        """These fields as plain Python values."""
        if not self.has_extras:
            return {name: copy(plain) for name, plain in _EXTRA_FIELDS.items()}
        checked: dict[str, Any] = _EXTRAS["params"](self, max_tokens)
        return checked
