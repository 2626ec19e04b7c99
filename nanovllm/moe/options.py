"""What an engine's options say of a model's experts, such as how ranks hold them. Loads nothing.

Width or rank: only the option decides, because no measurement does yet; the table is in the door's page.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from nanovllm.config import Config
from nanovllm.device import Device
from nanovllm.models.config import ModelConfig
from nanovllm.moe.kernels.placement import ExpertPlacement
from nanovllm.moe.layers import MoESpec

logger = logging.getLogger("nanovllm")
_OPTIONS = ("return_routed_experts", "enable_expert_parallel")


def with_options(config: Config, model: ModelConfig, device: Device) -> ModelConfig:
    """The model as the options say. ValueError for an option that needs experts, or more of them, or ranks,
    and for sizes that kernels of a GPU cannot read."""
    if config.enable_expert_parallel and config.tensor_parallel_size == 1:
        raise ValueError(
            "enable_expert_parallel=True distributes experts over the ranks of a model, and "
            "tensor_parallel_size is 1; raise it, or leave enable_expert_parallel out"
        )
    spec = model.moe
    if spec is None:
        asked = next(name for name in _OPTIONS if getattr(config, name))
        raise ValueError(f"{asked}=True needs a mixture of experts, and {model.architecture} is none")
    assert isinstance(spec, MoESpec)
    if device.is_cuda:
        spec.check_gpu(model.hidden_size, device.resolve_dtype(config.dtype, model.dtype))
    if not config.enable_expert_parallel:
        return model
    spec = replace(spec, by_rank=True)
    logger.info("%s", placed(spec, config.tensor_parallel_size))
    return replace(model, moe=spec)


def placed(spec: MoESpec, ranks: int) -> str:
    """How the ranks hold the experts, in words. ValueError if there are fewer experts than ranks."""
    if not spec.by_rank:
        return f"experts: a part of the width of all {spec.num_experts} on each rank"
    try:
        counts = [ExpertPlacement.of_rank(spec.num_experts, rank, ranks).count for rank in range(ranks)]
    except ValueError as error:
        raise ValueError(f"enable_expert_parallel=True cannot be used here: {error}") from None
    each = " or ".join(map(str, dict.fromkeys(counts)))
    return f"experts: {each} whole ones of {spec.num_experts} on each of {ranks} ranks"
