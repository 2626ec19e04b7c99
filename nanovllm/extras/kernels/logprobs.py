"""Logprobs of chosen tokens, and of the likeliest tokens, without sorting the vocabulary.

One pass over the logits computes sums, ranks and the maxima of segments. The k likeliest tokens are in the k
segments with the largest maxima, so only these are searched. Equal logits come in the order of their ids.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.extras.columns import LogprobColumns
from nanovllm.kernels.compat import jit, next_power_of_2, tl, use_triton
from nanovllm.kernels.filters import SEGMENT

BLOCK = 2048  # vocabulary entries of a program
FEW = 64  # up to this number, likeliest tokens are taken one by one


@jit("ids_ptr")
def _scan_kernel(
    logits_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    block_max_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    seg_max_ptr: tl.tensor,
    stride: int,
    vocab: int,
    blocks: int,
    BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr,
) -> None:
    """One program per (row, block): its largest logit, the sum of exp(logit - largest), the number of logits
    at least as large as the chosen token's, and the largest logit of each segment. NaN counts as +inf."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    index = block * BLOCK + tl.arange(0, BLOCK)
    live = index < vocab
    chosen = tl.load(logits_ptr + row * stride + tl.maximum(tl.load(ids_ptr + row), 0)).to(tl.float32)
    x = tl.load(logits_ptr + row * stride + index, mask=live, other=float("-inf")).to(tl.float32)
    x = tl.where(x < float("inf"), x, float("inf"))
    PER_BLOCK: tl.constexpr = BLOCK // SEGMENT
    seg_max = tl.max(tl.reshape(x, (PER_BLOCK, SEGMENT)), axis=1)
    tl.store(seg_max_ptr + (row * blocks + block) * PER_BLOCK + tl.arange(0, PER_BLOCK), seg_max)
    top = tl.max(x, axis=0)
    finite = (top > float("-inf")) & (top < float("inf"))
    total = tl.sum(tl.exp(x - tl.where(finite, top, 0.0)), axis=0)
    cell = row * blocks + block
    tl.store(block_max_ptr + cell, top)
    tl.store(sums_ptr + cell, tl.where(finite, total, 1.0))
    tl.store(counts_ptr + cell, tl.sum(((x >= chosen) & live).to(tl.int32), axis=0))


