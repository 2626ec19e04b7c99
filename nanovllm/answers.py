"""What a request returns. RequestOutput reads like vLLM's object and like nano-vLLM's dictionary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeAlias, TypeVar

from nanovllm.names import elsewhere

KEYS = ("text", "token_ids", "finish_reason")  # of a RequestOutput as a dictionary
_Output = TypeVar("_Output")


@dataclass(slots=True)  # a frozen one takes three times as long to make, and a token has several
class Logprob:
    """The natural logarithm of a token's probability, and its rank among all tokens.

    rank: 1 is the likeliest token; None if not requested.
    decoded_token: the token's text. If several tokens form one character, the last one has the text and the
    others have "". None without a tokenizer and with `detokenize=False`.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


SampleLogprobs: TypeAlias = list[dict[int, Logprob]]  # for each output token, by token id
PromptLogprobs: TypeAlias = list[dict[int, Logprob] | None]  # the first token has none


class _Listed:
    """A field with a list that is made when it is first read, of what it was set to."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, output: object, owner: type) -> Any:
        if output is None:
            return None  # the field's default
        values = vars(output)
        if values[self._name] is not None and not isinstance(values[self._name], list):
            values[self._name] = list(values[self._name])
        return values[self._name]

    def __set__(self, output: object, value: Any) -> None:
        vars(output)[self._name] = value


def unlisted(output: object, name: str) -> Any:
    """The value of a field with a list, without making its list."""
    return vars(output)[name]


def changed(output: _Output, **values: Any) -> _Output:
    """A copy of an output with other values, without making its lists."""
    copied = copy(output)
    for name, value in values.items():
        setattr(copied, name, value)
    return copied


@dataclass(slots=True)  # as `Logprob`; each request has one
class RequestMetrics:
    """The timestamps of a request, in seconds since 1970 by the host's clock; None for what never happened.

    The host takes them when it plans a step or reads its tokens. With `n` above 1, the `first_` timestamps
    are the earliest of all completions, and `last_token_time` and `finished_time` the latest.

    arrival_time: when the request was queued.
    first_scheduled_time: when the first step for it was launched.
    first_token_time: when its first token was read.
    last_token_time: when its last token was read; None for an aborted request.
    finished_time: when it ended, for any reason.
    time_in_queue: seconds from arrival_time to first_scheduled_time.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    time_in_queue: float | None = None


@dataclass
class CompletionOutput:
    """One answer. `finish_reason` is "stop", "length", "repetition", "abort" or "error"; None in a part.

    Its fields are mutable and in vLLM's order, like those of a RequestOutput.

    text: what follows the prompt when prompt and output are decoded together. It excludes an incomplete
    character at the end, and by default special tokens and the stop string or token that ended the output.
    token_ids: the output's tokens, including a stop token.
    stop_reason: the stop string or token id that ended the output; None for the tokenizer's own
    end-of-sequence token.
    logprobs: of each token, if requested. cumulative_logprob: the sum over the output's tokens.
    routed_experts: with `return_routed_experts`, [tokens, layers, experts of a token] int16, the likeliest
    first, for each token of prompt and output but the last one, which is not computed; 0 in a layer without
    experts. In a stream with deltas only the last part has it.
    reasoning, num_reasoning_tokens: with `reasoning_parser`, the thinking, and its tokens with marks.
    tool_calls: with `tool_parser`, in OpenAI's form, in last parts only; tool_call_errors: why others failed.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = _Listed()  # type: ignore[assignment]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    routed_experts: Any = field(default=None, repr=False, compare=False)  # a NumPy array
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_errors: list[str] | None = None
    num_reasoning_tokens: int = 0
    # what vLLM's has, and this engine never gives
    lora_request: ClassVar[None] = None
    sampling_mask: ClassVar[None] = None
    spec_decode_metrics: ClassVar[None] = None
    weight_versions: ClassVar[None] = None

    def finished(self) -> bool:
        """Whether the answer has ended; False in a part of an answer."""
        return self.finish_reason is not None


@dataclass
class RequestOutput(Mapping[str, Any]):
    """The answer to a request: `out.outputs[0].text` as in vLLM, or `out["text"]` as in nano-vLLM.

    As a dictionary it has the keys "text", "token_ids" and "finish_reason".

    prompt_logprobs: of the prompt's tokens, if requested; None if not all were computed, as after an error.
    finished: False for a part of an answer from `stream(deltas=True)`, except for the last part.
    metrics: its timestamps; None for a prompt that could not run, and for a part of an answer.
    num_cached_tokens: prompt tokens whose K/V came from the prefix cache when the request was first admitted.
    error: why `finish_reason` is "error", else None.
    index: the index of its prompt in the call.
    others: as in vLLM, unknown names are ignored.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] = _Listed()  # type: ignore[assignment]
    prompt_logprobs: PromptLogprobs | None = _Listed()  # type: ignore[assignment]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    index: int = 0
    pooled: Any = field(default=None, repr=False, compare=False)  # float32, what `Request.pooling` asks for
    # what vLLM's has, and this engine never gives
    lora_request: ClassVar[None] = None
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None
    num_cache_creation_tokens: ClassVar[None] = None
    prompt_token_id_logprobs: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None
    ec_transfer_params: ClassVar[None] = None

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        prompt_logprobs: Sequence[dict[int, Logprob] | None] | None,
        outputs: list[CompletionOutput],
        finished: bool = True,
        metrics: RequestMetrics | None = None,
        *,
        num_cached_tokens: int = 0,
        error: str | None = None,
        index: int = 0,
        pooled: Any = None,
        **others: object,
    ) -> None:
        self.request_id, self.prompt, self.outputs = request_id, prompt, outputs
        self.prompt_token_ids, self.prompt_logprobs = prompt_token_ids, prompt_logprobs  # type: ignore[assignment]
        self.finished, self.metrics, self.num_cached_tokens = finished, metrics, num_cached_tokens
        self.error, self.index, self.pooled = error, index, pooled

    def __getitem__(self, key: str) -> Any:
        if key not in KEYS:
            raise KeyError(f"{key!r}; a RequestOutput has {', '.join(map(repr, KEYS))}")
        return getattr(self.outputs[0], key)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            hint = elsewhere(name)
            raise AttributeError(f"RequestOutput has no attribute {name!r}{f'; {hint}' if hint else ''}")

    def __iter__(self) -> Iterator[str]:
        return iter(KEYS)

    def __len__(self) -> int:
        return len(KEYS)
