"""How weights of 4 bits come from a checkpoint: the tensors of a module become its part of a weight.

All formats become one layout, or are dequantised. Opens no file and multiplies nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from math import gcd

import torch
from torch import nn

from nanovllm.formats.int4.kernels.layout import BLOCK, SUB, Int4Weight, pack_codes, pack_scales
from nanovllm.formats.int4.layouts import Int4Format, Int4Shard
from nanovllm.kernels.kinds import unknown
from nanovllm.quantization.shards import WeightMethod, WeightOptions, WeightShard, WeightSource

Store = Callable[[torch.Tensor], object]  # stores rows of a dequantised weight, [n, K]
_MIDDLE = 8  # the zero point of formats without zero points


class Int4Method(WeightMethod):
    """Loads weights that `format` reads, each module's when all of its tensors are there, so an update must
    have all or none. Inputs whose groups are no neighbours are sorted by group."""

    format: Int4Format
    packs: bool  # keep 4 bits, where a kernel can read them; else dequantise
    dtype: torch.dtype
    device: torch.device

    def prepare(self, shards: Sequence[WeightShard], options: WeightOptions) -> list[WeightShard]:
        """What a checkpoint must hold to fill `shards`. ValueError if ranks cannot split them."""
        self.dtype, self.device = options.dtype, options.device
        self._waiting: dict[WeightShard, dict[str, torch.Tensor]] = {}
        self.orders: dict[WeightShard, torch.Tensor] = {}  # of the inputs, of each module's part
        created: list[WeightShard] = [made for shard in shards for made in self.format.shards(shard)]
        for whole, k in {(shard.shape[1], len(_owned(shard)[1])) for shard in shards}:
            self._check_split(whole, k)
        return created

    def keeps_bits(self, options: WeightOptions) -> bool:
        """Whether the weights keep 4 bits; else they are dequantised as they are loaded."""
        return self.packs and keeps_bits(options)

    @abstractmethod
    def target(self, part: WeightShard) -> Int4Weight | Store:
        """The rows that a module's part of a weight fills, in memory of this method; or what stores them
        dequantised."""

    def group_of(self, part: WeightShard) -> int:
        """The columns of this rank's part that share a scale: the largest groups that do not cross the edges
        of the ranks' parts, and that kernels can read. A scale may be repeated."""
        return self._group(part.shape[1], len(_owned(part)[1]))

    def _group(self, whole: int, k: int) -> int:
        group = gcd(self.format.group_of(whole), k)
        return group if group % BLOCK == 0 else gcd(group, BLOCK)

    def _check_split(self, whole: int, k: int) -> None:
        if self._group(whole, k) < SUB:
            unit = gcd(self.format.group_of(whole), BLOCK)
            sizes = [str(size) for size in range(1, 65) if whole % (size * min(unit, SUB)) == 0]
            raise ValueError(
                f"{whole} inputs in groups of {self.format.group_of(whole)} cannot be split into parts of "
                f"{k}: parts must be multiples of {SUB}; tensor_parallel_size could be {', '.join(sizes)}"
            )
        if self.format.sorts and k < whole:
            raise ValueError(
                f"{self.format.name} with desc_act (actorder) cannot be split over ranks, because a rank's "
                f"inputs have parts of all groups; use tensor_parallel_size=1, or a file without desc_act"
            )

    def load(self, shard: WeightShard, source: WeightSource) -> None:
        assert isinstance(shard, Int4Shard) and shard.weight is not None
        part = shard.weight
        whole = self.format.group_of(part.shape[1])
        rows, columns = _owned(part)
        groups = range(columns.start // whole, -(-columns.stop // whole))
        if shard.role == "codes":
            read = self.format.read_codes(source, rows, columns)
        elif shard.role == "scales":
            read = self.format.read_scales(source, rows, groups)
        elif shard.role == "zeros":
            read = self.format.read_zeros(source, rows, groups)
        elif shard.role in ("order", "shape"):
            read = source[:]
        else:
            raise unknown("tensor of a weight in 4 bits", shard.role)
        waiting = self._waiting.setdefault(part, {})
        waiting[shard.role] = torch.empty_like(read, device=self.device).copy_(read)
        if len(waiting) == len(self.format.shards(part)):
            del self._waiting[part]
            self._fill(part, waiting)

    def _fill(self, part: WeightShard, tensors: dict[str, torch.Tensor]) -> None:
        """Store one module's part of the weight. All of its tensors are there."""
        columns, group = _owned(part)[1], self.group_of(part)
        codes, scales = tensors["codes"], tensors["scales"].to(self.dtype)
        zeros = tensors.get("zeros", torch.tensor(_MIDDLE, device=self.device)).expand_as(scales)
        if "order" in tensors:
            codes = self._sorted(part, codes, tensors["order"])
        if not (scales != 0).all() or not scales.isfinite().all():
            raise ValueError(f"{name_of(part, self.format.scales)} has values that {self.dtype} cannot hold")
        # The groups of the file that hold the first columns of ours.
        starts = torch.arange(0, len(columns), group, device=self.device) + columns.start
        whole = self.format.group_of(part.shape[1])
        of_file = starts // whole - columns.start // whole
        scales, zeros = scales[of_file], zeros[of_file]
        target = self.target(part)
        if isinstance(target, Int4Weight):
            target.words.copy_(pack_codes(codes))
            target.scales[: len(starts)] = pack_scales(scales, zeros)
            return
        values = _dequantised(codes, scales, zeros, group)
        if self.format.sorts:  # back: x stays as it is
            values = torch.empty_like(values).index_copy_(1, self.orders[part].long(), values)
        target(values)

    def _sorted(self, part: WeightShard, codes: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        """The columns of codes [n, K] sorted by `groups` [K], in which they are. Dummy weights have one."""
        if not self.format.sorts or not groups.any():
            order = torch.arange(len(groups), device=groups.device)
        else:
            order = torch.argsort(groups, stable=True)
        self.orders[part] = order.int()
        return codes[:, order] if self.format.sorts else codes

    def finish_loading(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for part, tensors in waiting.items():
            missing = [shard.param for shard in self.format.shards(part) if shard.role not in tensors]
            has = [shard.param for shard in self.format.shards(part) if shard.role in tensors]
            raise ValueError(
                f"{part.module or 'this weight'}: {', '.join(has)} came without {', '.join(missing)}; "
                "pass all of them together"
            )


def keeps_bits(options: WeightOptions) -> bool:
    """Whether kernels read 4 bits on this device and for this dtype."""
    return options.dtype in (torch.float16, torch.bfloat16) and options.device.type != "cpu"


def register(layer: nn.Module, name: str, data: torch.Tensor) -> None:
    """Make `data` a parameter of the layer."""
    layer.register_parameter(name, nn.Parameter(data, requires_grad=False))


def name_of(part: WeightShard, param: str) -> str:
    """The checkpoint's name of a tensor of a module, from the layer on."""
    return param if part.module is None else f"{part.module}.{param}"


def _dequantised(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group: int) -> torch.Tensor:
    """(codes [n, K] uint8 - zeros) * scales [groups, n], [n, K] in the dtype of the scales."""
    scales, zeros = (each.repeat_interleave(group, 0).T for each in (scales.float(), zeros))
    return (codes.float() - zeros) * scales


def _owned(part: WeightShard) -> tuple[range, range]:
    """The rows and the columns of the whole weight that a rank holds."""
    own = range(part.start, part.start + part.length)
    n, k = part.shape
    return (own, range(k)) if part.dim == 0 else (range(n), own)
