"""The scales of an FP8 KV cache that a model's files hold, beside their weights. Reads them; sets nothing."""

from __future__ import annotations

import re

import torch

from nanovllm.errors import ModelLoadError
from nanovllm.models.registry import open_checkpoint
from nanovllm.quantization.shards import scale_values
from nanovllm.runner.model_runner import ModelRunner

_NAME = re.compile(r"(model\.layers\.(\d+)\.self_attn)\.(?:[kv]_proj\.)?([kv])_scale")


def stated_scales(runner: ModelRunner) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The scales of keys and values [KV heads of this rank] float32, by the path of the attention layer, of
    which the files hold both. ModelLoadError for values that no scale may have."""
    config, found = runner.model_config, dict[str, dict[str, torch.Tensor]]()
    with open_checkpoint(runner.model_path).tensors() as tensors:
        for stored, source in tensors.items():
            match = _NAME.fullmatch(config.names.named(stored) or "")
            if match is None:
                continue
            path, index, which = match[1], int(match[2]), match[3]
            heads = config.spec(index).num_kv_heads
            values = scale_values(source[...]).flatten()
            if len(values) not in (1, heads) or not (values.isfinite() & (values > 0)).all():
                raise ModelLoadError(
                    f"{runner.model_path}: {stored} has {values.tolist()}, which must be one scale, or one "
                    f"for each of {heads} KV heads, finite and above 0; kv_cache_dtype='auto' needs none"
                )
            size, rank = runner.tp.size, runner.tp.rank
            first, count = rank * heads // size, config.spec(index).of_rank(size).num_kv_heads
            own = values.expand(heads)[first : first + count]
            found.setdefault(path, {})[which] = own.clone().to(runner.device.torch)
    return {path: (each["k"], each["v"]) for path, each in found.items() if len(each) == 2}
