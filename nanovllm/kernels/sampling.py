"""Draws one token per row of logits by the Gumbel-max trick, its random numbers hashed instead of generated.

The noise of a token is a hash of (seed, position, vocabulary index): a row's result depends on that row
alone, and no generator state exists. Never filters logits (top-k and the like are -inf here) and never
synchronises with the host.
"""

from __future__ import annotations

import torch

from nanovllm.kernels.compat import jit, tl, triton, use_triton

_BLOCK = 4096  # vocabulary entries per program
_GREEDY_BELOW = 1e-5  # temperatures under this are 0: the noise would drown in the rounding of the logits
_MASK = 0xFFFFFFFF


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
def random_bits(seed: tl.tensor, position: tl.tensor, index: tl.tensor) -> tl.tensor:
    """32 random bits (uint32) for each vocabulary index of the row (seed int64, position int32).

    Row and position become two 32-bit keys, one for each round of `_mix` over the index.
    """
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    place = position.to(tl.uint32)
    first_key = _mix(_mix(place ^ 0x9E3779B9, high), low)
    second_key = _mix(_mix(low ^ 0x85EBCA6B, place), high)
    return _mix(index.to(tl.uint32) ^ first_key, second_key)


@jit()
def _exponential(bits: tl.tensor) -> tl.tensor:
    """-log(u) of the uniform number u = ((bits >> 9) + 0.5) / 2**23, which lies strictly between 0 and 1.

    u is split into 2**exponent * (1 + f) with |f| <= 1/3, and log(1 + f) / f is a minimax polynomial: the
    relative error is below 2e-6 also next to u = 1, where the winners are. The library's logarithm takes
    twice as long.
    """
    uniform = (bits >> 9).to(tl.float32) * (1.0 / 8388608) + 0.5 / 8388608
    raw = uniform.to(tl.int32, bitcast=True)
    exponent = (raw - 0x3F2AAAAB) & -0x800000  # still in its place in the float32 format, so times 2**23
    f = (raw - exponent).to(tl.float32, bitcast=True) - 1.0
    series = 0.17065246 * f - 0.19407689
    series = series * f + 0.19802694
    series = series * f - 0.24841658
    series = series * f + 0.3333767
    series = series * f - 0.50002242
    series = series * f + 0.99999986
    return exponent.to(tl.float32) * -8.2629582e-08 - series * f  # log(2) / 2**23


@jit("temperatures_ptr", "seeds_ptr", "positions_ptr")
def _sample_block_kernel(
    logits_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    winners_ptr: tl.tensor,
    logits_stride: int,
    vocab: int,
    GREEDY_BELOW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per (row, block of the vocabulary): its winner and score, +inf where a logit is bad."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    index = block * BLOCK + tl.arange(0, BLOCK)
    logits_ptrs = logits_ptr + row * logits_stride + index
    x = tl.load(logits_ptrs, mask=index < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x < float("inf"), x, float("inf"))  # NaN too
    top = tl.max(x, axis=0)
    score = top
    temperature = tl.load(temperatures_ptr + row)
    usable = (top > float("-inf")) & (top < float("inf"))
    if usable & (temperature >= GREEDY_BELOW):
        # A Gumbel number is -log(e) with e exponential, so argmax(x / T - log(e)) is argmin(e * exp((top -
        # x) / T)): one logarithm an element instead of two, and no overflow whatever the temperature.
        bits = random_bits(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), index)
        arrival = _exponential(bits) * tl.exp2((top - x) * (1.4426950408889634 / temperature))
        earliest = tl.min(arrival, axis=0)
        winner = tl.min(tl.where(arrival == earliest, index, 2147483647), axis=0)
        score = top - temperature * tl.log(earliest)
    else:
        winner = tl.min(tl.where(x == top, index, 2147483647), axis=0)
    cell = row * tl.num_programs(1) + block
    tl.store(scores_ptr + cell, score)
    tl.store(winners_ptr + cell, winner)


