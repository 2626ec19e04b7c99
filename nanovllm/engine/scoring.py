"""Creates the results of `score` and `embed` from the outputs of requests that generate nothing."""

from __future__ import annotations

import math

import numpy as np

from nanovllm.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput, ScoreOutput
from nanovllm.text.logprobs import LogprobDicts


def score_output(output: RequestOutput, first: int) -> ScoreOutput:
    """The score of the prompt's tokens from `first` on. The output's prompt logprobs include the likeliest
    token at each position, unless it has an error."""
    token_ids = output.prompt_token_ids[first:]
    if output.error is not None:
        unknown = [math.nan] * len(token_ids)
        return ScoreOutput(token_ids, unknown, False, output.num_cached_tokens, output.error)
    assert isinstance(output.prompt_logprobs, LogprobDicts)
    columns = output.prompt_logprobs.columns
    return ScoreOutput(
        token_ids,
        columns.values[:, 0].tolist(),
        bool((columns.token_ids[:, 0] == columns.token_ids[:, 1]).all()),
        output.num_cached_tokens,
    )


def embedding_output(output: RequestOutput, is_mean: bool, normalize: bool) -> EmbeddingRequestOutput:
    """The embedding of a prompt, from the sum of its hidden states."""
    values = np.empty(0) if output.pooled is None else np.asarray(output.pooled, np.float32)
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
