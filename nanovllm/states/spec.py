"""StateSpec: the sizes of a layer's states, of Gated DeltaNet; `short_conv.py` has `ConvSpec`.

How many rows the pool of states has, and how many sequences it lets run at once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from nanovllm.config import Config
from nanovllm.device import Device
from nanovllm.layers.stream import Group
from nanovllm.models.config import ModelConfig
from nanovllm.models.weights import weight_bytes
from nanovllm.states.kernels.delta_heads import MOST_DIM, MOST_RATIO
from nanovllm.states.kernels.packed import CHUNK

logger = logging.getLogger("nanovllm")

FEWEST_KEPT, MOST_KEPT = 16, 64  # rows for prefixes
_SEQS_FOR_KEPT = 4  # between the two there is one for so many running sequences
_SHARE = 2  # states take at most half of the memory that weights leave
_CPU_SHARE, _CPU_BYTES = 4, 2 * 2**30  # on a CPU at most a quarter of all, and at most this
# The dtype of states by `mamba_ssm_cache_dtype`. "auto" is what transformers computes, whatever a file says.
_DTYPES: Mapping[str, torch.dtype] = {
    "auto": torch.float32,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True)
class StateSpec:
    """The heads of a layer of Gated DeltaNet, of all ranks, and the taps of its convolution.

    ValueError for sizes that no kernel has.
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    kernel: int
    dtype: torch.dtype = torch.float32  # of the states that are kept between steps

    def __post_init__(self) -> None:
        ratio, rest = divmod(self.v_heads, self.k_heads)
        if rest or not 1 <= ratio <= MOST_RATIO:
            raise ValueError(
                f"config.json: linear_num_value_heads {self.v_heads} must be 1 to {MOST_RATIO} times "
                f"linear_num_key_heads {self.k_heads}"
            )
        for name, dim in (("linear_key_head_dim", self.k_dim), ("linear_value_head_dim", self.v_dim)):
            if dim % 16 or not 0 < dim <= MOST_DIM:
                raise ValueError(f"config.json: {name} must be a multiple of 16 up to {MOST_DIM}, not {dim}")
        if self.kernel < 2:
            raise ValueError(f"config.json: linear_conv_kernel_dim must be at least 2, not {self.kernel}")

    @property
    def keys(self) -> int:
        """Channels of all keys, or of all queries."""
        return self.k_heads * self.k_dim

    @property
    def values(self) -> int:
        """Channels of all values."""
        return self.v_heads * self.v_dim

    def stored(self, dtype: torch.dtype) -> StateSpec:
        """The same with states of this dtype."""
        return replace(self, dtype=dtype)

    def params(self, hidden_size: int) -> int:
        """Elements of the matrices that a token is multiplied with."""
        return hidden_size * (2 * self.keys + 3 * self.values + 2 * self.v_heads)

    def row_bytes(self, itemsize: int) -> int:
        """Bytes of a sequence's state in a layer: its own, and the convolution's inputs of `itemsize`."""
        inputs = (self.kernel - 1) * (2 * self.keys + self.values)
        return self.dtype.itemsize * self.values * self.k_dim + itemsize * inputs


def num_kept(num_seqs: int) -> int:
    """The rows for the states of prefixes, besides one for each of `num_seqs` running sequences."""
    return min(MOST_KEPT, max(FEWEST_KEPT, num_seqs // _SEQS_FOR_KEPT)) if num_seqs else 0


def num_rows(num_seqs: int) -> int:
    """All rows of the pool."""
    return num_seqs + num_kept(num_seqs)


def most_sequences(row_bytes: int, share: int) -> int:
    """The most sequences for which the states of all layers, `row_bytes` a sequence, take `share` bytes; at
    least 1."""
    rows = share // row_bytes
    many = rows - MOST_KEPT, rows * _SEQS_FOR_KEPT // (_SEQS_FOR_KEPT + 1)
    return max(1, min(rows - FEWEST_KEPT, max(many)))


def stored(config: Config, model: ModelConfig) -> ModelConfig:
    """The model with states of the dtype that `mamba_ssm_cache_dtype` asks for."""
    dtype = _DTYPES[config.mamba_ssm_cache_dtype]
    specs = [
        spec if spec.state is None else replace(spec, state=spec.state.stored(dtype))
        for spec in model.attention
    ]
    return replace(model, attention=tuple(specs))


def opened(config: Config, model: ModelConfig, device: Device) -> tuple[Config, ModelConfig]:
    """Both as an engine takes them: with `most_seqs`, and as `stored`."""
    return replace(config, max_num_seqs=most_seqs(config, model, device)), stored(config, model)


def _row_bytes(config: Config, model: ModelConfig, device: Device) -> int:
    """Bytes of a sequence's states in all layers, on one rank."""
    item = device.resolve_dtype(config.dtype, model.dtype).itemsize
    model = stored(config, model)
    states = [spec.state for spec in map(model.spec, range(model.num_layers)) if spec.state is not None]
    return sum(state.row_bytes(item) for state in states) // config.tensor_parallel_size


def _share(config: Config, model: ModelConfig, device: Device) -> int:
    """The most bytes that states take of a device."""
    total = device.memory()[1]
    if not device.is_cuda:
        return min(total // _CPU_SHARE, _CPU_BYTES)
    dtype = device.resolve_dtype(config.dtype, model.dtype)
    weights = weight_bytes(model, Group(0, config.tensor_parallel_size), dtype)
    return max(0, int(total * config.gpu_memory_utilization) - weights) // _SHARE


def pool_bytes(config: Config, model: ModelConfig, device: Device) -> int:
    """The memory of all states on one rank; 0 for a model without."""
    row_bytes = _row_bytes(config, model, device)
    return num_rows(most_seqs(config, model, device)) * row_bytes if row_bytes else 0


def most_seqs(config: Config, model: ModelConfig, device: Device) -> int:
    """`max_num_seqs`, or less if the states of so many sequences take more than their share.

    ValueError for an option that models with states do not support.
    """
    if config.deterministic and config.max_num_batched_tokens < CHUNK:
        raise ValueError(
            f"max_num_batched_tokens={config.max_num_batched_tokens}: with deterministic=True a model with "
            f"states computes prompts in steps of {CHUNK} tokens; raise it to {CHUNK} or more"
        )
    if config.deterministic and _DTYPES[config.mamba_ssm_cache_dtype] != torch.float32:
        raise ValueError(
            f"mamba_ssm_cache_dtype={config.mamba_ssm_cache_dtype!r}: with deterministic=True states are "
            "kept in float32, because how often one is rounded depends on how its prompt is cut; leave it out"
        )
    row_bytes = _row_bytes(config, model, device)
    asked, most = config.max_num_seqs, most_sequences(row_bytes, _share(config, model, device))
    if most < asked and asked != Config.max_num_seqs:  # the default is no wish
        logger.warning(
            "max_num_seqs is %d, not %d: the states of more sequences, %.1f MiB each, take more than their "
            "share of the memory",
            *(most, asked, row_bytes / 2**20),
        )
    return min(asked, most)