@jit("blocks")
def _sample_reduce_kernel(
    scores_ptr: tl.tensor,
    winners_ptr: tl.tensor,
    out_ptr: tl.tensor,
    blocks: int,
    BLOCKS_PADDED: tl.constexpr,
) -> None:
    """One program per row: the first of the best blocks."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS_PADDED)
    scores = tl.load(scores_ptr + row * blocks + block, mask=block < blocks, other=float("-inf"))
    best = tl.max(scores, axis=0)
    chosen = tl.min(tl.where(scores == best, block, BLOCKS_PADDED - 1), axis=0)
    winner = tl.load(winners_ptr + row * blocks + chosen, mask=chosen < blocks, other=0)
    usable = (best > float("-inf")) & (best < float("inf"))
    tl.store(out_ptr + row, tl.where(usable, winner, -1).to(tl.int64))


def sample_triton(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """`sample` by Triton."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    assert logits.stride(1) == 1
    blocks = triton.cdiv(vocab, _BLOCK)
    scores = torch.empty((rows, blocks), dtype=torch.float32, device=logits.device)
    winners = torch.empty((rows, blocks), dtype=torch.int32, device=logits.device)
    _sample_block_kernel[(rows, blocks)](
        logits,
        temperature,
        seeds,
        positions,
        scores,
        winners,
        logits.stride(0),
        vocab,
        GREEDY_BELOW=_GREEDY_BELOW,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    padded = triton.next_power_of_2(blocks)
    _sample_reduce_kernel[(rows,)](scores, winners, out, blocks, BLOCKS_PADDED=padded, num_warps=1)
    return out


def _mix_reference(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """`_mix` of an int64 tensor of values below 2**32, in place, with `key` between its rounds."""
    x.bitwise_xor_(x >> 16).mul_(0x7FEB352D).bitwise_and_(_MASK)
    x.bitwise_xor_(x >> 15).bitwise_xor_(key).mul_(0x846CA68B).bitwise_and_(_MASK)
    return x.bitwise_xor_(x >> 16)


def random_bits_reference(seeds: torch.Tensor, positions: torch.Tensor, vocab: int) -> torch.Tensor:
    """`random_bits` in plain torch for rows of (seed int64, position): [S, vocab] int64 below 2**32."""
    low, high, place = seeds & _MASK, (seeds >> 32) & _MASK, positions.long() & _MASK
    first_key = _mix_reference(_mix_reference(place ^ 0x9E3779B9, high), low)
    second_key = _mix_reference(_mix_reference(low ^ 0x85EBCA6B, place), high)
    index = torch.arange(vocab, device=seeds.device)
    return _mix_reference(index ^ first_key[:, None], second_key[:, None])


def sample_reference(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """`sample` in plain torch."""
    x = logits.float()
    top = torch.where(x < torch.inf, x, torch.inf).amax(dim=-1)
    drawn = (temperature >= _GREEDY_BELOW).nonzero().squeeze(-1)
    scores = x.clone()
    if len(drawn):
        bits = random_bits_reference(seeds[drawn], positions[drawn], x.shape[1])
        uniform = (bits >> 9).float().add_(0.5).mul_(2.0**-23)
        gumbel = uniform.log_().neg_().log_().neg_()
        scores[drawn] += gumbel.mul_(temperature[drawn, None])
    return scores.argmax(dim=-1).masked_fill(~torch.isfinite(top), -1)


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Draw token_ids [S] int64 from softmax(logits / temperature), row by row.

    logits: [S, V] float, contiguous rows; -inf masks a token. temperature: [S] float32; below 1e-5 the row
    is greedy: the largest logit, the lowest index in a tie. seeds: [S] int64. positions: [S] int32: with
    the seed, what the row's noise is computed from; give each token of a sequence its own. A row with NaN,
    +inf or no finite logit gives -1 and changes no other row. Gumbel-max: Maddison et al., "A* sampling",
    2014.
    """
    return (sample_triton if use_triton(logits) else sample_reference)(logits, temperature, seeds, positions)
