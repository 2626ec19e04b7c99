"""Random numbers for sampling, a hash of (seed, position, attempt), and weighted choices with them.

There is no generator state; kernels and their references in plain torch get the same bits. Knows no
vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.kernels.compat import jit, tl

# SplitMix64 (Steele, Lea, Flood 2014): a counter times an odd constant, then a mixer in which every input bit
# affects every output bit (D. Stafford's variant 13 of MurmurHash3's mixer). The seed passes through the
# mixer first, so that streams of different seeds start at unrelated points.
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_STEP, _OFFSET = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
_MASK = 0xFFFFFFFF


@jit()
def _mix(z: tl.tensor) -> tl.tensor:
    """A bijection of uint64."""
    z ^= z >> 30
    z *= 0xBF58476D1CE4E5B9
    z ^= z >> 27
    z *= 0x94D049BB133111EB
    return z ^ (z >> 31)


@jit()
def random_pair(seed: tl.tensor, position: tl.tensor, attempt: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Two numbers of 32 random bits (uint32) for seed (int64), position and attempt (int32, 0 or more)."""
    counter = (attempt.to(tl.uint64) << 32) + position.to(tl.uint64) + 1
    z = _mix(_mix(seed.to(tl.uint64) + 0xD1B54A32D192ED03) + counter * 0x9E3779B97F4A7C15)
    return (z >> 32).to(tl.uint32), z.to(tl.uint32)


@jit()
def pick(weights: tl.tensor, bits: tl.tensor, PADDED: tl.constexpr) -> tl.tensor:
    """The index that `bits` chooses among weights [PADDED] float32, at least one of which is positive.

    Computed in float64, so that neither the width of a random number nor the order of the sum matters. An
    index of weight 0 is never chosen.
    """
    index = tl.arange(0, PADDED)
    sums = tl.cumsum(tl.where(weights > 0, weights, 0.0).to(tl.float64), axis=0)
    sums = tl.where(weights > 0, sums, -1.0)
    target = bits.to(tl.float64) * 2.3283064365386963e-10 * tl.max(sums, axis=0)  # bits / 2**32
    return tl.min(tl.where(sums > target, index, PADDED - 1), axis=0)


def _signed(constant: int) -> int:
    """The int64 with the bits of this uint64: int64 products in torch wrap around like uint64 products."""
    return constant - 2**64 if constant >= 2**63 else constant


def _xor_shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """z ^ (z >> bits) of int64 as if it were uint64, in place: torch's own shift keeps the sign."""
    return z.bitwise_xor_((z >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def _mix_reference(z: torch.Tensor) -> torch.Tensor:
    """`_mix` of an int64 tensor, in place."""
    _xor_shifted(z, 30).mul_(_signed(_FIRST))
    _xor_shifted(z, 27).mul_(_signed(_SECOND))
    return _xor_shifted(z, 31)


def random_pair_reference(
    seeds: torch.Tensor, positions: torch.Tensor, attempt: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`random_pair` in plain torch for rows of (seed int64, position): two [S] int64 below 2**32."""
    counters = positions.long() + ((attempt << 32) + 1)
    z = _mix_reference(_mix_reference(seeds + _signed(_OFFSET)).add_(counters.mul_(_signed(_STEP))))
    return (z >> 32).bitwise_and_(_MASK), z & _MASK


def pick_reference(weights: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """The indices [S] that bits [S] choose among weights [S, n], row by row, never one of weight 0."""
    sums = weights.double().cumsum(dim=-1)
    target = bits.double() * 2.0**-32 * sums[:, -1]
    return ((sums > target[:, None]) & (weights > 0)).byte().argmax(dim=-1)


def draw_reference(
    weights: torch.Tensor, block: int, bits: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Choose an index [S] among weights [S, n] row by row: first a block of entries, then an entry of it."""
    block_bits, token_bits = bits
    if weights.shape[1] <= block:  # a single block
        return pick_reference(weights, token_bits)
    weights = F.pad(weights, (0, -weights.shape[1] % block)).unflatten(-1, (-1, block))
    drawn = pick_reference(weights.sum(dim=-1), block_bits)
    inside = weights[torch.arange(len(weights), device=weights.device), drawn]
    return drawn * block + pick_reference(inside, token_bits)
