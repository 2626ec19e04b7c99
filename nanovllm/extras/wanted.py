"""Which prompt tokens a step scores or pools, and which sequences get the logprobs of drawn tokens.

Computes nothing; `ExtrasEnding` does.
"""

from __future__ import annotations

import numpy as np

from nanovllm.batch import Batch, ScoredTokens, TokenLogprobs, WantedTokens
from nanovllm.plan.columns import num_likeliest
from nanovllm.plan.sequence import Sequence


def take_prompt_tokens(
    seqs: list[Sequence], query_lens: list[int]
) -> tuple[ScoredTokens | None, WantedTokens | None]:
    """Return the prompt tokens of a prefill step to score, and those to pool.

    Each token is returned once, even if its sequence is preempted and computed again.
    """
    start, num_logprobs = 0, 0
    scored: list[tuple[int, int, int, int]] = []  # (first place, count, row, first position)
    pooled: list[tuple[int, int, int, int]] = []
    for row, (seq, query_len) in enumerate(zip(seqs, query_lens, strict=True)):
        end = seq.num_computed_tokens
        if seq.next_wanted is not None:
            is_scored = seq.pooling is None
            first = max(seq.next_wanted, end - query_len)
            last = len(seq.prompt_ids) - is_scored
            count = min(end, last) - first
            if count > 0:
                (scored if is_scored else pooled).append((start + first - end + query_len, count, row, first))
            seq.next_wanted = None if end >= last else max(seq.next_wanted, end)
            if is_scored:
                num_logprobs = max(num_logprobs, num_likeliest(seq.params.prompt_logprobs or 0))
        start += query_len
    targets = [
        np.array(seqs[row].prompt_ids[first + 1 : first + 1 + count], np.int64)
        for _, count, row, first in scored
    ]
    scores = None
    if scored:
        scores = ScoredTokens(_wanted(scored), np.concatenate(targets), num_logprobs)
    return scores, _wanted(pooled) if pooled else None


def keep_logprobs(batch: Batch, logprobs: TokenLogprobs, seqs: dict[int, Sequence]) -> None:
    """Give the sequences, by row, the logprobs of a step's drawn tokens. A sequence keeps no more than it
    asked for: a step's columns are as wide as its widest row."""
    asked: dict[tuple[int, bool], list[int]] = {}
    for row, seq in seqs.items():
        if batch.draws[row] and (number := seq.params.num_logprobs) is not None:
            asked.setdefault((num_likeliest(number), bool(seq.params.logprob_token_ids)), []).append(row)
    ids = None if batch.extras is None else batch.extras.asked_ids
    for (k, by_id), rows in asked.items():
        if by_id and ids is not None:
            columns = logprobs.take_asked(np.array(rows), ids, k)
        else:
            width = 0 if ids is None else ids.shape[1]
            columns = logprobs.take(np.array(rows), min(k, logprobs.values.shape[1] - 1 - width))
        for place, row in enumerate(rows):
            seqs[row].logprobs.append((columns, place))


def _wanted(ranges: list[tuple[int, int, int, int]]) -> WantedTokens:
    places = [np.arange(place, place + count, dtype=np.int32) for place, count, _, _ in ranges]
    rows = np.array([row for _, _, row, _ in ranges], np.int64)
    return WantedTokens(np.concatenate(places), np.repeat(rows, [count for _, count, _, _ in ranges]))
