"""Draws one token per row of logits: by its share of the probability first a block of the vocabulary, then a
token of that block, each with one random number.

The random numbers are a hash of (seed, position): a row's result depends on that row alone, and no generator
state exists. Never filters logits (top-k and the like are -inf here) and never synchronises with the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanovllm.kernels.compat import await_inputs, jit, launch_early, tl, triton, use_triton

BLOCK = 2048  # vocabulary entries per block: what is drawn depends on it, so it is the same for every batch
_GREEDY_BELOW = 1e-5  # temperatures under this are 0: nothing but the largest logit has a chance
_LOG2_E = math.log2(math.e)
_LEAST_FACTOR = (
    1e-30  # times -inf this is -inf still, where 0, the inverse of an endless temperature, gives NaN
)
_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyPart:
    """Part `rank` of `size` equally long ones, in whole blocks; the last ones may end early or be empty."""

    rank: int
    size: int
    blocks: int  # of each part
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]  # of [S, n] float32; every rank calls it

    @property
    def numbers(self) -> int:
        """The largest n: a top and a sum for each block of the vocabulary."""
        return 2 * self.size * self.blocks


@jit()
def _mix(x: tl.tensor, key: tl.tensor) -> tl.tensor:
    """A bijection of uint32 in which every input bit sways every output bit: C. Wellons' "lowbias32".

    `key` enters between its two rounds.
    """
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= (x >> 15) ^ key
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@jit()
def random_pair(seed: tl.tensor, position: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Two numbers of 32 random bits (uint32) for a row of (seed int64, position int32)."""
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    place = position.to(tl.uint32)
    return (
        _mix(_mix(_mix(place ^ 0x9E3779B9, high), low), 0x68E31DA4),
        _mix(_mix(_mix(low ^ 0x85EBCA6B, place), high), 0xB5297A4D),
    )


@jit()
def _pick(weights: tl.tensor, bits: tl.tensor, PADDED: tl.constexpr) -> tl.tensor:
    """The index that `bits` chooses out of weights [PADDED] float32, of which one at least is positive.

    In float64, so that neither the width of a random number nor the order of a sum is felt. An index of
    weight 0 is never chosen.
    """
    index = tl.arange(0, PADDED)
    sums = tl.cumsum(tl.where(weights > 0, weights, 0.0).to(tl.float64), axis=0)
    sums = tl.where(weights > 0, sums, -1.0)
    target = bits.to(tl.float64) * 2.3283064365386963e-10 * tl.max(sums, axis=0)  # bits / 2**32
    return tl.min(tl.where(sums > target, index, PADDED - 1), axis=0)


@jit()
def _factor(temperature: tl.tensor, LOG2_E: tl.constexpr, LEAST: tl.constexpr) -> tl.tensor:
    return tl.maximum(LOG2_E / temperature, LEAST)


