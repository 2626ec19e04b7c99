"""Draws one token per row of logits: first a block of the vocabulary by its share of the probability, then a
token of that block, each with one random number. Filters do not sort.

The random numbers are a hash of (seed, position): a row's result depends on that row alone, and there is no
generator state. Never synchronises with the host.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from nanovllm.batch import NOT_FINITE, SamplingColumns
from nanovllm.kernels.compat import await_inputs, by_device, jit, next_power_of_2, tl, use_pdl
from nanovllm.kernels.filters import (
    FILTER_WARPS,
    SEGMENT,
    SEGMENTS_AT_ONCE,
    STAGES,
    draw_filtered,
    draw_filtered_reference,
)
from nanovllm.kernels.random_bits import draw_reference, pick, random_pair, random_pair_reference

BLOCK = 2048  # vocabulary entries per block; drawn tokens depend on it, so it is the same for every batch
GREEDY_BELOW = 1e-5  # lower temperatures count as 0: only the largest logit has a chance
_LOG2_E = math.log2(math.e)
_LEAST_FACTOR = 1e-30  # not 0, for a very large temperature: -inf * 0 would be NaN
_SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}  # low bits that are 0 as float32
SORT_ELEMENTS = 2**23  # logits that are sorted at once: bounds the memory, about 50 bytes each
SamplingTensors = SamplingColumns[torch.Tensor]


@jit()
def _factor(temperature: tl.tensor, LOG2_E: tl.constexpr, LEAST: tl.constexpr) -> tl.tensor:
    return tl.maximum(LOG2_E / temperature, LEAST)


@jit("temperatures_ptr")
def _sample_block_kernel(
    logits_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    block_stats_ptr: tl.tensor,
    seg_max_ptr: tl.tensor,
    logits_stride: int,
    vocab: int,
    blocks: int,
    GREEDY_BELOW: tl.constexpr,
    LOG2_E: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One program per (row, block): its largest logit, +inf if one is bad, and the sum of its weights.

    Both are written to block_stats [S, 2, blocks]. Weights are relative to the largest one of the block, so
    none can overflow. The largest logit of each segment is written to seg_max.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    index = block * BLOCK + tl.arange(0, BLOCK)
    await_inputs(USE_PDL)
    temperature = tl.load(temperatures_ptr + row)
    x = tl.load(logits_ptr + row * logits_stride + index, mask=index < vocab, other=float("-inf"))
    x = x.to(tl.float32)
    x = tl.where(x < float("inf"), x, float("inf"))  # NaN too
    PER_BLOCK: tl.constexpr = BLOCK // SEGMENT
    seg_max = tl.max(tl.reshape(x, (PER_BLOCK, SEGMENT)), axis=1)
    tl.store(seg_max_ptr + (row * blocks + block) * PER_BLOCK + tl.arange(0, PER_BLOCK), seg_max)
    top = tl.max(x, axis=0)
    total = 1.0
    if (temperature >= GREEDY_BELOW) & (top > float("-inf")) & (top < float("inf")):
        total = tl.sum(tl.exp2((x - top) * _factor(temperature, LOG2_E, LEAST)), axis=0)
    cell = row * 2 * blocks + block
    tl.store(block_stats_ptr + cell, top)
    tl.store(block_stats_ptr + blocks + cell, total)


@jit("temperatures_ptr", "seeds_ptr", "positions_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr")
def _sample_pick_kernel(
    logits_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    block_stats_ptr: tl.tensor,
    seg_max_ptr: tl.tensor,
    lists_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    out_ptr: tl.tensor,
    logits_stride: int,
    vocab: int,
    blocks: int,
    GREEDY_BELOW: tl.constexpr,
    LOG2_E: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr,
    USE_PDL: tl.constexpr,
    AT_ONCE: tl.constexpr,
    STAGES: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
    NOT_FINITE: tl.constexpr,
) -> None:
    """One program per row picks a block, then a token of it; NOT_FINITE for a bad row.

    In a greedy row only the largest logit has weight.
    """
    row = tl.program_id(0).to(tl.int64)
    await_inputs(USE_PDL)
    cells = row * 2 * blocks + tl.arange(0, BLOCKS_PADDED)
    known = tl.arange(0, BLOCKS_PADDED) < blocks
    maxima = tl.load(block_stats_ptr + cells, mask=known, other=float("-inf"))
    sums = tl.load(block_stats_ptr + blocks + cells, mask=known, other=0.0)
    temperature = tl.load(temperatures_ptr + row)
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    block_bits, token_bits = random_pair(seed, position, tl.full((), 0, tl.int32))
    greedy = temperature < GREEDY_BELOW
    factor = _factor(tl.where(greedy, 1.0, temperature), LOG2_E, LEAST)
    block_bits = tl.where(greedy, 0, block_bits)  # 0 is the first index of any weight
    token_bits = tl.where(greedy, 0, token_bits)

    best = tl.max(maxima, axis=0)
    token = tl.full((), NOT_FINITE, tl.int32)
    if (best > float("-inf")) & (best < float("inf")):
        shares = tl.where(greedy, (maxima == best).to(tl.float32), sums * tl.exp2((maxima - best) * factor))
        block = pick(shares, block_bits, BLOCKS_PADDED)
        top = tl.load(block_stats_ptr + row * 2 * blocks + block)
        index = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * logits_stride + index, mask=index < vocab, other=float("-inf"))
        x = x.to(tl.float32)
        weights = tl.where(greedy, (x == top).to(tl.float32), tl.exp2((x - top) * factor))
        token = block * BLOCK + pick(weights, token_bits, BLOCK)
        top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        filtered = ((top_k > 0) & (top_k < vocab)) | (top_p < 1) | (min_p > 0)
        if filtered & (temperature >= GREEDY_BELOW):
            PADDED: tl.constexpr = BLOCKS_PADDED * (BLOCK // SEGMENT)
            segments = blocks * (BLOCK // SEGMENT)
            token = draw_filtered(
                token, tl.sum(shares.to(tl.float64), axis=0), seed, position, temperature, factor, best,
                top_k, top_p, min_p,
                logits_ptr + row * logits_stride, seg_max_ptr + row * segments,
                lists_ptr + row * segments, masses_ptr + row * segments,
                segments, vocab, SHIFT, SEGMENT, AT_ONCE, STAGES, PADDED,
            )  # fmt: skip
    tl.store(out_ptr + row, token.to(tl.int64))


def sample_triton(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """`sample` with Triton."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    assert logits.stride(1) == 1
    blocks = -(-vocab // BLOCK)
    block_stats = torch.empty(rows, 2 * blocks, dtype=torch.float32, device=logits.device)
    pdl = use_pdl(logits)
    seg_max, masses = torch.empty(2, rows, blocks * BLOCK // SEGMENT, device=logits.device)
    lists = torch.empty_like(seg_max, dtype=torch.int32)
    _sample_block_kernel[(rows, blocks)](
        logits,
        temperature,
        block_stats,
        seg_max,
        logits.stride(0),
        vocab,
        blocks,
        GREEDY_BELOW=GREEDY_BELOW,
        LOG2_E=_LOG2_E,
        LEAST=_LEAST_FACTOR,
        BLOCK=BLOCK,
        SEGMENT=SEGMENT,
        USE_PDL=pdl,
        launch_pdl=pdl,
        num_warps=2,
    )
    _sample_pick_kernel[(rows,)](
        logits,
        temperature,
        seeds,
        positions,
        top_k,
        top_p,
        min_p,
        block_stats,
        seg_max,
        lists,
        masses,
        out,
        logits.stride(0),
        vocab,
        blocks,
        GREEDY_BELOW=GREEDY_BELOW,
        LOG2_E=_LOG2_E,
        LEAST=_LEAST_FACTOR,
        BLOCK=BLOCK,
        SEGMENT=SEGMENT,
        USE_PDL=pdl,
        launch_pdl=pdl,
        AT_ONCE=SEGMENTS_AT_ONCE,
        STAGES=STAGES,
        SHIFT=_SHIFTS[logits.dtype],
        BLOCKS_PADDED=next_power_of_2(blocks),
        NOT_FINITE=NOT_FINITE,
        num_warps=FILTER_WARPS,
    )
    return out


def _weights_reference(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """The weights of tokens relative to the likeliest one, float32 [S, V]."""
    factor = (_LOG2_E / temperature).clamp(min=_LEAST_FACTOR)
    wide = logits.float()
    return (wide - wide.amax(dim=-1, keepdim=True)).mul_(factor[:, None]).exp2_()


def sample_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """`sample` in plain torch."""
    top = logits.amax(dim=-1)  # NaN if there is one
    finite = torch.isfinite(top)
    ids = logits.argmax(dim=-1)
    drawn = (temperature >= GREEDY_BELOW) & finite
    if drawn.any():
        rows = slice(None) if drawn.all() else drawn
        bits = random_pair_reference(seeds[rows], positions[rows])
        ids[rows] = draw_reference(_weights_reference(logits[rows], temperature[rows]), BLOCK, bits)
    drawn &= (top_k > 0) | (top_p < 1) | (min_p > 0)
    filtered = drawn.nonzero()[:, 0]
    at_once = max(1, SORT_ELEMENTS // logits.shape[1])
    for rows in filtered.split(at_once) if len(filtered) else ():  # an empty split gives one empty part
        own_k, own_p, own_min = top_k[rows], top_p[rows], min_p[rows]
        ids[rows] = draw_filtered_reference(
            logits[rows],
            temperature[rows],
            seeds[rows],
            positions[rows],
            own_k,
            own_p,
            own_min,
            _weights_reference(logits[rows], temperature[rows]),
            ids[rows],
        )
    return ids.masked_fill_(~finite, NOT_FINITE)


draw = by_device(sample_triton, sample_reference, "sampling.sample")


def sample(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """Draw token_ids [S] int64 from softmax(logits / temperature), row by row.

    logits: [S, V] float, contiguous rows; -inf masks a token. A row with a temperature below 1e-5 is greedy:
    the largest logit, the lowest index on ties. Seed and position are hashed to the row's random numbers, so
    each token of a sequence needs its own position. A row with NaN, +inf or no finite logit gives NOT_FINITE
    and changes no other row.

    This is inverse transform sampling in two levels: the first pass computes the weight of each block of the
    vocabulary, the second reads only the drawn block. Weights are float32, their sums and the scale of the
    random numbers float64.

    Filters apply in the order min_p, top_k, top_p, each over the tokens that the previous one kept, as in
    vLLM.
    """
    p = params
    return draw(logits, p.temperature, p.seeds, p.positions, p.top_k, p.top_p, p.min_p)


def filtered_logits(logits: torch.Tensor, params: SamplingTensors, has_filters: bool) -> torch.Tensor:
    """The logits that `sample` draws from, for `logprobs_mode` "processed_...": [S, V] float32, divided by
    temperature [S], and -inf where a filter drops the token. Without `has_filters` no row has any.

    Greedy rows do not change. Plain torch, on every device.
    """
    sampled = params.temperature >= GREEDY_BELOW
    x = logits.float() / params.temperature.where(sampled, 1.0)[:, None]
    if has_filters:
        columns = x, sampled, params.top_k, params.top_p, params.min_p
        at_once = max(1, SORT_ELEMENTS // x.shape[1])
        for part, drawn, k, p, least in zip(*(column.split(at_once) for column in columns), strict=True):
            part.masked_fill_(_dropped(part, k, p, least) & drawn[:, None], float("-inf"))
    return x


def _dropped(x: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """The tokens [S, V] that top_k, top_p and min_p [S] drop. x: [S, V] float32, divided by temperature."""
    ordered, order = x.sort(dim=1, descending=True, stable=True)
    top_k, top_p, min_p = top_k[:, None], top_p[:, None], min_p[:, None]
    place = torch.arange(x.shape[1], device=x.device)
    kept = (ordered >= ordered[:, :1] + min_p.log()) & ((top_k <= 0) | (place < top_k))
    shares = ordered.double().masked_fill(~kept, float("-inf")).softmax(dim=1)
    before = F.pad(shares.cumsum(dim=1), (1, -1))
    kept &= (before < top_p) | (top_p >= 1)
    kept[:, 0] = True
    return torch.empty_like(kept).scatter_(1, order, ~kept)
