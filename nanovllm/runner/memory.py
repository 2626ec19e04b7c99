"""The memory of weights and KV cache: whether it suffices on every rank, and how layers share the cache.

The cache is one tensor for all attention layers. Asks no device, and knows no sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from nanovllm import doors
from nanovllm.attention.rotary import AttentionSpec
from nanovllm.batch import Batch
from nanovllm.config import Config
from nanovllm.device import Device
from nanovllm.doors import Table, cpu_door
from nanovllm.errors import KVCacheMemoryError
from nanovllm.kv_group import ONE_GROUP, KVGroup
from nanovllm.models.decoder import Attention

logger = logging.getLogger("nanovllm")

CALIBRATION_TOKENS = 2048  # of the prompt from which an FP8 cache gets its scales, or `max_model_len`


@dataclass(frozen=True, slots=True)
class KVCacheSpace:
    """The memory of one rank's device for the KV cache, in bytes."""

    device: str
    free: int
    total: int
    budget: int  # for the KV cache
    reserve: int  # for activations
    per_block: int
    lacking: int = 0  # of the engine's share, because other programs use the device


def check_weights_fit(need: int, memory: list[tuple[int, int]], config: Config, device: Device) -> None:
    """Raise KVCacheMemoryError if a rank's weights need more memory than it may use.

    need: bytes. memory: free and total bytes of each rank's device; ranks on a CPU share one memory.
    """
    devices = device.ranks(len(memory))
    for rank, (free, total) in enumerate(memory):
        may = min(int(total * config.gpu_memory_utilization), free)
        if not device.is_cuda:
            may = free // len(memory)
        if need > may:
            whose = f"rank {rank} ({devices[rank]})" if len(memory) > 1 else devices[rank]
            share = f", gpu_memory_utilization is {config.gpu_memory_utilization}"
            fix = "Raise gpu_memory_utilization" if need <= free else "Close other programs on the device"
            fix += ", or use more devices (tensor_parallel_size) or a smaller model"
            if not device.is_cuda:  # whose ranks share one memory
                is_float32 = device.resolve_dtype(config.dtype, "bfloat16").itemsize == 4
                half = "dtype='bfloat16' (half of float32) or " if is_float32 else ""
                share, fix = "", f"Close other programs, or use {half}a smaller model"
            raise KVCacheMemoryError(
                f"the model does not fit: its weights need {need / 2**30:,.2f} GiB on {whose}, and "
                f"{may / 2**30:,.2f} GiB may be used ({free / 2**30:,.2f} of {total / 2**30:,.2f} "
                f"GiB are free{share}). {fix}"
            )


