"""Random weights, for `load_format="dummy"`: a model from config.json alone. Opens no file."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch

from nanovllm.layers.weights import finish_loading, weight_slots
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.moe.elsewhere import ElsewhereShard


def init_dummy_weights(
    model: DecoderForCausalLM, seed: int, check: Callable[[], None] = lambda: None
) -> None:
    """Fill `model` with random weights, normal(0, 0.02) and 1 for norms, created on its device.

    Each tensor depends only on the seed and its name. Whole tensors are drawn and then split, so any number
    of ranks gets the same model. check: as in `load_weights` of
    `models/weights.py`.
    """
    for name, (layer, shard) in weight_slots(model).items():
        check()
        if shard.scale or isinstance(shard, ElsewhereShard):
            continue  # its weight, drawn in floats, is quantised; or another rank has it
        dtype = layer.options.dtype if layer.options.dtype in shard.dtypes else torch.float32
        if not any(each.is_floating_point for each in shard.dtypes):
            dtype = shard.dtypes[0]
        whole = torch.empty(shard.shape, dtype=dtype, device=layer.options.device)
        if shard.dummy is not None and not callable(shard.dummy):
            whole.fill_(shard.dummy)
        elif not dtype.is_floating_point:
            limits = torch.iinfo(dtype)
            least, end = max(limits.min, -(2**31)), min(limits.max + 1, 2**31)
            whole.random_(least, end, generator=_generator(whole, name, seed))
        else:
            whole.normal_(0.0, 0.02, generator=_generator(whole, name, seed))
        if callable(shard.dummy):
            whole = shard.dummy(whole)
        layer.load(shard, whole)
    finish_loading(model)


def _generator(tensor: torch.Tensor, name: str, seed: int) -> torch.Generator:
    return torch.Generator(tensor.device).manual_seed(zlib.crc32(name.encode(), seed % 2**32))