@jit()
def _normalizer_kernel(
    block_max_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    normalizers_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    blocks: int,
    PADDED: tl.constexpr,
) -> None:
    """One program per row: the log-sum-exp of its blocks, NaN if not finite, and its rank.

    It always adds in the same order; a reduction of torch adds in an order that follows the number of rows.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, PADDED)
    cells = row * blocks + block
    block_max = tl.load(block_max_ptr + cells, mask=block < blocks, other=float("-inf"))
    sums = tl.load(sums_ptr + cells, mask=block < blocks, other=0.0)
    top = tl.max(block_max, axis=0)
    total = tl.sum(sums * tl.exp(block_max - top), axis=0)
    tl.store(normalizers_ptr + row, top + tl.log(total))
    counts = tl.load(counts_ptr + cells, mask=block < blocks, other=0)
    tl.store(ranks_ptr + row, tl.sum(counts, axis=0).to(tl.int64))


@jit("ids_ptr", "k")
def _take_kernel(
    logits_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    normalizers_ptr: tl.tensor,
    seg_max_ptr: tl.tensor,
    values_ptr: tl.tensor,
    out_ids_ptr: tl.tensor,
    stride: int,
    vocab: int,
    segments: int,
    k: int,
    SEGMENT: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """One program per row: the chosen token, then the k likeliest tokens. Each is the best remaining token of
    the segment with the largest remaining maximum. Remaining tokens come after the last one in order."""
    row = tl.program_id(0).to(tl.int64)
    normalizer = tl.load(normalizers_ptr + row)
    chosen = tl.maximum(tl.load(ids_ptr + row), 0)
    cell = row * (k + 1)
    tl.store(values_ptr + cell, tl.load(logits_ptr + row * stride + chosen).to(tl.float32) - normalizer)
    tl.store(out_ids_ptr + cell, chosen)
    place = tl.arange(0, PADDED)
    alive = place < segments
    seg_max = tl.load(seg_max_ptr + row * segments + place, mask=alive, other=float("-inf"))
    last = tl.full((), float("inf"), tl.float32)
    last_id = tl.full((), -1, tl.int32)
    for taken in range(0, k):
        best = tl.max(tl.where(alive, seg_max, float("-inf")), axis=0)
        segment = tl.min(tl.where(alive & (seg_max == best), place, PADDED), axis=0)
        index = segment * SEGMENT + tl.arange(0, SEGMENT)
        x = tl.load(logits_ptr + row * stride + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
        x = tl.where(x < float("inf"), x, float("inf"))
        left = (index < vocab) & ((x < last) | ((x == last) & (index > last_id)))
        last = tl.max(tl.where(left, x, float("-inf")), axis=0)
        last_id = tl.min(tl.where(left & (x == last), index, vocab - 1), axis=0)
        tl.store(values_ptr + cell + 1 + taken, last - normalizer)
        tl.store(out_ids_ptr + cell + 1 + taken, last_id.to(tl.int64))
        left = left & (index != last_id)
        next_max = tl.max(tl.where(left, x, float("-inf")), axis=0)
        seg_max = tl.where(place == segment, next_max, seg_max)
        alive = alive & ((place != segment) | (tl.sum(left.to(tl.int32), axis=0) > 0))


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, k: int, normalize: bool = True
) -> LogprobColumns[torch.Tensor]:
    """The logprob and the rank of one token of each row, and the k likeliest tokens, likeliest first.

    logits: [n, V] float, contiguous rows. token_ids: [n] int64; negative ids count as 0. k: at most V, larger
    values count as V. normalize: return log-softmax in float32, else the logits. rank: the number of tokens
    that are at least as likely, as in vLLM. All values of a row with NaN, +inf or no finite logit are NaN;
    its ids and rank are undefined.
    """
    k = min(k, logits.shape[1])
    if use_triton(logits):
        return _token_logprobs_triton(logits, token_ids, k, normalize)
    chosen = token_ids.clamp(min=0)[:, None]
    ranks = (logits >= logits.gather(1, chosen)).sum(dim=1)
    wide = logits.float()
    padded = F.pad(wide, (0, -logits.shape[1] % SEGMENT), value=float("-inf"))
    seg_max = padded.view(len(logits), -1, SEGMENT).amax(dim=2)
    normalizers = _normalizers(wide.logsumexp(dim=1), normalize)
    return _with_top_tokens(logits, chosen, ranks, normalizers, seg_max, k)


def _token_logprobs_triton(
    logits: torch.Tensor, token_ids: torch.Tensor, k: int, normalize: bool
) -> LogprobColumns[torch.Tensor]:
    """`token_logprobs` with Triton."""
    (rows, vocab), device = logits.shape, logits.device
    blocks = -(-vocab // BLOCK)
    segments = blocks * BLOCK // SEGMENT
    block_max, sums = torch.empty(2, rows, blocks, dtype=torch.float32, device=device)
    counts = torch.empty(rows, blocks, dtype=torch.int32, device=device)
    seg_max = torch.empty(rows, segments, dtype=torch.float32, device=device)
    if rows:
        _scan_kernel[(rows, blocks)](
            logits, token_ids, block_max, sums, counts, seg_max, logits.stride(0), vocab, blocks,
            BLOCK=BLOCK, SEGMENT=SEGMENT, num_warps=2,
        )  # fmt: skip
    normalizers = torch.empty(rows, dtype=torch.float32, device=device)
    ranks = torch.empty(rows, dtype=torch.int64, device=device)
    if rows:
        _normalizer_kernel[(rows,)](
            block_max, sums, counts, normalizers, ranks, blocks, PADDED=next_power_of_2(blocks), num_warps=1
        )
    normalizers = _normalizers(normalizers, normalize)
    if k > FEW:
        return _with_top_tokens(logits, token_ids.clamp(min=0)[:, None], ranks, normalizers, seg_max, k)
    values = torch.empty(rows, 1 + k, dtype=torch.float32, device=device)
    ids = torch.empty(rows, 1 + k, dtype=torch.int64, device=device)
    if rows:
        _take_kernel[(rows,)](
            logits, token_ids, normalizers, seg_max, values, ids, logits.stride(0), vocab, segments, k,
            SEGMENT=SEGMENT, PADDED=next_power_of_2(segments), num_warps=4,
        )  # fmt: skip
    return LogprobColumns(values, ids, ranks)


def _normalizers(log_sums: torch.Tensor, normalize: bool) -> torch.Tensor:
    """What to subtract from the logits of each row [n]: NaN for a row whose log-sum-exp is not finite."""
    nothing = log_sums * 0  # NaN if not finite
    return log_sums + nothing if normalize else nothing


def _with_top_tokens(
    logits: torch.Tensor,
    chosen: torch.Tensor,
    ranks: torch.Tensor,
    normalizers: torch.Tensor,
    seg_max: torch.Tensor,
    k: int,
) -> LogprobColumns[torch.Tensor]:
    """The logprobs of chosen tokens [n, 1] and of the k likeliest tokens."""
    values, ids = _top_tokens(logits, seg_max, k)
    values = torch.cat([logits.gather(1, chosen).float(), values], dim=1) - normalizers[:, None]
    return LogprobColumns(values, torch.cat([chosen, ids], dim=1), ranks)


def _top_tokens(logits: torch.Tensor, seg_max: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest logits [n, k] float32 and their ids, in descending order; ties in ascending id order."""
    rows, vocab = logits.shape
    segments = torch.arange(seg_max.shape[1], device=logits.device).expand_as(seg_max)
    best = _keys(seg_max, segments).topk(min(k, seg_max.shape[1]), dim=1).indices
    inside = torch.arange(SEGMENT, device=logits.device)
    ids = (best[:, :, None] * SEGMENT + inside).view(rows, -1)
    values = logits.gather(1, ids.clamp(max=vocab - 1)).float()
    order = _keys(values, ids).masked_fill_(ids >= vocab, torch.iinfo(torch.int64).min)
    places = order.topk(k, dim=1).indices
    return values.gather(1, places), ids.gather(1, places)


def _keys(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Unique int64 keys that order float32 values; among equal values the lower id has the larger key."""
    bits = (values + 0.0).view(torch.int32).long()  # + 0.0: -0.0 becomes 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered << 32) | (0xFFFFFFFF - ids)
