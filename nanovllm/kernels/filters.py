"""Filters of sampling: draws among the tokens that top-k, top-p and min-p keep, without sorting.

Functions that the sampling kernel calls, one program per row, and their reference. Kept tokens are the first
ones in the order of descending logits, ties in ascending id order. They end at a floor (a logit) and at the
last id with this logit. Only segments of the vocabulary whose largest logit reaches the floor are read.
"""

# The floor of top-k is searched for; that of min-p is known. top-p uses rejection sampling. Draw a token of
# all tokens kept so far. Accept it if the likelier tokens weigh less than top_p of the total. If not, draw
# the next token among these likelier tokens. This gives exactly the distribution over the tokens that top-p
# keeps. With top_p near 1, one pass is nearly always enough. (The idea is FlashInfer's "sorting-free"
# sampling, 2025.)

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.kernels.compat import jit, tl
from nanovllm.kernels.random_bits import draw_reference, pick, random_pair, random_pair_reference

SEGMENT = 256  # vocabulary entries
# Measured on an H200 with 256 and 512 rows of 151,936 bfloat16 logits, with flat and peaked distributions.
SEGMENTS_AT_ONCE = 16
FILTER_WARPS = 8
STAGES = 3  # of prefetching in a long pass


@jit()
def _order_key(x: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """Map float32 to int32 in the same order. SHIFT: low bits that are 0 in each `x` and are dropped."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@jit()
def _value_of(key: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """The float32 with this key. The dropped bits are 1 in the key of a negative number, else 0."""
    wide = (key << SHIFT) | tl.where(key < 0, (1 << SHIFT) - 1, 0)
    return (wide ^ ((wide >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit()
def _is_kept(x: tl.tensor, index: tl.tensor, floor: tl.tensor, last: tl.tensor) -> tl.tensor:
    """Whether tokens are kept: before the end given by `floor` and `last`."""
    return (x > floor) | ((x == floor) & (index <= last))


@jit()
def _find_segments(
    seg_max_ptr: tl.tensor, list_ptr: tl.tensor, segments: int, floor: tl.tensor, PADDED: tl.constexpr
) -> tl.tensor:
    """List the segments whose largest logit reaches `floor`, in ascending order; return their number."""
    index = tl.arange(0, PADDED)
    there = index < segments
    seg_max = tl.load(seg_max_ptr + index, mask=there, other=float("-inf"))
    reaches = there & (seg_max >= floor)
    tl.debug_barrier()  # all threads have read the previous list
    tl.store(list_ptr + tl.cumsum(reaches.to(tl.int32), axis=0) - 1, index, mask=reaches)
    tl.debug_barrier()
    return tl.sum(reaches.to(tl.int32), axis=0)


@jit()
def _load_tile(
    logits_ptr: tl.tensor,
    list_ptr: tl.tensor,
    start: int,
    count: tl.tensor,
    vocab: int,
    SEGMENT: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The logits of listed segments from `start` on, [AT_ONCE, SEGMENT], their ids, and which of them exist.

    Logits that do not exist are -inf.
    """
    place = start + tl.arange(0, AT_ONCE)
    segment = tl.load(list_ptr + place, mask=place < count, other=0)
    index = segment[:, None] * SEGMENT + tl.arange(0, SEGMENT)[None, :]
    live = (place < count)[:, None] & (index < vocab)
    x = tl.load(logits_ptr + index, mask=live, other=float("-inf")).to(tl.float32)
    return x, index, live


@jit()
def _count_from(
    logits_ptr: tl.tensor,
    list_ptr: tl.tensor,
    count: tl.tensor,
    vocab: int,
    floor: tl.tensor,
    SEGMENT: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> tl.tensor:
    """The number of tokens that reach `floor`, which is above -inf."""
    found = tl.full((AT_ONCE,), 0, tl.int32)
    for start in range(0, count, AT_ONCE):
        x, _, _ = _load_tile(logits_ptr, list_ptr, start, count, vocab, SEGMENT, AT_ONCE)
        found += tl.sum((x >= floor).to(tl.int32), axis=1)
    return tl.sum(found, axis=0)


@jit()
def _end_of_top_k(
    logits_ptr: tl.tensor,
    seg_max_ptr: tl.tensor,
    list_ptr: tl.tensor,
    segments: int,
    vocab: int,
    top_k: tl.tensor,
    best: tl.tensor,
    SHIFT: tl.constexpr,
    SEGMENT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PADDED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The floor and the last id of the first `top_k` tokens (1 to vocab - 1).

    Each of the `top_k` segments with the largest maxima has a token that reaches the smallest of these
    maxima, so the floor is at least that. Then bisection over the keys finds the floor.
    """
    index = tl.arange(0, PADDED)
    there = index < segments
    seg_max = _order_key(tl.load(seg_max_ptr + index, mask=there, other=float("-inf")), SHIFT)
    high = _order_key(best, SHIFT).to(tl.int64) + 1
    low = _order_key(tl.full((), float("-inf"), tl.float32), SHIFT).to(tl.int64)
    if top_k <= segments:
        end = high
        while end - low > 1:
            middle = (low + end) >> 1
            enough = tl.sum((there & (seg_max >= middle.to(tl.int32))).to(tl.int32), axis=0) >= top_k
            low = tl.where(enough, middle, low)
            end = tl.where(enough, end, middle)
    floor = _value_of(low.to(tl.int32), SHIFT)
    count = _find_segments(seg_max_ptr, list_ptr, segments, floor, PADDED)
    above = tl.full((), 0, tl.int32)  # number of tokens with a key of at least `high`
    while high - low > 1:
        middle = (low + high) >> 1
        floor = _value_of(middle.to(tl.int32), SHIFT)
        found = _count_from(logits_ptr, list_ptr, count, vocab, floor, SEGMENT, AT_ONCE)
        above = tl.where(found >= top_k, above, found)
        low = tl.where(found >= top_k, middle, low)
        high = tl.where(found >= top_k, high, middle)
    floor = _value_of(low.to(tl.int32), SHIFT)
    seen = tl.full((), 0, tl.int32)
    last = tl.full((), 0, tl.int32)
    for start in range(0, count, AT_ONCE):
        x, ids, live = _load_tile(logits_ptr, list_ptr, start, count, vocab, SEGMENT, AT_ONCE)
        equal = tl.reshape(((x == floor) & live).to(tl.int32), (AT_ONCE * SEGMENT,))
        rank = seen + tl.cumsum(equal, axis=0)
        flat = tl.reshape(ids, (AT_ONCE * SEGMENT,))
        last += tl.sum(tl.where((equal > 0) & (rank == top_k - above), flat, 0), axis=0)
        seen += tl.sum(equal, axis=0)
    return floor, last


@jit()
def _weigh_kept(
    logits_ptr: tl.tensor,
    seg_max_ptr: tl.tensor,
    list_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    segments: int,
    vocab: int,
    best: tl.tensor,
    factor: tl.tensor,
    floor: tl.tensor,
    last: tl.tensor,
    SEGMENT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    STAGES: tl.constexpr,
    PADDED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Write the weight of the kept tokens of each segment; return the number of listed segments, and the sum.

    The weight of a token is exp2((logit - best) * factor).
    """
    count = _find_segments(seg_max_ptr, list_ptr, segments, floor, PADDED)
    for start in tl.range(0, count, AT_ONCE, num_stages=STAGES):
        x, index, _ = _load_tile(logits_ptr, list_ptr, start, count, vocab, SEGMENT, AT_ONCE)
        weights = tl.where(_is_kept(x, index, floor, last), tl.exp2((x - best) * factor), 0.0)
        place = start + tl.arange(0, AT_ONCE)
        tl.store(masses_ptr + place, tl.sum(weights, axis=1), mask=place < count)
    tl.debug_barrier()
    place = tl.arange(0, PADDED)
    masses = tl.load(masses_ptr + place, mask=place < count, other=0.0)
    return count, tl.sum(masses.to(tl.float64), axis=0)


@jit()
def _draw_kept(
    logits_ptr: tl.tensor,
    list_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    count: tl.tensor,
    vocab: int,
    best: tl.tensor,
    factor: tl.tensor,
    floor: tl.tensor,
    last: tl.tensor,
    segment_bits: tl.tensor,
    token_bits: tl.tensor,
    SEGMENT: tl.constexpr,
    PADDED: tl.constexpr,
) -> tl.tensor:
    """Draw a kept token, after `_weigh_kept`: first a segment of the list, then a token of it."""
    place = tl.arange(0, PADDED)
    masses = tl.load(masses_ptr + place, mask=place < count, other=0.0)
    first = tl.load(list_ptr + pick(masses, segment_bits, PADDED)) * SEGMENT
    index = first + tl.arange(0, SEGMENT)
    x = tl.load(logits_ptr + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
    weights = tl.where(_is_kept(x, index, floor, last), tl.exp2((x - best) * factor), 0.0)
    return first + pick(weights, token_bits, SEGMENT)


@jit()
def draw_filtered(
    token: tl.tensor,
    whole: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    temperature: tl.tensor,
    factor: tl.tensor,
    best: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    logits_ptr: tl.tensor,
    seg_max_ptr: tl.tensor,
    list_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    segments: int,
    vocab: int,
    SHIFT: tl.constexpr,
    SEGMENT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    STAGES: tl.constexpr,
    PADDED: tl.constexpr,
) -> tl.tensor:
    """Return `token`, or draw another one if the filters drop it.

    token: drawn from the whole vocabulary. whole: the weight of the vocabulary.
    """
    floor = tl.full((), float("-inf"), tl.float32)
    last = vocab - 1
    narrow = min_p > 0
    if narrow:
        floor = best + tl.log(min_p) * temperature
    if (top_k > 0) & (top_k < vocab):
        narrow = True
        k_floor, k_last = _end_of_top_k(
            logits_ptr, seg_max_ptr, list_ptr, segments, vocab, top_k, best, SHIFT, SEGMENT, AT_ONCE, PADDED
        )
        if k_floor >= floor:
            floor = k_floor
            last = k_last
    if narrow:
        count, whole = _weigh_kept(
            logits_ptr, seg_max_ptr, list_ptr, masses_ptr, segments, vocab,
            best, factor, floor, last, SEGMENT, AT_ONCE, STAGES, PADDED,
        )  # fmt: skip
        segment_bits, token_bits = random_pair(seed, position, tl.full((), 0, tl.int32))
        token = _draw_kept(
            logits_ptr, list_ptr, masses_ptr, count, vocab,
            best, factor, floor, last, segment_bits, token_bits, SEGMENT, PADDED,
        )  # fmt: skip
    attempt = tl.full((), 0, tl.int32)
    searching = top_p < 1
    while searching:
        floor = tl.load(logits_ptr + token).to(tl.float32)
        last = token - 1
        count, before = _weigh_kept(
            logits_ptr, seg_max_ptr, list_ptr, masses_ptr, segments, vocab,
            best, factor, floor, last, SEGMENT, AT_ONCE, STAGES, PADDED,
        )  # fmt: skip
        searching = before >= top_p.to(tl.float64) * whole
        if searching:
            attempt += 1
            segment_bits, token_bits = random_pair(seed, position, attempt)
            token = _draw_kept(
                logits_ptr, list_ptr, masses_ptr, count, vocab,
                best, factor, floor, last, segment_bits, token_bits, SEGMENT, PADDED,
            )  # fmt: skip
    return token


def draw_filtered_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    """Return ids [S], drawn from weights [S, V]; where the filters drop an id, draw another. Uses a stable
    sort."""
    vocab = logits.shape[1]
    ordered, order = logits.float().sort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(vocab, device=order.device).expand_as(order)
    )
    least = ordered[:, 0] + min_p.log() * temperature
    kept = (ordered >= least[:, None]).sum(dim=-1)
    limited = (top_k > 0) & (top_k < vocab)
    kept = torch.where(limited, torch.minimum(kept, top_k), kept)
    upto = weights.gather(1, order).double().cumsum(dim=-1)
    before = F.pad(upto, (1, 0)).gather(1, rank)  # weight of likelier tokens
    whole = upto.gather(1, kept[:, None] - 1)[:, 0]

    def draw(rows: torch.Tensor, attempt: int) -> torch.Tensor:
        """Draw a kept token for each of `rows`."""
        bits = random_pair_reference(seeds[rows], positions[rows], attempt)
        return draw_reference(weights[rows].where(rank[rows] < kept[rows, None], 0.0), SEGMENT, bits)

    narrow = (limited | (min_p > 0)).nonzero()[:, 0]
    ids = ids.index_copy(0, narrow, draw(narrow, 0))
    searching = (top_p < 1).nonzero()[:, 0]
    attempt = 0
    while len(searching):
        drawn = ids[searching, None]
        dropped = before[searching].gather(1, drawn)[:, 0] >= top_p[searching].double() * whole[searching]
        kept[searching] = rank[searching].gather(1, drawn)[:, 0]
        searching, attempt = searching[dropped], attempt + 1
        ids[searching] = draw(searching, attempt)
    return ids
