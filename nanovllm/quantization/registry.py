"""The quantisations by their names in config.json: one line for each. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nanovllm import doors
from nanovllm.doors import Table
from nanovllm.quantization.unquantized import QuantConfig

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
