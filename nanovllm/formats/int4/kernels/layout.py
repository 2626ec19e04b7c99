"""Int4Weight: the one layout of weights with 4 bits, which all formats of files become, in plain torch.

For tensor cores: a word holds 4 codes that are SUB columns apart, so that words [n, SUB] become 4 tiles
[n, SUB] of the weight, and neighbours in a tile are neighbours in a register. Multiplies nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from nanovllm.formats.mxfp4.kernels.values import BYTES, SCALE_BIAS, VALUES
from nanovllm.formats.nvfp4.kernels.values import GROUP, codes_of
from nanovllm.kernels.kinds import Kinds, unknown

SUB = 32  # columns of the weight in a tile that one code of each word gives
BLOCK = 4 * SUB  # columns of the weight in a block of words
MXFP4 = 0  # in place of the columns of a group
NVFP4 = GROUP  # no integers have such groups
SIGN_BITS, SIZE_BITS = (15, 12, 13, 14), (6, 3, 0, 9)  # of MXFP4: few instructions make bfloat16 of them
OCTET_BIAS = 253  # 127, and the 126 by which the exponent of a code's bits in bfloat16 is too small
SCALE_START = 20  # the exponent of 2 ** 0 in a byte of NVFP4's scales, which has 5 bits of it, and 3 of 1.f
FACTOR = 2**9  # by which values of NVFP4 in kernels are too small
MAX_MXFP4_SCALE = 128  # a scale's byte in a file; larger ones have no bfloat16 with that bias
# A float to whose last bits a code is added.
_BASE = Kinds("dtype of 4 bits", {torch.bfloat16: 128, torch.float16: 1024})


class Int4Weight(NamedTuple):
    """A weight [n, k]. Column c of a block b of BLOCK columns is code c // SUB (4 bits, lowest first) of
    words[b, :, c % SUB]. Past k, scales are 0.

    With the group MXFP4, codes are values of E2M1, whose bits a word holds at `SIGN_BITS` and `SIZE_BITS`.
    A scale is a word of four bytes, the lowest first, of the 32 columns that one code of each word gives: a
    byte b means 2 ** (b - OCTET_BIAS), and 0 means 0.

    With the group NVFP4 a block of words is two halves [n, SUB / 2], each of BLOCK / 2 columns: column c of a
    half h is code c // NVFP4 of words[b, :, h * NVFP4 + c % NVFP4]. So all columns that one code of a half
    gives share a scale, and a kernel needs no choice between scales. A scale is a word of eight bytes, in the
    order of columns: a byte b means (1 + b % 8 / 8) * 2 ** (b // 8 - SCALE_START). Kernels make values that
    are FACTOR times too small of them, and `factors` multiply their sums.
    """

    words: torch.Tensor  # [ceil(k / BLOCK), n, SUB] int16
    # [groups, n] int32: scale in the lower half, -(base + zero point) in the upper; or words of bytes
    # [blocks, n], of MXFP4 int32, of NVFP4 int64
    scales: torch.Tensor
    k: int
    group: int  # columns that share a scale: 32, 64 or a multiple of BLOCK; or MXFP4, or NVFP4
    factors: torch.Tensor | None = None  # [n] float32, of NVFP4

    @property
    def n(self) -> int:
        return self.words.shape[1]

    @classmethod
    def empty(cls, n: int, k: int, group: int, device: torch.device) -> Int4Weight:
        """Zeros."""
        return Int4Experts.empty(1, n, k, group, device).expert(0)

    def rows(self, rows: slice) -> Int4Weight:
        """Some rows of it, in the same memory."""
        factors = None if self.factors is None else self.factors[rows]
        return self._replace(words=self.words[:, rows], scales=self.scales[:, rows], factors=factors)


@dataclass(frozen=True, slots=True)
class Int4Experts:
    """The weights [n, k] of E experts. Indexing dequantises one, in `dtype`."""

    words: torch.Tensor  # [E, ceil(k / BLOCK), n, SUB], as those of Int4Weight
    scales: torch.Tensor  # [E, groups, n]
    k: int
    group: int
    dtype: torch.dtype = torch.bfloat16  # of the scales
    factors: torch.Tensor | None = None  # [E, n]

    @classmethod
    def empty(
        cls,
        experts: int,
        n: int,
        k: int,
        group: int,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Int4Experts:
        """Zeros."""
        if group not in (MXFP4, NVFP4, SUB, 2 * SUB) and (group <= 0 or group % BLOCK):
            raise ValueError(f"groups of 4 bits have 32, 64 or a multiple of {BLOCK} columns, not {group}")
        blocks = -(-k // BLOCK)
        groups = blocks if group in (MXFP4, NVFP4) else -(-blocks * BLOCK // group)
        scale = torch.int64 if group == NVFP4 else torch.int32
        words = torch.zeros(experts, blocks, n, SUB, dtype=torch.int16, device=device)
        scales = torch.zeros(experts, groups, n, dtype=scale, device=device)
        factors = torch.zeros(experts, n, device=device) if group == NVFP4 else None
        return cls(words, scales, k, group, dtype, factors)

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.words), self.words.shape[2], self.k

    def __len__(self) -> int:
        return len(self.words)

    def expert(self, index: int) -> Int4Weight:
        """The weight of one expert, in the same memory."""
        factors = None if self.factors is None else self.factors[index]
        return Int4Weight(self.words[index], self.scales[index], self.k, self.group, factors)

    def __getitem__(self, index: int) -> torch.Tensor:
        """[n, k]"""
        return dequantise_reference(self.words[index], self.expert(index), self.dtype)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """codes [n, k] uint8 below 16 -> words [ceil(k / BLOCK), n, SUB] int16."""
    n, k = codes.shape
    codes = torch.nn.functional.pad(codes, (0, -k % BLOCK)).view(n, -1, BLOCK // SUB, SUB)
    low, high = (codes[:, :, j] | codes[:, :, j + 1] << 4 for j in (0, 2))
    return torch.stack([low, high], dim=-1).view(torch.int16).squeeze(-1).transpose(0, 1).contiguous()


def unpack_codes(words: torch.Tensor, k: int) -> torch.Tensor:
    """The inverse of `pack_codes`: [n, k] uint8."""
    halves = words.transpose(0, 1).contiguous().view(torch.uint8).unflatten(-1, (SUB, 2))
    parts = [part for half in halves.unbind(-1) for part in (half & 15, half >> 4)]
    return torch.stack(parts, dim=2).flatten(1)[:, :k]


def pack_scales(scales: torch.Tensor, zeros: torch.Tensor | int) -> torch.Tensor:
    """scales [groups, n] float16 or bfloat16, zeros of the same shape from 0 to 15 -> `Int4Weight.scales`."""
    zeros = torch.as_tensor(zeros, device=scales.device).expand_as(scales)
    upper = (-(zeros.to(torch.int32) + _BASE[scales.dtype])).to(scales.dtype)
    return torch.stack([scales, upper], dim=-1).view(torch.int32).squeeze(-1)


def unpack_scales(pairs: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `pack_scales`: scales of `dtype` and zeros int32."""
    halves = pairs.contiguous().unsqueeze(-1).view(dtype)
    return halves[..., 0], -halves[..., 1].to(torch.int32) - _BASE[dtype]


def dequantise_reference(words: torch.Tensor, weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    """(code - zero point) * scale of `weight`, whose words are `words`: [n, k], rounded to `dtype`, which is
    that of the scales. Of MXFP4 value * scale, of NVFP4 that and the factor."""
    if weight.group == MXFP4:
        return _dequantise_mxfp4(words, weight, dtype)
    if weight.group == NVFP4:
        return _dequantise_nvfp4(words, weight, dtype)
    if weight.group <= 0:
        raise unknown("group of 4 bits", weight.group)
    scales, zeros = (each.repeat_interleave(weight.group, 0) for each in unpack_scales(weight.scales, dtype))
    codes = unpack_codes(words, weight.k).T.to(torch.int32)
    values = (codes - zeros[: weight.k]).float() * scales[: weight.k].float()
    return values.T.to(dtype).contiguous()


def check_mxfp4_scales(scales: torch.Tensor) -> None:
    """ValueError for a scale, uint8 as in files, that this layout cannot hold."""
    if (largest := int(scales.max()) if scales.numel() else 0) > MAX_MXFP4_SCALE:
        raise ValueError(
            f"a scale is {largest}, 2 ** {largest - SCALE_BIAS}; kept in 4 bits they are at most "
            f"{MAX_MXFP4_SCALE}, 2 ** {MAX_MXFP4_SCALE - SCALE_BIAS}; dtype='float32' dequantises all experts"
        )


def pack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """blocks [n, k / 32, 16] and scales [n, k / 32] uint8, as in files -> words and scales of Int4Weight.

    For scales that `check_mxfp4_scales` passes.
    """
    n, groups = scales.shape
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).view(n, groups * 2 * BYTES)
    octets = torch.where(scales == 0, 0, scales + (OCTET_BIAS - SCALE_BIAS))
    octets = torch.nn.functional.pad(octets, (0, -groups % (BLOCK // SUB)))
    return _pack_e2m1(codes, SUB), octets.contiguous().view(torch.int32).T.contiguous()


def _pack_e2m1(codes: torch.Tensor, width: int) -> torch.Tensor:
    """codes [n, k] uint8 -> words [ceil(k / BLOCK), n, SUB] int16 with bits at SIGN_BITS and SIZE_BITS.
    width: the columns in a row that are the same code of words in a row, SUB or NVFP4."""
    n, k = codes.shape
    columns = torch.nn.functional.pad(codes, (0, -k % BLOCK)).view(n, -1, SUB // width, BLOCK // SUB, width)
    parts = columns.transpose(2, 3).flatten(3).int().unbind(2)
    words = torch.zeros_like(parts[0])
    for code, sign, size in zip(parts, SIGN_BITS, SIZE_BITS, strict=True):
        words |= (code >> 3) << sign | (code & 7) << size
    return words.to(torch.int16).transpose(0, 1).contiguous()


def pack_nvfp4(octets: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """octets [n, k / 2] uint8, as in files, and scales [n, k / 16] float32, values of E4M3 from 0 on -> words
    and scales of Int4Weight. Values of a group whose scale is 0 become 0."""
    codes = torch.where((scales == 0).repeat_interleave(NVFP4, 1), 0, codes_of(octets))
    fraction, exponent = torch.frexp(scales)  # from 0.5 to 1
    made = (exponent - 1 + SCALE_START) * 8 + (fraction * 16 - 8).int()
    made = torch.nn.functional.pad(
        torch.where(scales == 0, 0, made), (0, -scales.shape[1] % (BLOCK // NVFP4))
    )
    return _pack_e2m1(codes, NVFP4), made.to(torch.uint8).view(torch.int64).T.contiguous()


def _dequantise_mxfp4(words: torch.Tensor, weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    octets = weight.scales.contiguous().unsqueeze(-1).view(torch.uint8).transpose(0, 1).flatten(1).float()
    scales = torch.where(octets == 0, 0.0, torch.exp2(octets - OCTET_BIAS))
    values = _e2m1_values(words, weight.k, SUB)
    return (values * scales.repeat_interleave(SUB, 1)[:, : weight.k]).to(dtype)


def _dequantise_nvfp4(words: torch.Tensor, weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    assert weight.factors is not None
    octets = weight.scales.T.contiguous().unsqueeze(-1).view(torch.uint8).flatten(1).int()  # [n, groups]
    scales = (1 + (octets & 7) / 8) * torch.exp2((octets >> 3).float() - SCALE_START)
    values = _e2m1_values(words, weight.k, NVFP4) * scales.repeat_interleave(NVFP4, 1)[:, : weight.k]
    return (values * (weight.factors / FACTOR)[:, None]).to(dtype)


def _e2m1_values(words: torch.Tensor, k: int, width: int) -> torch.Tensor:
    """The inverse of `_pack_e2m1`: values [n, k] float32."""
    wide = words.transpose(0, 1).int()  # [n, blocks, SUB]
    bits = zip(SIGN_BITS, SIZE_BITS, strict=True)
    codes = torch.stack([(wide >> sign & 1) << 3 | wide >> size & 7 for sign, size in bits], dim=2)
    codes = codes.unflatten(3, (SUB // width, width)).transpose(2, 3).flatten(1)  # in the order of columns
    return torch.tensor(VALUES, device=words.device)[codes[:, :k]]
