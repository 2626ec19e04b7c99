"""The results of `score`, `embed` and `beam_search`, from the outputs of plain requests.

Queues nothing: beam search gets a function that returns the likeliest next tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from nanovllm.answers import Logprob, RequestOutput, unlisted
from nanovllm.checks import show
from nanovllm.extras.beams import BeamSearchParams
from nanovllm.extras.logprobs import LogprobDicts
from nanovllm.extras.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    ScoreOutput,
)
from nanovllm.pooling_params import PoolingParams

# The likeliest next tokens of each token list, by id.
_NextTokens = Callable[[Sequence[list[int]]], "Sequence[Mapping[int, Logprob]]"]


@dataclass(slots=True)
class _Beam:
    """A prompt and the tokens chosen after it."""

    tokens: list[int]
    logprobs: list[Mapping[int, Logprob]] = field(default_factory=list)
    cum_logprob: float = 0.0


def beam_search(
    prompts: Sequence[list[int]],
    params: BeamSearchParams,
    next_tokens: _NextTokens,
    eos_token_ids: Sequence[int],
    decode: Callable[[list[int]], str | None],
    longest: int,
) -> list[BeamSearchOutput]:
    """Return the `beam_width` best sequences of each prompt, best first.

    Each round extends every beam by its 2 * `beam_width` likeliest tokens and keeps the `beam_width` best
    results. An end-of-sequence token ends its beam. The score is the sum of logprobs divided by
    length ** `length_penalty`, where the length counts the generated tokens with an end-of-sequence token, as
    in vLLM and transformers. longest: the maximum number of tokens of a beam.
    """
    width = params.beam_width
    running = [[_Beam(list(prompt))] for prompt in prompts]
    ended: list[list[BeamSearchSequence]] = [[] for _ in prompts]
    ends = frozenset() if params.ignore_eos else frozenset(eos_token_ids)

    def score(beam: _Beam) -> float:
        return float(beam.cum_logprob / max(len(beam.logprobs), 1) ** params.length_penalty)

    def close(beam: _Beam, reason: str) -> BeamSearchSequence:
        stop = beam.tokens[-1] if reason == "stop" else None
        is_cut = stop is not None and not params.include_stop_str_in_output
        text = decode(beam.tokens[:-1] if is_cut else beam.tokens)
        value = score(beam)
        return BeamSearchSequence(
            beam.tokens, beam.logprobs, text, beam.cum_logprob, reason, stop_reason=stop, score=value
        )

    for _ in range(params.max_tokens):
        beams = [beam for group in running for beam in group]
        if not beams:
            break
        found = iter(next_tokens([beam.tokens for beam in beams]))
        for index, group in enumerate(running):
            candidates: list[_Beam] = []
            for beam in group:
                likeliest = next(found)
                for token_id, logprob in likeliest.items():
                    tokens = [*beam.tokens, token_id]
                    grown = _Beam(tokens, [*beam.logprobs, likeliest], beam.cum_logprob + logprob.logprob)
                    if token_id in ends:
                        ended[index].append(close(grown, "stop"))
                    else:
                        candidates.append(grown)
            best = sorted(candidates, key=score, reverse=True)[:width]
            ended[index] += [close(beam, "length") for beam in best if len(beam.tokens) >= longest]
            running[index] = [beam for beam in best if len(beam.tokens) < longest]
    outputs = []
    for index, group in enumerate(running):
        whole = [*ended[index], *(close(beam, "length") for beam in group)]
        outputs.append(BeamSearchOutput(sorted(whole, key=lambda beam: beam.score, reverse=True)[:width]))
    return outputs


def score_output(output: RequestOutput, first: int) -> ScoreOutput:
    """The score of the prompt's tokens from `first` on. The output's prompt logprobs include the likeliest
    token at each position, unless it has an error."""
    token_ids = list(unlisted(output, "prompt_token_ids")[first:])
    if output.error is not None:
        unknown = [math.nan] * len(token_ids)
        return ScoreOutput(token_ids, unknown, False, output.num_cached_tokens, output.error)
    logprobs = unlisted(output, "prompt_logprobs")
    assert isinstance(logprobs, LogprobDicts)
    columns = logprobs.columns
    return ScoreOutput(
        token_ids,
        columns.values[:, 0].tolist(),
        bool((columns.token_ids[:, 0] == columns.token_ids[:, 1]).all()),
        output.num_cached_tokens,
    )


def parse_pooling_params(
    params: PoolingParams | Sequence[PoolingParams] | None,
    num_prompts: int,
    normalize: bool,
    hidden_size: int,
) -> list[tuple[bool, int]]:
    """Whether each prompt's embedding is normalised, by default `normalize`, and how many values it keeps.

    TypeError or ValueError names the element that is wrong.
    """
    if params is None:
        params = PoolingParams()
    if isinstance(params, PoolingParams):
        params = [params] * num_prompts
    if not isinstance(params, Sequence) or isinstance(params, str):
        raise TypeError(f"pooling_params must be PoolingParams or a list of them, not {show(params)}")
    if len(params) != num_prompts:
        raise ValueError(
            f"{len(params)} pooling_params for {num_prompts} prompts; pass one for all or one for each"
        )
    for index, each in enumerate(params):
        if not isinstance(each, PoolingParams):
            raise TypeError(f"pooling_params[{index}] must be PoolingParams, not {show(each)}")
        if (each.dimensions or 0) > hidden_size:
            raise ValueError(
                f"pooling_params: dimensions={each.dimensions} is more than this model's {hidden_size}"
            )
    return [(each.normalizes(normalize), each.dimensions or hidden_size) for each in params]


def embedding_output(
    output: RequestOutput, is_mean: bool, normalize: bool, dimensions: int
) -> EmbeddingRequestOutput:
    """The embedding of a prompt, from the sum of its hidden states: the first `dimensions` values of it."""
    values = np.empty(0) if output.pooled is None else np.asarray(output.pooled, np.float32)[:dimensions]
    if is_mean:
        values = values / max(len(output.prompt_token_ids), 1)
    if normalize:
        values = values / max(float(np.linalg.norm(values)), 1e-12)
    return EmbeddingRequestOutput(
        output.request_id,
        EmbeddingOutput(values.tolist()),
        output.prompt_token_ids,
        output.num_cached_tokens,
        prompt=output.prompt,
        error=output.error or ("the request was aborted" if output["finish_reason"] == "abort" else None),
        index=output.index,
    )
