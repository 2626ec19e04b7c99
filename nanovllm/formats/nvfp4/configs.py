"""Nvfp4Config: weights in NVFP4, of compressed-tensors' groups and of ModelOpt's modules. Opens no file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.formats.nvfp4.kernels.values import GROUP
from nanovllm.formats.nvfp4.layouts import COMPRESSED_TENSORS, Nvfp4Format
from nanovllm.formats.nvfp4.method import Nvfp4ExpertsMethod, Nvfp4LinearMethod
from nanovllm.formats.stated import FourBitConfig, check_choices
from nanovllm.moe.method import ExpertsMethod
from nanovllm.quantization.base import Kind, LinearMethod


@dataclass(frozen=True)
class Nvfp4Config(FourBitConfig):
    """All modules that it is asked for are in NVFP4."""

    format: Nvfp4Format

    def method(self, path: str, kind: Kind) -> LinearMethod:
        return Nvfp4LinearMethod(self.format, self.packs)

    def experts(self, path: str) -> ExpertsMethod:
        return Nvfp4ExpertsMethod(self.format, self.packs)

    @property
    def itemsize(self) -> float | None:
        """4 bits, and a byte for each group; None: dequantised."""
        return 0.5 + 1 / GROUP if self.packs else None

    @property
    def note(self) -> str | None:
        activations = "activations stay in 16 bits" if self.packs else "activations stay in the model's dtype"
        if self.packs:
            return f"weights in NVFP4 keep their 4 bits, and {activations}: no product in 4 bits is computed"
        return (
            "weights in NVFP4 are dequantised as they are loaded, to up to four times the files' memory, and "
            f"{activations}"
        )

    def leaves_out(self, name: str) -> bool:
        """The scales of activations too, which stay in 16 bits."""
        return name.endswith((".input_scale", ".input_global_scale")) or super().leaves_out(name)


def nvfp4_pack_quantized(where: str, weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> Nvfp4Config:
    """What a group of compressed-tensors with format "nvfp4-pack-quantized" states. Its activations may be
    stated in 4 bits, or not at all. ValueError for what is not supported."""
    float4: dict[str, tuple[Any, ...]] = {"num_bits": (4,), "type": ("float",), "symmetric": (True, None)}
    float4 |= {"strategy": ("tensor_group",), "group_size": (GROUP,)}
    check_choices(f"{where}: weights", weights, float4 | {"dynamic": (False, None)})
    if inputs:
        check_choices(f"{where}: input_activations", inputs, float4)
    return Nvfp4Config(COMPRESSED_TENSORS)
