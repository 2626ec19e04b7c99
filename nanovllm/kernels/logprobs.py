"""Logprobs of chosen tokens, and the likeliest tokens beside them, without sorting the vocabulary.

The k likeliest tokens are in the k segments of the vocabulary with the largest maxima, so that only these are
looked at. Equal logits come in the order of their ids.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.kernels.compat import use_triton
from nanovllm.kernels.filters import SEGMENT
from nanovllm.kernels.sampling import summarize_triton


class TokenLogprobTensors(NamedTuple):
    """As `batch.TokenLogprobs`, on the device."""

    values: torch.Tensor  # [n, 1 + k] float32
    token_ids: torch.Tensor  # [n, 1 + k] int64
    ranks: torch.Tensor  # [n] int64


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, k: int, normalize: bool = True
) -> TokenLogprobTensors:
    """The logprob and the rank of one token of each row, and the k likeliest tokens, likeliest first.

    logits: [n, V] float. token_ids: [n] int64; one below 0 counts as 0. k: up to V; a larger one is V.
    normalize: give log-softmax, in float32; else the logits themselves. rank: how many tokens are at least as
    likely, as in vLLM.
    """
    k = min(k, logits.shape[1])
    chosen_ids = token_ids.clamp(min=0)[:, None]
    chosen = logits.gather(1, chosen_ids)
    ranks = (logits >= chosen).sum(dim=1)
    if use_triton(logits):
        normalizer, crests = summarize_triton(logits)
    else:
        normalizer, crests = _summarize_reference(logits)
    values, ids = _top_tokens(logits, crests, k)
    values = torch.cat([chosen.float(), values], dim=1)
    if normalize:
        values = values - normalizer[:, None]
    return TokenLogprobTensors(values, torch.cat([chosen_ids, ids], dim=1), ranks)


def _summarize_reference(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """log(sum(exp(logits))) [n] and the largest logit of each segment [n, segments], float32."""
    wide = logits.float()
    padded = F.pad(wide, (0, -logits.shape[1] % SEGMENT), value=float("-inf"))
    return wide.logsumexp(dim=1), padded.view(len(logits), -1, SEGMENT).amax(dim=2)


def _top_tokens(logits: torch.Tensor, crests: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest logits [n, k] float32 and their ids, falling; equal ones by rising id."""
    rows, vocab = logits.shape
    segments = torch.arange(crests.shape[1], device=logits.device).expand_as(crests)
    best = _keys(crests, segments).topk(min(k, crests.shape[1]), dim=1).indices
    inside = torch.arange(SEGMENT, device=logits.device)
    ids = (best[:, :, None] * SEGMENT + inside).view(rows, -1)
    values = logits.gather(1, ids.clamp(max=vocab - 1)).float()
    order = _keys(values, ids).masked_fill_(ids >= vocab, torch.iinfo(torch.int64).min)
    places = order.topk(k, dim=1).indices
    return values.gather(1, places), ids.gather(1, places)


def _keys(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 keys, all different, that order float32 values, the lower id first among equals."""
    bits = (values + 0.0).view(torch.int32).long()  # + 0.0: -0.0 becomes 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered << 32) | (0xFFFFFFFF - ids)
