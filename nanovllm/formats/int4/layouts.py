"""Int4Format: where tensors of a checkpoint hold 4-bit codes, scales, zero points and the order of inputs.

AWQ, GPTQ and compressed-tensors' pack-quantized files are values of it. Reads tensors; stores and multiplies
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal

import torch

from nanovllm.formats.gathered import Format, PartShard, owned
from nanovllm.formats.int4.kernels.layout import BLOCK, SUB
from nanovllm.kernels.kinds import Kinds, unknown
from nanovllm.quantization.shards import WeightOptions, WeightShard, WeightSource

Role = Literal["codes", "scales", "zeros", "order", "shape"]
_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of each of 8 neighbours in a word; elsewhere they are in order
_PER_WORD = 8
_SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MIDDLE = 8  # the zero point of formats without zero points
_MIDDLES = 0x88888888  # a word of eight of them
_ONES = 0x11111111
_DUMMY_SCALE = 0.0043  # random codes then spread by 0.02


@dataclass(frozen=True, slots=True)
class Int4Shard(PartShard):
    """One tensor of a weight [N, K] in 4 bits."""

    role: Role = "codes"
    groups: int = 0  # of an order
    format: Int4Format | None = None

    def read(self, source: WeightSource) -> torch.Tensor:
        """A rank's codes [rows, columns], scales and zero points [groups, rows]; of others all."""
        assert self.weight is not None and self.format is not None
        rows, columns = owned(self.weight)
        whole = self.format.group_of(self.weight.shape[1])
        groups = range(columns.start // whole, -(-columns.stop // whole))
        if self.role == "codes":
            return self.format.read_codes(source, rows, columns)
        if self.role == "scales":
            return self.format.read_scales(source, rows, groups)
        if self.role == "zeros":
            return self.format.read_zeros(source, rows, groups)
        if self.role in ("order", "shape"):
            return source[:]
        raise unknown("tensor of a weight in 4 bits", self.role)

    def wrong_value(self, source: WeightSource) -> str | None:
        """A value that this tensor must not have, for an error."""
        if self.role in ("codes", "zeros"):
            return None
        values = source[:]
        if self.role == "scales":
            bad = values[~(values.isfinite() & (values != 0))]
            need = "finite and not 0"
        elif self.role == "order":
            return self._wrong_order(values.long())
        elif self.role == "shape":
            assert self.weight is not None
            bad = values if values.tolist() != list(self.weight.shape) else values[:0]
            need = f"the shape {list(self.weight.shape)}"
        else:
            raise unknown("tensor of a weight in 4 bits", self.role)
        return f"{bad.flatten()[0].item()}, which must be {need}" if bad.numel() else None

    def _wrong_order(self, values: torch.Tensor) -> str | None:
        bad = values[(values < 0) | (values >= self.groups)]
        if len(bad):
            return f"{bad[0].item()}, which must be a group from 0 to {self.groups - 1}"
        size = len(values) // self.groups
        counts = values.bincount(minlength=self.groups)
        for group in (counts != size).nonzero().flatten().tolist():
            return f"group {group} {counts[group].item()} times, which must be {size}"
        assert self.format is not None
        if not self.format.sorts and not values.equal(torch.arange(len(values)) // size):
            return "groups that are no neighbours, but config.json says desc_act: false"
        return None


@dataclass(frozen=True)
class Int4Format(Format):
    """How a checkpoint holds weights [N, K]: 8 codes in an int32 word, a scale and a zero point for each
    `group` columns of a row; a value is (code - zero point) * scale."""

    name: str
    group: int  # -1: all columns of a row
    codes: str  # the last part of the tensor's name
    scales: str
    zeros: str | None  # None: the zero point is 8
    order: str | None = None  # a tensor [K] of the groups of all columns; None: groups are neighbours
    sorts: bool = False  # such groups are no neighbours
    shape: str | None = None  # a tensor [2], N and K
    outputs_first: bool = False  # all tensors are [N, ...], not [..., N]
    packs_outputs: bool = False  # a word holds codes of 8 outputs, not of 8 inputs
    nibbles: tuple[int, ...] = tuple(range(_PER_WORD))
    less: int = 0  # zero points are stored as words minus this
    dtype: torch.dtype = torch.float32  # to which scales are rounded

    def on(self, options: WeightOptions) -> Int4Format:
        return replace(self, dtype=options.dtype)

    def group_of(self, k: int) -> int:
        """The columns of a weight with k columns that share a scale."""
        return k if self.group == -1 else self.group

    def shards(self, weight: WeightShard) -> list[Int4Shard]:
        """The tensors that hold `weight`, a part of a weight. ValueError if its sizes do not fit, or if ranks
        cannot split it."""
        n, k = weight.shape
        group = self.group_of(k)
        if k % group or k % _PER_WORD or (n % _PER_WORD and (self.packs_outputs or self.zeros)):
            raise ValueError(
                f"{weight.module or 'a weight'} has {n} outputs and {k} inputs, which {self.name} with "
                f"groups of {group}, of config.json, cannot hold: inputs must be a multiple of "
                f"{max(group, _PER_WORD)}, outputs of 8"
            )
        self._check_split(weight)
        words = (-(-n // _PER_WORD), k) if self.packs_outputs else (n, k // _PER_WORD)
        groups = k // group
        found = [
            self._shard(weight, "codes", self.codes, words),
            self._shard(weight, "scales", self.scales, (n, groups)),
        ]
        if self.zeros is not None:
            found.append(self._shard(weight, "zeros", self.zeros, (-(-n // _PER_WORD), groups)))
        if self.order is not None:
            found.append(self._shard(weight, "order", self.order, (k,), groups))
        if self.shape is not None:
            found.append(self._shard(weight, "shape", self.shape, (2,)))
        return found

    def _shard(
        self, weight: WeightShard, role: Role, param: str, shape: tuple[int, ...], groups: int = 0
    ) -> Int4Shard:
        tensors: dict[Role, tuple[tuple[torch.dtype, ...], Any]] = {  # dtypes and dummies
            "codes": ((torch.int32,), _around_the_middle),
            "scales": (_SCALE_DTYPES, _DUMMY_SCALE),
            "zeros": ((torch.int32,), float(_int32(_MIDDLES - self.less))),
            "order": ((torch.int32, torch.int64), 0.0),
            "shape": ((torch.int64, torch.int32), 0.0),
        }
        dtypes, dummy = Kinds("tensor of a weight in 4 bits", tensors)[role]
        if len(shape) == 2 and not self.outputs_first:
            shape = shape[::-1]
        made = Int4Shard.of(param, weight, shape, dtypes, dummy=dummy)
        return replace(made, role=role, groups=groups, format=self)

    def group_here(self, part: WeightShard) -> int:
        """The columns of this rank's part that share a scale: the largest groups that do not cross the edges
        of the ranks' parts, and that kernels can read. A scale may be repeated."""
        group = gcd(self.group_of(part.shape[1]), len(owned(part)[1]))
        return group if group % BLOCK == 0 else gcd(group, BLOCK)

    def _check_split(self, part: WeightShard) -> None:
        whole, k = part.shape[1], len(owned(part)[1])
        if self.group_here(part) < SUB:
            unit = gcd(self.group_of(whole), BLOCK)
            sizes = [str(size) for size in range(1, 65) if whole % (size * min(unit, SUB)) == 0]
            raise ValueError(
                f"{whole} inputs in groups of {self.group_of(whole)} cannot be split into parts of {k}: "
                f"parts must be multiples of {SUB}; tensor_parallel_size could be {', '.join(sizes)}"
            )
        if self.sorts and k < whole:
            raise ValueError(
                f"{self.name} with desc_act (actorder) cannot be split over ranks, because a rank's "
                f"inputs have parts of all groups; use tensor_parallel_size=1, or a file without desc_act"
            )

    def values(self, part: WeightShard, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        columns, whole = owned(part)[1], self.group_of(part.shape[1])
        scales, zeros = self.scales_and_zeros(part, tensors)
        groups = torch.arange(columns.start, columns.stop, device=scales.device) // whole
        groups -= columns.start // whole
        if self.order is not None and self.sorts:
            groups = tensors[self.order].long()
        return (tensors[self.codes].float() - zeros[groups].T) * scales[groups].T.float()

    def scales_and_zeros(
        self, part: WeightShard, tensors: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and zero points [groups, rows], of what the shards have read. ValueError for scales that the
        model's dtype cannot hold."""
        scales = tensors[self.scales].to(self.dtype)
        if not (scales != 0).all() or not scales.isfinite().all():
            raise ValueError(f"{name_of(part, self.scales)} has values that {self.dtype} cannot hold")
        middle = torch.tensor(_MIDDLE, device=scales.device)
        zeros = middle if self.zeros is None else tensors[self.zeros]
        return scales, zeros.expand_as(scales)

    def read_codes(self, source: WeightSource, rows: range, columns: range) -> torch.Tensor:
        """The codes of a part of the weight, [rows, columns] uint8."""
        return self._read(source, rows, columns, self.packs_outputs, self.nibbles)

    def read_zeros(self, source: WeightSource, rows: range, groups: range) -> torch.Tensor:
        """The zero points of a part of the weight, [groups, rows] uint8."""
        return self._read(source, rows, groups, True, self.nibbles, self.less).T

    def read_scales(self, source: WeightSource, rows: range, groups: range) -> torch.Tensor:
        """The scales of a part of the weight, [groups, rows], in the file's dtype."""
        part = slice(rows.start, rows.stop), slice(groups.start, groups.stop)
        return source[part].T if self.outputs_first else source[part[::-1]]

    def _read(
        self,
        source: WeightSource,
        rows: range,
        columns: range,
        packs_outputs: bool,
        nibbles: tuple[int, ...],
        less: int = 0,
    ) -> torch.Tensor:
        """[rows, columns] uint8 of a packed tensor. Only the words that hold them are read."""
        packed, other = (rows, columns) if packs_outputs else (columns, rows)
        first = packed.start // _PER_WORD
        part = slice(first, -(-packed.stop // _PER_WORD)), slice(other.start, other.stop)
        packed_first = packs_outputs == self.outputs_first
        words = source[part].T if packed_first else source[part[::-1]]
        if less:
            words = words + less  # with carries between codes, as they were stored
        values = unpacked(words, nibbles)
        start = packed.start - first * _PER_WORD
        values = values[:, start : start + len(packed)]
        return values.T if packs_outputs else values


def _int32(word: int) -> int:
    """The int32 with the same 32 bits."""
    return (word + 2**31) % 2**32 - 2**31


def _around_the_middle(words: torch.Tensor) -> torch.Tensor:
    """Random int32 words whose codes of 0 become 8, so that the mean of all is 8. Else all weights had a part
    in common, and a router would send all rows to the same experts."""
    some = (words | words >> 1 | words >> 2 | words >> 3) & _ONES
    return words | (some ^ _ONES) << 3


def name_of(part: WeightShard, param: str) -> str:
    """The checkpoint's name of a tensor of a module, from the layer on."""
    return param if part.module is None else f"{part.module}.{param}"


def unpacked(words: torch.Tensor, nibbles: tuple[int, ...]) -> torch.Tensor:
    """int32 words [m, w] -> their codes [m, 8 * w] uint8: element e of a word is its nibble nibbles[e]."""
    octets = words.contiguous().view(torch.uint8)
    codes = torch.stack([octets & 15, octets >> 4], dim=-1).view(*words.shape, _PER_WORD)
    if nibbles != tuple(range(_PER_WORD)):
        codes = codes[..., list(nibbles)]
    return codes.flatten(1)


def awq(group: int, zero_points: bool) -> Int4Format:
    """AutoAWQ's version "gemm"."""
    zeros = "qzeros" if zero_points else None
    return Int4Format("AWQ", group, "qweight", "scales", zeros, packs_outputs=True, nibbles=_AWQ)


def gptq(group: int, sorts: bool, version: int) -> Int4Format:
    """AutoGPTQ's and GPTQModel's checkpoint formats "gptq" (1) and "gptq_v2" (2)."""
    less = {1: _ONES, 2: 0}[version]
    return Int4Format("GPTQ", group, "qweight", "scales", "qzeros", "g_idx", sorts, less=less)


def pack_quantized(group: int, zero_points: bool, sorts: bool) -> Int4Format:
    """compressed-tensors' format "pack-quantized" with 4 bits."""
    return Int4Format(
        "compressed-tensors (pack-quantized)",
        group,
        "weight_packed",
        "weight_scale",
        "weight_zero_point" if zero_points else None,
        "weight_g_idx" if sorts else None,
        sorts,
        shape="weight_shape",
        outputs_first=True,
    )
