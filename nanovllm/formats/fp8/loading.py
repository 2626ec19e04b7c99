"""How weights in FP8 (E4M3) come from a checkpoint: codes with scales, or floats, which are quantised.

The scales are of rows, of the whole weight or of blocks of 128 x 128. Opens no file and multiplies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto

import torch
from torch import nn

from nanovllm.errors import ModelLoadError
from nanovllm.formats.fp8.kernels.matmul import Fp8Weight
from nanovllm.formats.fp8.kernels.values import FP8, GROUP
from nanovllm.kernels.fp8 import FP8_MAX
from nanovllm.kernels.kinds import Kinds, unknown
from nanovllm.quantization.shards import (
    FLOATS,
    WeightMethod,
    WeightShard,
    WeightSource,
    dtype_of,
    scale_values,
)

Store = Callable[[torch.Tensor, int], object]  # stores rows of a dequantised weight, from this one on
_CHUNK = 2**24  # elements that are quantised at once
# In files; the last two are powers of two.
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8)


class Stored(Enum):
    """How a checkpoint holds a weight [N, K]."""

    FLOATS = auto()  # in 16 or 32 bits; quantised as it is loaded, as ROWS are
    ROWS = auto()  # FP8, `weight_scale` [N, 1]
    TENSOR = auto()  # FP8, `weight_scale` [1]
    BLOCKS = auto()  # FP8, `weight_scale_inv` [ceil(N / 128), ceil(K / 128)]: factors, in spite of the name
    SCALED_BLOCKS = auto()  # the same by the name of ROWS, `weight_scale`

    @property
    def in_blocks(self) -> bool:
        """Whether a scale is that of a block."""
        return _IN_BLOCKS[self]

    @property
    def group(self) -> int | None:
        """Columns that share a scale; None: all."""
        return GROUP if self.in_blocks else None

    def scales(self, weight: WeightShard) -> WeightShard:
        """The shard of the scales of a weight's shard. Every rank reads all of them."""
        n, k = weight.shape
        blocks = -(-n // GROUP), -(-k // GROUP)
        scales: dict[Stored, tuple[str, tuple[int, ...]]] = {
            Stored.FLOATS: ("weight_scale", (n, 1)),
            Stored.ROWS: ("weight_scale", (n, 1)),
            Stored.TENSOR: ("weight_scale", (1,)),
            Stored.BLOCKS: ("weight_scale_inv", blocks),
            Stored.SCALED_BLOCKS: ("weight_scale", blocks),
        }
        name, shape = Kinds(_WAY, scales)[self]
        whole = replace(WeightShard.whole(name, shape), module=weight.module)
        return replace(whole, dtypes=_SCALE_DTYPES, scale=True)


_WAY = "way to store weights in FP8"
_IN_BLOCKS = Kinds(
    _WAY,
    {
        Stored.FLOATS: False,
        Stored.ROWS: False,
        Stored.TENSOR: False,
        Stored.BLOCKS: True,
        Stored.SCALED_BLOCKS: True,
    },
)


def quantise_weight(
    weight: torch.Tensor, stored: Stored, scales: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [N, K] as codes and float32 scales of the shape in checkpoints; with `scales`, with these.

    A scale is the largest absolute value / 448; that of zeros is 1.
    """
    n, k = weight.shape
    wide = weight.float()
    if stored.in_blocks:
        padded = nn.functional.pad(wide, (0, -k % GROUP, 0, -n % GROUP))
        tiles = padded.view(-(-n // GROUP), GROUP, -(-k // GROUP), GROUP)
        scales = _scales(tiles.abs().amax((1, 3))) if scales is None else scales
        return _codes(tiles, scales[:, None, :, None]).view_as(padded)[:n, :k].contiguous(), scales
    if scales is None:
        top = wide.abs()
        scales = _scales(top.amax().view(1) if stored is Stored.TENSOR else top.amax(1, keepdim=True))
    return _codes(wide, scales), scales


def _scales(top: torch.Tensor) -> torch.Tensor:
    return torch.where(
        top == 0, 1.0, (top / torch.full_like(top, FP8_MAX)).clamp(min=torch.finfo(torch.float32).tiny)
    )


def _codes(wide: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (wide / scales).clamp_(-FP8_MAX, FP8_MAX).to(FP8)


class Part:
    """This rank's part of one tensor of a checkpoint, and where it goes: codes and scales, or floats.

    Codes that are dequantised wait for their scales, and scales for their codes.
    """

    def __init__(self, shard: WeightShard, stored: Stored, target: Fp8Weight | Store) -> None:
        """target: [rows, columns] of this rank, in which the shard says its place."""
        self.shard, self.stored, self.target = shard, stored, target
        (n, k), end = shard.shape, shard.start + shard.length
        self.rows = range(shard.start, end) if shard.dim == 0 else range(n)
        self.columns = range(k) if shard.dim == 0 else range(shard.start, end)
        self.offset = shard.offset if shard.dim == 0 else 0
        self.arrived: set[str] = set()  # in this load: codes, scales, floats
        self._codes: torch.Tensor | None = None  # this rank's, [rows, columns]
        self._scales: torch.Tensor | None = None

    def load(self, param: str, source: WeightSource, device: torch.device) -> None:
        """Load codes, scales or floats."""
        if param == "weight" and dtype_of(source) == FP8:
            self.arrived.add("codes")
            if self.rows:
                columns = slice(self.columns.start, self.columns.stop)
                codes = source[self.rows.start : self.rows.stop, columns]
                if isinstance(self.target, Fp8Weight):
                    self.target.codes[self._place(self.rows), : len(self.columns)] = codes
                else:
                    self._codes = torch.empty_like(codes, device=device).copy_(codes)
                    self._dequantise()
        elif param == "weight":
            self.arrived.add("floats")
            self._quantise(source, device)
        elif param in ("weight_scale", "weight_scale_inv"):
            self.arrived.add("scales")
            self._store_scales(scale_values(source[...]).to(device))
        elif param != "input_scale":
            raise unknown("tensor of a weight in FP8", param)

    def finish(self) -> None:
        """ValueError if codes or their scales are missing; forget what has arrived."""
        arrived = sorted(self.arrived)
        self.arrived, self._codes, self._scales = set(), None, None
        weight, scale = self._name("weight"), self._name(self.stored.scales(self.shard).param)
        if arrived in (["codes"], ["scales"]):
            other = f"without {scale}" if arrived == ["codes"] else f"which {scale} is for, is missing"
            raise ValueError(f"{weight} in float8_e4m3fn, {other}; pass both in one update")
        if len(arrived) > 1 and "floats" in arrived:
            raise ValueError(f"{weight} is not in FP8, and {scale} came with it; pass one")

    def _name(self, param: str) -> str:
        return param if self.shard.module is None else f"{self.shard.module}.{param}"

    def _scales_of_rows(self, scales: torch.Tensor, first: int, rows: range) -> torch.Tensor:
        """The scales of some rows of the checkpoint's tensor, [rows, 1 or blocks of columns]; those that are
        given begin at row `first`."""
        if self.stored is Stored.TENSOR:
            return scales.reshape(1, 1).expand(len(rows), 1)
        if not self.stored.in_blocks:
            return scales.reshape(-1, 1)[rows.start - first : rows.stop - first]
        blocks = torch.arange(rows.start, rows.stop, device=scales.device) // GROUP - first // GROUP
        return scales.reshape(-1, -(-self.shard.shape[1] // GROUP))[blocks]

    def _factors(self, scales: torch.Tensor) -> torch.Tensor:
        """`_scales_of_rows` as factors of this rank's columns."""
        if not self.stored.in_blocks:
            return scales
        return scales[:, torch.arange(self.columns.start, self.columns.stop, device=scales.device) // GROUP]

    def _pieces(self) -> Iterator[range]:
        """All rows, some at a time, in whole blocks."""
        step = max(GROUP, _CHUNK // max(1, self.shard.shape[1]) // GROUP * GROUP)
        if self.rows:
            end = min(-(-self.rows.stop // GROUP) * GROUP, self.shard.shape[0])
            for start in range(self.rows.start // GROUP * GROUP, end, step):
                yield range(start, min(start + step, end))

    def _own(self, piece: range) -> range:
        """This rank's rows among them."""
        return range(max(piece.start, self.rows.start), min(piece.stop, self.rows.stop))

    def _place(self, rows: range) -> slice:
        """Where these rows of the checkpoint's tensor are in the target."""
        start = self.offset + rows.start - self.rows.start
        return slice(start, start + len(rows))

    def _quantise(self, source: WeightSource, device: torch.device) -> None:
        """Quantise a tensor of floats. Scales need whole rows, so every rank reads them."""
        scales = None
        if self.stored is Stored.TENSOR:
            tops = [source[a : a + GROUP].abs().amax().float() for a in range(0, self.shard.shape[0], GROUP)]
            scales = _scales(torch.stack(tops).amax().view(1).to(device))
        columns = slice(self.columns.start, self.columns.stop)
        for piece in self._pieces():
            rows = source[piece.start : piece.stop].to(device)
            codes, found = quantise_weight(rows, self.stored, scales)
            own = self._own(piece)
            codes = codes[own.start - piece.start : own.stop - piece.start, columns]
            factors = self._scales_of_rows(found, piece.start, own)
            if isinstance(self.target, Fp8Weight):
                self.target.codes[self._place(own), : len(self.columns)] = codes
                self._store_own(self.target, own, factors)
            else:
                self.target(codes.float() * self._factors(factors), self._place(own).start)

    def _store_scales(self, scales: torch.Tensor) -> None:
        """Store the scales of a checkpoint."""
        if isinstance(self.target, Fp8Weight):
            self._store_own(self.target, self.rows, self._scales_of_rows(scales, 0, self.rows))
        else:
            self._scales = scales
            self._dequantise()

    def _dequantise(self) -> None:
        """Store the product of codes and scales, if both are there."""
        codes, scales = self._codes, self._scales
        if codes is None or scales is None:
            return
        assert not isinstance(self.target, Fp8Weight)
        for piece in self._pieces():
            own = self._own(piece)
            factors = self._factors(self._scales_of_rows(scales, 0, own))
            rows = codes[own.start - self.rows.start : own.stop - self.rows.start]
            self.target(rows.float() * factors, self._place(own).start)
        self._codes = self._scales = None

    def _store_own(self, target: Fp8Weight, rows: range, scales: torch.Tensor) -> None:
        """Store `_scales_of_rows`."""
        place = self._place(rows)
        if self.stored.group is None:
            target.scales[place] = scales[:, 0]
            return
        step, first = target.group_rows, self.columns.start // GROUP
        end = -(-self.columns.stop // GROUP)
        scales = scales[::step, first:end]
        target.scales[place.start // step : place.start // step + len(scales), : end - first] = scales


def is_aligned(shards: Sequence[WeightShard]) -> bool:
    """Whether the rows of each shard are whole blocks, in the checkpoint and in the parameter."""
    rows = [shard for shard in shards if shard.dim == 0]
    return all(shard.start % GROUP == 0 and shard.offset % GROUP == 0 for shard in rows)


def splits_blocks(shards: Sequence[WeightShard], stored: Stored) -> bool:
    """Whether the columns of some rank begin within a block; the same for all ranks."""
    split = [shard for shard in shards if shard.dim == 1 and shard.length < shard.shape[1]]
    return stored.in_blocks and any(shard.length % GROUP for shard in split)


def make_weight(
    layer: nn.Module,
    names: tuple[str, str],
    shape: tuple[int, ...],
    groups: tuple[int, ...],
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Parameters, all zero: codes of `shape`, and scales of `groups`, which are one dimension in memory,
    because rows of weights are checked for alignment."""
    for name, size, dtype in ((names[0], shape, FP8), (names[1], groups, torch.float32)):
        data = torch.zeros(size, dtype=dtype, device=device)
        data = data if dtype == FP8 else data.flatten()
        layer.register_parameter(name, nn.Parameter(data, requires_grad=False))
    return layer.get_parameter(names[0]), layer.get_parameter(names[1]).view(groups)


class Fp8Method(WeightMethod):
    """Loads the parts of weights, each by itself."""

    parts: dict[str | None, Part]  # by the module in the checkpoint
    stored: Stored
    device: torch.device

    def needed(self, shards: Sequence[WeightShard], input_scales: bool) -> list[WeightShard]:
        """What a checkpoint must hold to fill the weights of `shards`."""
        if self.stored is Stored.FLOATS:
            return list(shards)
        weights = [replace(shard, dtypes=(FP8,), update_dtypes=FLOATS) for shard in shards]
        scales = [self.stored.scales(shard) for shard in shards]
        inputs = [replace(scale, param="input_scale", shape=(1,), length=1) for scale in scales]
        return weights + scales + (inputs if input_scales else [])

    def load(self, shard: WeightShard, source: WeightSource) -> None:
        self.parts[shard.module].load(shard.param, source, self.device)

    def finish_loading(self) -> None:
        for part in self.parts.values():
            part.finish()


def rows_in_blocks(name: str, shape: Sequence[int], rows: Mapping[str, int]) -> Mapping[str, int]:
    """See `QuantConfig.packed_rows`: scales of blocks have a row for each GROUP rows of the weight."""
    total = sum(rows.values())
    if "scale" not in name.rpartition(".")[2] or len(shape) < 2 or not shape[0] == -(-total // GROUP) < total:
        return rows
    if uneven := [part for part, count in rows.items() if count % GROUP]:
        module = name.split(".")[-2]
        raise ModelLoadError(
            f"{name} has scales of blocks of {GROUP} rows, and {', '.join(uneven)}, which "
            f"{module} holds, {'has' if len(uneven) == 1 else 'have'} no whole blocks: "
            f"{rows}; use a checkpoint with scales of rows or of tensors"
        )
    return {part: count // GROUP for part, count in rows.items()}