def fit_kv_cache(spaces: list[KVCacheSpace], config: Config, block_size: int, most: int) -> int:
    """Return the number of KV cache blocks of every rank: what the options ask for, or what fits, up to
    `most`.

    Raises KVCacheMemoryError, with a rank's memory and the fix, if they do not fit.
    """
    num_blocks, asked = config.num_kvcache_blocks, config.kv_cache_memory_bytes
    fix = (
        f"Raise gpu_memory_utilization (now {config.gpu_memory_utilization}), or lower max_model_len, "
        "max_num_batched_tokens or max_num_seqs, which need memory for activations"
    )
    if spaces[0].device == "cpu":  # whose cache takes at most half of the free memory by default
        fix = "Pass kv_cache_memory_bytes, up to what is free, or a smaller kvcache_block_size"
    if num_blocks is not None:
        fix = f"Lower num_kvcache_blocks (now {num_blocks})"
    if asked is not None:
        fix = f"Change kv_cache_memory_bytes (now {asked})"
        spaces = [replace(space, budget=asked) for space in spaces]
        num_blocks = asked // spaces[0].per_block
    if num_blocks is None:
        num_blocks = min(most, *(space.budget // space.per_block for space in spaces))
    for rank, space in enumerate(spaces):
        if num_blocks * space.per_block > space.free or (num_blocks < 1 and space.budget < space.per_block):
            num_blocks = max(num_blocks, 1)
            need, may = num_blocks * space.per_block / 2**20, max(space.budget, 0) / 2**20
            whose = f" on rank {rank} ({space.device})" if len(spaces) > 1 else ""
            raise KVCacheMemoryError(
                f"no room for the KV cache{whose}: {num_blocks} block(s) of {block_size} tokens need "
                f"{need:,.1f} MiB, and {may:,.1f} MiB may be used ({space.free / 2**20:,.0f} of "
                f"{space.total / 2**20:,.0f} MiB are free, {space.reserve / 2**20:,.0f} MiB are kept for "
                f"activations). {fix}; or close other programs on the device"
            )
    tight = min(spaces, key=lambda space: space.budget // space.per_block)
    chosen = config.num_kvcache_blocks is not None or asked is not None
    if tight.lacking > 0 and not chosen and num_blocks < most:
        logger.warning(
            "%s has %.2f of %.2f GiB free, so the KV cache is %.2f GiB smaller than "
            "gpu_memory_utilization=%s allows",
            *(tight.device, tight.free / 2**30, tight.total / 2**30, tight.lacking / 2**30),
            config.gpu_memory_utilization,
        )
    size = num_blocks * spaces[0].per_block / 2**30
    each = " on each rank" if len(spaces) > 1 else ""
    logger.info("KV cache: %d blocks of %d tokens, %.2f GiB%s", num_blocks, block_size, size, each)
    if spaces[0].device == "cpu" and not chosen:
        cpu_door("warn_of_cache")(size, len(spaces), spaces[0].free / 2**30)
    return num_blocks


LAYOUTS: Table[Callable[[Sequence[AttentionSpec], int, int], CacheLayout]] = Table(doors.LAYOUTS)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How layers share the cache [2, layers, num_blocks, block_size * cell], which is contiguous.

    A block of the cache is a slab of the pool. Each layer sees an ordinary contiguous cache [blocks,
    block_size, KV heads, head_dim]. This layout has one group of layers, with the same blocks.
    """

    layers: int  # of the cache
    cell: int  # elements of a position in a layer of the cache
    sizes: tuple[int, ...]  # of each attention layer: KV heads * head_dim; 0: it reads those of another layer
    group_of: tuple[int, ...]  # of each attention layer
    groups: tuple[KVGroup, ...] = ONE_GROUP
    own_numbers: bool = False  # whether blocks have other numbers in layers than in the pool

    @classmethod
    def plain(cls, specs: Sequence[AttentionSpec]) -> CacheLayout:
        """All layers have the same blocks, and keep them."""
        sizes = tuple(0 if spec.kv_from is not None else spec.num_kv_heads * spec.head_dim for spec in specs)
        own = [size for size in sizes if size]
        layers, cell = (len(own), own[0]) if len({*own}) == 1 else (1, sum(own))
        return cls(layers, cell, sizes, (0,) * len(specs))

    @classmethod
    def of(cls, specs: Sequence[AttentionSpec], block_size: int, tile: int) -> CacheLayout:
        """tile: `window_tile` of the backend."""
        if all(spec.window is None for spec in specs):
            return cls.plain(specs)
        return LAYOUTS["windows"](specs, block_size, tile)

    def shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        return 2, self.layers, num_blocks, block_size * self.cell

    def numbered(self, batch: Batch, slabs: int) -> Batch:
        """A batch with block numbers of the pool, of `slabs` slabs, as one with those of layers. Called only
        with `own_numbers`."""
        return batch

    def places(self, slabs: int) -> list[tuple[int, int]]:
        """Where the keys of each attention layer lie in those of a cache of `slabs` blocks: the first element
        and the number of elements, both for a block of one position."""
        return [(sum(self.sizes[:index]) * slabs, size * slabs) for index, size in enumerate(self.sizes)]


def attach(
    layers: Sequence[Attention], kv_cache: torch.Tensor, layout: CacheLayout, heads_first: bool = False
) -> None:
    """Give every layer its part of a cache of this layout, instead of its current one.

    heads_first: a block's heads come before its positions in memory.
    """
    slabs, page = kv_cache.shape[2], kv_cache.shape[3] // layout.cell
    memory = kv_cache.flatten(1)

    def part(spec: AttentionSpec, keys: torch.Tensor, start: int, length: int) -> torch.Tensor:
        heads, dim = spec.num_kv_heads, spec.head_dim
        blocks = length // (heads * dim)
        cells = keys[start * page :][: blocks * heads * dim * page]
        if heads_first:
            return cells.view(blocks, heads, page, dim).transpose(1, 2)
        return cells.view(blocks, page, heads, dim)

    for layer, group, (start, length) in zip(layers, layout.group_of, layout.places(slabs), strict=True):
        source = layer.spec.kv_from
        if source is not None:
            k, v = layers[source].cache[:2]
        else:
            k, v = (part(layer.spec, each, start, length) for each in memory)
        layer.cache = layer.cache._replace(k=k, v=v)
        layer.group = group