@jit("temperatures_ptr")
def _sample_block_kernel(
    logits_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    logits_stride: int,
    vocab: int,
    first_block: int,
    blocks: int,
    GREEDY_BELOW: tl.constexpr,
    LOG2_E: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One program per (row, block): its largest logit, +inf where one is bad, and the sum of its weights.

    They go to tops [S, 2, blocks], behind `first_block` others. Each weight is relative to the largest one of
    the block, so that none can overflow.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    index = block * BLOCK + tl.arange(0, BLOCK)
    await_inputs(EARLY)
    temperature = tl.load(temperatures_ptr + row)
    x = tl.load(logits_ptr + row * logits_stride + index, mask=index < vocab, other=float("-inf"))
    x = x.to(tl.float32)
    x = tl.where(x < float("inf"), x, float("inf"))  # NaN too
    top = tl.max(x, axis=0)
    total = 1.0
    if (temperature >= GREEDY_BELOW) & (top > float("-inf")) & (top < float("inf")):
        total = tl.sum(tl.exp2((x - top) * _factor(temperature, LOG2_E, LEAST)), axis=0)
    cell = row * 2 * blocks + first_block + block
    tl.store(tops_ptr + cell, top)
    tl.store(tops_ptr + blocks + cell, total)


@jit("temperatures_ptr", "seeds_ptr", "positions_ptr")
def _sample_pick_kernel(
    logits_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    out_ptr: tl.tensor,
    logits_stride: int,
    vocab: int,
    first_block: int,
    own_blocks: int,
    blocks: int,
    GREEDY_BELOW: tl.constexpr,
    LOG2_E: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
    LEAST_ID: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One program per row picks a block, then a token of it. A greedy row weighs its largest logit alone.

    Stores the token's id + LEAST_ID; LEAST_ID - 1 for a bad row, and where the block is not among the
    `own_blocks` whose logits are here.
    """
    row = tl.program_id(0).to(tl.int64)
    await_inputs(EARLY)
    cells = row * 2 * blocks + tl.arange(0, BLOCKS_PADDED)
    known = tl.arange(0, BLOCKS_PADDED) < blocks
    tops = tl.load(tops_ptr + cells, mask=known, other=float("-inf"))
    sums = tl.load(tops_ptr + blocks + cells, mask=known, other=0.0)
    temperature = tl.load(temperatures_ptr + row)
    block_bits, token_bits = random_pair(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
    greedy = temperature < GREEDY_BELOW
    factor = _factor(tl.where(greedy, 1.0, temperature), LOG2_E, LEAST)
    block_bits = tl.where(greedy, 0, block_bits)  # 0 is the first index of any weight
    token_bits = tl.where(greedy, 0, token_bits)

    best = tl.max(tops, axis=0)
    token = tl.full((), -1, tl.int32)
    if (best > float("-inf")) & (best < float("inf")):
        shares = tl.where(greedy, (tops == best).to(tl.float32), sums * tl.exp2((tops - best) * factor))
        block = _pick(shares, block_bits, BLOCKS_PADDED)
        if (block >= first_block) & (block < first_block + own_blocks):
            top = tl.load(tops_ptr + row * 2 * blocks + block)
            index = (block - first_block) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(logits_ptr + row * logits_stride + index, mask=index < vocab, other=float("-inf"))
            x = x.to(tl.float32)
            weights = tl.where(greedy, (x == top).to(tl.float32), tl.exp2((x - top) * factor))
            token = block * BLOCK + _pick(weights, token_bits, BLOCK)
    tl.store(out_ptr + row, (token + LEAST_ID).to(out_ptr.dtype.element_ty))


def sample_triton(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    part: VocabularyPart | None = None,
) -> torch.Tensor:
    """`sample` by Triton.

    With `part`, logits are those of this part of the vocabulary; all ranks call this and get the same ids.
    """
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    assert logits.stride(1) == 1
    if part is None:
        own = blocks = triton.cdiv(vocab, BLOCK)
        first, least_id = 0, 0
        tops = torch.empty(rows, 2 * blocks, dtype=torch.float32, device=logits.device)
    else:
        own, blocks = part.blocks, part.size * part.blocks
        first, least_id = part.rank * own, 1
        assert vocab <= own * BLOCK
        tops = torch.zeros(rows, part.numbers, dtype=torch.float32, device=logits.device)
        out = torch.empty(rows, 1, dtype=torch.float32, device=logits.device)  # exact up to 2**24
    early = launch_early(logits)
    constants = {"GREEDY_BELOW": _GREEDY_BELOW, "LOG2_E": _LOG2_E, "LEAST": _LEAST_FACTOR, "BLOCK": BLOCK}
    constants |= {"EARLY": early, "launch_pdl": early}
    _sample_block_kernel[(rows, own)](
        logits, temperature, tops, logits.stride(0), vocab, first, blocks, **constants, num_warps=2
    )
    if part is not None:
        tops = part.sum_over_ranks(tops)
    _sample_pick_kernel[(rows,)](
        logits,
        temperature,
        seeds,
        positions,
        tops,
        out,
        logits.stride(0),
        vocab,
        first,
        own,
        blocks,
        **constants,
        BLOCKS_PADDED=triton.next_power_of_2(blocks),
        LEAST_ID=least_id,
        num_warps=4,
    )
    return out if part is None else part.sum_over_ranks(out)[:, 0].long() - 1


def _mix_reference(x: torch.Tensor, key: torch.Tensor | int) -> torch.Tensor:
    """`_mix` of an int64 tensor of values below 2**32, in place, with `key` between its rounds."""
    x.bitwise_xor_(x >> 16).mul_(0x7FEB352D).bitwise_and_(_MASK)
    x.bitwise_xor_(x >> 15).bitwise_xor_(key).mul_(0x846CA68B).bitwise_and_(_MASK)
    return x.bitwise_xor_(x >> 16)


def random_pair_reference(seeds: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`random_pair` in plain torch for rows of (seed int64, position): two of [S] int64 below 2**32."""
    low, high, place = seeds & _MASK, (seeds >> 32) & _MASK, positions.long() & _MASK
    both = torch.stack((place ^ 0x9E3779B9, low ^ 0x85EBCA6B))
    for keys in ((high, place), (low, high)):
        both = _mix_reference(both, torch.stack(keys))
    first, second = both
    return _mix_reference(first, 0x68E31DA4), _mix_reference(second, 0xB5297A4D)


def _pick_reference(weights: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """The indices [S] that bits [S] choose out of weights [S, n], row by row, none of weight 0."""
    sums = weights.double().cumsum(dim=-1)
    target = bits.double() * 2.0**-32 * sums[:, -1]
    return ((sums > target[:, None]) & (weights > 0)).byte().argmax(dim=-1)


def sample_reference(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """`sample` in plain torch."""
    vocab = logits.shape[1]
    top = logits.amax(dim=-1)  # NaN if there is one
    finite = torch.isfinite(top)
    ids = logits.argmax(dim=-1)
    drawn = (temperature >= _GREEDY_BELOW) & finite
    if drawn.any():
        x, best = logits, top
        if not drawn.all():
            x, best, temperature = x[drawn], best[drawn], temperature[drawn]
            seeds, positions = seeds[drawn], positions[drawn]
        factor = (_LOG2_E / temperature).clamp(min=_LEAST_FACTOR)
        weights = x.float().sub(best.float()[:, None]).mul_(factor[:, None]).exp2_()
        block_bits, token_bits = random_pair_reference(seeds, positions)
        first_id: torch.Tensor | int = 0
        if vocab > BLOCK:  # else there is one block to draw
            weights = F.pad(weights, (0, -vocab % BLOCK)).unflatten(-1, (-1, BLOCK))
            block = _pick_reference(weights.sum(dim=-1), block_bits)
            weights = weights[torch.arange(len(x), device=x.device), block]
            first_id = block * BLOCK
        ids[drawn] = first_id + _pick_reference(weights, token_bits)
    return ids.masked_fill_(~finite, -1)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    part: VocabularyPart | None = None,
) -> torch.Tensor:
    """Draw token_ids [S] int64 from softmax(logits / temperature), row by row.

    logits: [S, V] float, contiguous rows; -inf masks a token. temperature: [S] float32; below 1e-5 the row
    is greedy: the largest logit, the lowest index in a tie. seeds: [S] int64. positions: [S] int32: with
    the seed, what the row's random numbers are hashed from; give each token of a sequence its own. A row
    with NaN, +inf or no finite logit gives -1 and changes no other row. The inverse of the cumulated
    distribution, in two levels: a first pass weighs each block of the vocabulary, and a second one reads
    only the block that was drawn. Weights are float32, their sums and the random numbers' scale float64.

    With `part`, on GPUs only, each rank brings the logits of its part of fewer than 2**24 tokens, all else is
    the same on all of them, and so are the ids: as many numbers cross between ranks as there are blocks.
    """
    if use_triton(logits):
        return sample_triton(logits, temperature, seeds, positions, part)
    assert part is None
    return sample_reference(logits, temperature, seeds, positions)
