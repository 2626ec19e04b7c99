"""SamplingParams: the sampling parameters of a request, declared. `checks.py` checks them.

A parameter is told here, once: the help and the table of docs/options.md follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeVar

from nanovllm.checks import Default, checked_params
from nanovllm.config import option, told
from nanovllm.doors import EXTRAS, find
from nanovllm.names import FieldsOfOthers, takes_others

_Params = TypeVar("_Params", bound="SamplingParams")
MAX_TOKENS = Default(64)


@told
@takes_others
@dataclass(kw_only=True)
class SamplingParams(FieldsOfOthers):
    """The sampling parameters of one request. All are keyword arguments; a request keeps its own copy.

    Values are checked here and when a request is made: ValueError or TypeError names the field, the value and
    the fix. vLLM's further arguments accept only their neutral value.
    """

    _call = "SamplingParams"
    # fmt: off
    temperature: float = option(1.0, "0 is greedy. Otherwise logits are divided by it.",
        "Negative, or too small or too large for float32.")
    top_k: int = option(0, "Keep the k likeliest tokens. 0 and -1 keep all.", "Below -1.")
    top_p: float = option(1.0, "Keep the smallest set of likeliest tokens whose probabilities sum to at "
        "least `top_p`.", "Outside (0, 1].")
    min_p: float = option(0.0, "Drop tokens less likely than `min_p` times the likeliest.", "Outside [0, 1].")
    n: int = option(1, "Completions of the prompt, in `outputs`. The prompt is computed once; they share "
        "its full KV blocks, and copy the last one. The first uses the request's seed, the others derive "
        "theirs from it.",
        "Below 1 or above 16,384; above 1 with `temperature=0`, as in vLLM, because all would be equal.")
    seed: int | None = option(None, "The request's own seed: its random numbers do not depend on the "
        "batch. `None` and -1: a seed from the engine's seed and the request's number.",
        "Outside -2^63 to 2^63 - 1.")
    max_tokens: int | None = option(MAX_TOKENS, "Tokens to generate, at most. `None`: what `max_model_len` "
        "leaves room for. If most answers of a call end at a default that nobody set, a warning says so, "
        "once a call.", "Below 1; with `prompt_logprobs`, below 0.")
    min_tokens: int = option(0, "Tokens to generate before an end-of-sequence or stop token is allowed, "
        "also with `ignore_eos`. A stop string counts only if a later token completes it.",
        "Below 0, or above `max_tokens`.")
    repetition_penalty: float = option(1.0, "Logits of tokens in prompt or output are divided by it if "
        "positive, else multiplied.", "0 and below.")
    frequency_penalty: float = option(0.0, "Subtracted from a token's logit once for each occurrence in "
        "the output.", "Outside [-2, 2].")
    presence_penalty: float = option(0.0, "Subtracted once from the logit of each token that is in the "
        "output.", "Outside [-2, 2].")
    logit_bias: Mapping[int, float] | None = option(None, "Added to the logits of tokens, `{token id: "
        "number}`; `-inf` forbids a token.", "Ids outside the vocabulary; numbers that float32 cannot hold.")
    logits_processors: Sequence[Callable[..., Any]] | None = option(None, "Functions `(output ids, logits) "
        "-> logits`, or `(prompt ids, output ids, logits) -> logits`, called for every token, before all "
        "other processing, with a float32 tensor of the vocabulary.",
        "With several GPUs or replicas; functions that take neither form; a result of another shape than "
        "the logits.")
    logprobs: int | None = option(None, "The logprob of each output token and of this number of likeliest "
        "tokens: `outputs[0].logprobs`, a list of `{token id: Logprob}`. 0: the output tokens alone. "
        "`True`: 1. -1: the vocabulary.", "Above `max_logprobs`.")
    logprob_token_ids: Sequence[int] | None = option(None, "The logprobs of these tokens, without ranks, "
        "instead of those of the likeliest ones: a label's chance without the whole vocabulary. Up to 128, "
        "whatever `max_logprobs` is.", "`logprobs` of another number; ids outside the vocabulary.")
    prompt_logprobs: int | None = option(None, "As `logprobs`, for prompt tokens: `out.prompt_logprobs`, "
        "whose first entry is None. They are computed even if the prefix cache holds the prompt. "
        "`max_tokens=0` then generates nothing.", "Above `max_logprobs`.")
    ignore_eos: bool = option(False, "Continue after an end-of-sequence token (of config.json, "
        "generation_config.json or the tokenizer). No effect with `structured_outputs`.")
    stop_token_ids: Sequence[int] | None = option(None, "Further tokens that end the output. The stop "
        "token is the last of `token_ids`. Repeated ids count once.", "Ids outside the vocabulary.")
    stop: str | Sequence[str] | None = option(None, "A string or a list of strings. The first one found in "
        "the text ends the output and is cut off, however it is split into tokens. `token_ids` keeps all "
        "tokens up to the one that completed it; `stop_reason` is the string.",
        "Empty strings; more than 1,000 or 65,536 characters in all; any without a tokenizer.")
    include_stop_str_in_output: bool = option(False, "The text ends with the stop string or token.")
    detokenize: bool = option(True, "`False`: `text` is empty, and takes no time.", "`False` with `stop`.")
    skip_special_tokens: bool = option(True, "Leave special tokens out of `text`; stop strings then never "
        "match them.")
    allowed_token_ids: Sequence[int] | None = option(None, "The only tokens that may be drawn, "
        "end-of-sequence tokens too. `None`: all.", "Ids outside the vocabulary; an empty list.")
    bad_words: Sequence[str] | None = option(None, "Strings that must not be generated: each is tokenised "
        "with and without a leading space, and its last token never follows its others. A word of one "
        "token is never drawn. Another tokenisation of it can still appear, and so can a longer word that "
        "begins with it.",
        "Empty strings; more than 5,000 or 262,144 characters in all; any without a tokenizer.")
    structured_outputs: Any = option(None, "The required form of the text, see "
        "[below](#structured-outputs).",
        "A constraint that llguidance rejects or that is above the limits; any without a tokenizer.")
    thinking_token_budget: int | None = option(None, "The tokens that an answer may think; then [the "
        "thinking is closed](#thinking-and-tool-calls) and the text follows. 0 closes it at once, -1 and "
        "`None` never.", "Without `reasoning_parser`; with an end mark that is no single token.")
    repetition_detection: Any = option(None, "Ends an output that [repeats itself]"
        "(#answers-that-repeat-themselves).", "Sizes above 1,024; `min_count` below 2.")
    extra_args: Mapping[str, Any] | None = option(None, "What the request tells [classes of logits "
        "processors](#classes-of-logits-processors); else no effect.", "Keys that are no strings.")
    trace_decode_token_ids: Sequence[int] | None = option(None, "The output is these tokens, whatever the "
        "model would draw; `logprobs` are the model's, so they score a known answer. Lengths, stops, "
        "penalties, biases and logits processors do not act on it.",
        "No tokens; ids outside the vocabulary; another rule on the tokens; `n` above 1.")
    # fmt: on

    def __post_init__(self) -> None:
        vars(self).update(checked_params(self))

    @classmethod
    def from_optional(cls: type[_Params], **values: Any) -> _Params:
        """vLLM's form: None means the default, except for `max_tokens`, which it does not limit."""
        return cls(**{k: each for k, each in values.items() if each is not None or k == "max_tokens"})

    @property
    def num_logprobs(self) -> int | None:
        """The number of tokens whose logprobs come with each output token's; -1: the vocabulary; None: none
        are requested, not even the output token's."""
        return len(self.logprob_token_ids) if self.logprob_token_ids else self.logprobs

    def clone(self: _Params) -> _Params:
        """A copy that shares nothing with this one."""
        clone = object.__new__(type(self))
        own = vars(self).items()
        vars(clone).update({k: copy(each) if isinstance(each, (list, dict)) else each for k, each in own})
        return clone

    def guarded(self: _Params) -> _Params:
        """These parameters for one request, which alone ends if one of its logits processors raises."""
        guarded = self.clone()
        guarded.logits_processors = [find(EXTRAS["guarded"])(self.logits_processors)]
        return guarded
