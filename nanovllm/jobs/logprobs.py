"""The logprobs of an answer as JSON: for our rows, and in OpenAI's two formats. Computes none."""

from __future__ import annotations

from typing import Any

from nanovllm.outputs import CompletionOutput, Logprob

DIGITS = 4  # after the decimal point


def plain_logprobs(output: CompletionOutput) -> list[list[dict[str, Any]]] | None:
    """For each token a list: the drawn token, then the requested likeliest tokens."""
    if output.logprobs is None:
        return None
    return [
        [
            {"token_id": token_id, "token": each.decoded_token, "logprob": _number(each), "rank": each.rank}
            for token_id, each in row.items()
        ]
        for row in output.logprobs
    ]


def chat_logprobs(output: CompletionOutput, num_top: int) -> dict[str, Any] | None:
    """`logprobs` of a choice of a chat completion, with `num_top` likeliest tokens."""
    if output.logprobs is None:
        return None
    content = []
    for token_id, row in zip(output.token_ids, output.logprobs, strict=True):
        top = [_chat_entry(each) for each in likeliest(row, num_top)]
        content.append({**_chat_entry(row[token_id]), "top_logprobs": top})
    return {"content": content}


def completion_logprobs(output: CompletionOutput, num_top: int) -> dict[str, Any] | None:
    """`logprobs` of a choice of a completion, with `num_top` likeliest tokens."""
    if output.logprobs is None:
        return None
    tokens = [row[token_id] for token_id, row in zip(output.token_ids, output.logprobs, strict=True)]
    offsets, end = [], 0
    for token in tokens:
        offsets.append(end)
        end += len(token.decoded_token or "")
    return {
        "tokens": [token.decoded_token for token in tokens],
        "token_logprobs": [_number(token) for token in tokens],
        "top_logprobs": [
            {each.decoded_token: _number(each) for each in likeliest(row, num_top)} for row in output.logprobs
        ],
        "text_offset": offsets,
    }


def likeliest(row: dict[int, Logprob], count: int) -> list[Logprob]:
    """The `count` likeliest entries, the likeliest first."""
    return sorted(row.values(), key=lambda each: -each.logprob)[:count]


def _chat_entry(token: Logprob) -> dict[str, Any]:
    text = token.decoded_token or ""
    return {"token": text, "logprob": _number(token), "bytes": list(text.encode(errors="replace"))}


def _number(token: Logprob) -> float:
    """JSON has no infinity; OpenAI writes -9999."""
    return round(max(token.logprob, -9999.0), DIGITS)
