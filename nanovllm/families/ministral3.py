"""Ministral 3 and Devstral 2: Mistral whose queries grow with their position; and the decoder of a Mistral 3,
which reads images.

Of such a model only the decoder is read, a Ministral 3 or an older Mistral (Mistral Small 3.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from nanovllm.families.blocks import LayersOf, decoder_prefixes
from nanovllm.families.gemma import GemmaFamily
from nanovllm.families.mistral import MISTRAL
from nanovllm.layers.stream import Step
from nanovllm.models.config import FULL, SLIDING, HFConfig, ModelConfig, ModelFamily
from nanovllm.models.decoder import Attention, Build, DecoderLayer
from nanovllm.quantization.base import Normed
from nanovllm.quantization.config import QuantConfig
from nanovllm.quantization.shards import FileNames, PackedRows, WeightOptions, WeightSource

_BETA, _PERIOD = "llama_4_scaling_beta", "original_max_position_embeddings"
# Of a whole tensor in FP8, by its name there.
_SCALES = {"weight_scale_inv": "weight_scale", "activation_scale": "input_scale"}


class _Names(FileNames):
    """Scales of whole tensors have names of their own."""

    def tensors(
        self, full_name: str, tensor: WeightSource, packed_rows: PackedRows
    ) -> Iterator[tuple[str, WeightSource]]:
        shape = tensor.shape if isinstance(tensor, torch.Tensor) else tensor.get_shape()
        for name, each in super().tensors(full_name, tensor, packed_rows):
            module, _, param = name.rpartition(".")
            whole = len(shape) < 2 and param in _SCALES
            yield f"{module}.{_SCALES[param]}" if whole else name, each


class ScaledAttention(Attention):
    """A query at a position p is multiplied by 1 + beta * log(1 + p // period) (Llama 4)."""

    def __init__(self, config: ModelConfig, index: int, build: Build, beta: float, period: int) -> None:
        super().__init__(config, index, build)
        periods = torch.arange(config.max_position_embeddings // period + 2)
        self._period, self._values = period, 1 + beta * torch.log(1 + periods.float())

    def allocate(self, path: str, options: WeightOptions, quant: QuantConfig) -> None:
        super().allocate(path, options, quant)
        self._factors = self._values.to(options.device)

    def project(self, x: Normed, step: Step) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = super().project(x, step)
        factors = self.factors(step.positions)
        return q if factors is None else q.mul_(factors[:, None, None]), k, v  # before rope, which is linear

    def factors(self, positions: torch.Tensor) -> torch.Tensor | None:
        """[T] float32; None: all are 1, because no sequence is longer than a period."""
        longest = len(self.rotary.cos_sin) - 1
        return self._factors[positions // self._period] if longest > self._period else None


def _layer(config: ModelConfig, index: int, build: Build, layers: LayersOf) -> DecoderLayer:
    layer, (beta, period) = DecoderLayer(config, index, build), layers.setting
    layer.self_attn = ScaledAttention(config, index, build, beta, period)
    return layer


class _DecoderFamily(ModelFamily):
    """A decoder whose keys and tensors may be a part of those of a model that reads images."""

    text_config = GemmaFamily.text_config  # type: ignore[assignment]

    def read(self, hf: HFConfig) -> ModelConfig:
        prefixes = decoder_prefixes(("vision_tower.", "multi_modal_projector."))
        return replace(super().read(hf), names=_Names(prefixes=prefixes))


class Ministral3Family(_DecoderFamily):
    """The settings of the factors, among those of rope."""

    def read(self, hf: HFConfig) -> ModelConfig:
        config, rope = super().read(hf), hf.raw["rope_parameters"][FULL]
        beta, period = rope.get(_BETA), rope.get(_PERIOD)
        if beta is None or beta == 0:
            return config
        if isinstance(beta, bool) or not isinstance(beta, (int, float)) or not 0 < beta < 2**31:
            raise ValueError(f"config.json: {_BETA} must be a number of at least 0, not {beta!r}")
        if type(period) is not int or not 0 < period < 2**31:
            raise ValueError(f"config.json: {_BETA} needs a whole number as {_PERIOD}, not {period!r}")
        return replace(config, layer=LayersOf(_layer, (float(beta), period)))


class Mistral3Family(ModelFamily):
    """A model that reads images, and has one of `_DECODERS`."""

    def model_config(
        self,
        architecture: str,
        raw: Mapping[str, Any],
        generation: Mapping[str, Any] | None = None,
        quantization: str | None = None,
        overrides: Mapping[str, Any] = MappingProxyType({}),
    ) -> ModelConfig:
        text = {**raw, **overrides}.get("text_config")
        kind = text.get("model_type", "mistral") if isinstance(text, dict) else "mistral"
        if kind not in _DECODERS:
            raise ValueError(
                f"config.json: a decoder (text_config) of model_type {kind!r} is not supported in "
                f"{architecture}; supported: {', '.join(map(repr, _DECODERS))}"
            )
        return _DECODERS[kind].model_config(architecture, raw, generation, quantization, overrides)


MINISTRAL3 = Ministral3Family(
    defaults={
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
        "rope_parameters": {
            **{"rope_type": "yarn", "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0},
            **{"mscale_all_dim": 1.0, "rope_theta": 1e6, _PERIOD: 16384, _BETA: 0.1},
        },
    },
    kinds=lambda hf: (FULL if hf.raw.get("sliding_window") is None else SLIDING,),
)
MISTRAL3 = Mistral3Family(defaults=MISTRAL.defaults)
_DECODERS = {
    "mistral": _DecoderFamily(defaults=MISTRAL.defaults, kinds=MISTRAL.kinds),
    "ministral3": MINISTRAL3,
}
