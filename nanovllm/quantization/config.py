"""QuantConfig: which method stores each weight; and the choice of one, by config.json or an option.

Each quantisation is a door with a QuantConfig of its own, which `doors.QUANTIZATIONS` names. Knows no model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanovllm import doors
from nanovllm.doors import Table
from nanovllm.quantization.base import Kind, LinearMethod
from nanovllm.quantization.shards import FileNames, WeightMethod, is_cache_scale
from nanovllm.quantization.unquantized import UnquantizedLinearMethod


@dataclass(frozen=True)
class QuantConfig:
    """Chooses the method of each weight of a model. A value; a subclass is one quantisation."""

    names: FileNames = field(default=FileNames(), kw_only=True)  # of modules in the files
    cache_scales: bool = field(default=False, kw_only=True)  # the files hold those of a quantised KV cache

    def method(self, path: str, kind: Kind) -> LinearMethod:
        """Return a new method for the weight of the checkpoint's module `path`.

        The modules of a packed layer, such as q_proj, k_proj and v_proj, must get the same one.
        """
        return UnquantizedLinearMethod()

    def experts(self, path: str) -> WeightMethod | None:
        """Return a new method for the weights of all experts of the checkpoint's module `path`, such as
        model.layers.0.mlp.experts, whose tensors are experts.0.gate_proj.weight and so on; None: that for
        weights in the model's dtype.
        """
        return None

    def on(self, capability: tuple[int, int]) -> QuantConfig:
        """The same for devices of this CUDA compute capability, (0, 0) for a CPU: it may store weights in
        another way there."""
        return self

    @property
    def itemsize(self) -> float | None:
        """Bytes of a weight of linear layers; None: those of the model's dtype."""
        return None

    @property
    def expert_itemsize(self) -> float | None:
        """Bytes of a weight of experts; None: those of the model's dtype."""
        return self.itemsize

    @property
    def speed(self) -> float:
        """How fast the products of linear layers can be, relative to those of the model's dtype."""
        return 1.0

    @property
    def note(self) -> str | None:
        """What a user should know of it at a start."""
        return None

    @property
    def notes(self) -> list[str]:
        """`note`, and what files say that is not used."""
        unused = (
            "the files' scales of a quantised KV cache are for kv_cache_dtype='fp8', and not used without it"
        )
        return [*([self.note] if self.note else []), *([unused] if self.cache_scales else [])]

    def in_files(self, names: FileNames | None = None, cache_scales: bool | None = None) -> QuantConfig:
        """The same with these values; a subclass need not be a dataclass."""
        changed = copy.copy(self)
        for key, value in (("names", names), ("cache_scales", cache_scales)):
            if value is not None:
                object.__setattr__(changed, key, value)
        return changed

    def packed_rows(self, name: str, shape: Sequence[int], rows: Mapping[str, int]) -> Mapping[str, int]:
        """The rows of each module in the tensor `name` of `shape`, which packs weights of so many `rows`."""
        return rows

    def leaves_out(self, name: str) -> bool:
        """Whether weights do not need this tensor of the files."""
        return self.cache_scales and is_cache_scale(name)


QUANTIZATIONS: Table[Callable[[Mapping[str, Any]], QuantConfig]] = Table(doors.QUANTIZATIONS)
ON_THE_FLY: Table[QuantConfig] = Table(doors.ON_THE_FLY)
DEQUANTIZE = "dequantize"  # the option for GGUF files


def supported_quantizations() -> str:
    """The names of what is supported, for messages."""
    return ", ".join(map(repr, QUANTIZATIONS))


def quant_config(stated: Any, asked: str | None) -> QuantConfig:
    """What config.json states as quantization_config, or what is `asked` for, the option `quantization`.

    ValueError for what is not supported, and if both differ.
    """
    if stated is None:
        if asked is None or asked == DEQUANTIZE:
            return QuantConfig()
        if asked not in ON_THE_FLY:
            raise ValueError(
                f"quantization={asked!r}, but config.json has no quantization_config; for weights in 16 or "
                f"32 bits quantization is None or {' or '.join(map(repr, ON_THE_FLY))}"
            )
        return ON_THE_FLY[asked]
    method = stated.get("quant_method") if isinstance(stated, dict) else stated
    if not isinstance(stated, dict) or not isinstance(method, str) or method not in QUANTIZATIONS:
        raise ValueError(
            f"config.json: the weights are quantised (quantization_config: quant_method {method!r}) in a way "
            f"that is not supported; supported: {supported_quantizations()}. Use such a checkpoint, or use "
            "the model's bfloat16, float16 or float32 checkpoint, on the hub usually the one without a "
            "suffix such as bnb-4bit"
        )
    if method == "gguf" and asked == DEQUANTIZE:
        return QuantConfig()
    if method == "gguf" and asked is not None and asked in ON_THE_FLY:
        return ON_THE_FLY[asked]
    if method == "gguf" and asked not in (None, method):
        options = ", ".join(map(repr, (DEQUANTIZE, *ON_THE_FLY)))
        raise ValueError(
            f"quantization={asked!r} is not what a GGUF file holds; leave quantization out to use its "
            f"weights as they are stored, or pass one of {options}"
        )
    if asked not in (None, method):
        raise ValueError(
            f"quantization={asked!r} contradicts config.json, whose quantization_config has quant_method "
            f"{method!r}; leave quantization out"
        )
    return QUANTIZATIONS[method](stated)
