"""Writes a checkpoint in NVFP4, MXFP8 or INT8 from one in 16 or 32 bits, by plain rounding.

`python -m tools.write_nvfp4 FOLDER OUT --kind modelopt`. For tests and measurements: real quantisers choose
the values better, in the same files. Computes in NumPy from the formats' definitions, with no code of
nanovllm.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Array = Any  # of NumPy
Tensors = dict[str, torch.Tensor]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
E4M3 = np.array(  # of bytes 0 to 126
    [b / 8 * 2.0**-6 if b < 8 else (1 + b % 8 / 8) * 2.0 ** (b // 8 - 7) for b in range(127)], np.float32
)
_LINEAR = re.compile(r"model\.layers\.\d+\.(.*_proj|.*\.w[123])")
_ROUTERS = ("re:.*\\.gate$", "re:.*shared_expert_gate$")


class Written(NamedTuple):
    """The tensors of one module, and the float32 weight that they mean."""

    tensors: Tensors
    weight: Array


def nearest(values: Array, table: Array) -> Array:
    """The place of the nearest element of an ascending table, of values from 0 on; uint8."""
    middles = (table[1:].astype(np.float64) + table[:-1]) / 2
    return np.searchsorted(middles, values).astype(np.uint8)


def _e4m3(octets: Array) -> torch.Tensor:
    return torch.from_numpy(octets).view(torch.float8_e4m3fn)


def nvfp4_bytes(weight: Array) -> tuple[Array, Array, Array]:
    """weight [N, K] -> bytes [N, K / 2] uint8, E4M3 bytes of scales [N, K / 16] and the float32 factor."""
    n, k = weight.shape
    factor = np.float32(np.abs(weight).max() / 2688) or np.float32(1)
    groups = weight.reshape(n, k // 16, 16)
    scales = np.maximum(nearest(np.abs(groups).max(2) / 6 / factor, E4M3), 1)
    codes = nearest(np.abs(groups) / (E4M3[scales] * factor)[:, :, None], E2M1)
    codes = (codes | (groups < 0).astype(np.uint8) << 3).reshape(n, k // 2, 2)
    return codes[:, :, 0] | codes[:, :, 1] << 4, scales, factor


def nvfp4_values(octets: Array, scales: Array) -> Array:
    """Bytes and float32 scales of groups of 16 -> float32 values."""
    codes = np.stack([octets & 15, octets >> 4], axis=2).reshape(len(octets), -1)
    signed = np.where(codes & 8, -E2M1[codes & 7], E2M1[codes & 7])
    return signed * np.repeat(scales, 16, axis=1)


def modelopt_nvfp4(weight: Array) -> Written:
    octets, scales, factor = nvfp4_bytes(weight)
    tensors = {
        "weight": torch.from_numpy(octets),
        "weight_scale": _e4m3(scales),
        "weight_scale_2": torch.tensor(float(factor)),
        "input_scale": torch.tensor(0.25),
    }
    return Written(tensors, nvfp4_values(octets, E4M3[scales] * factor))


def compressed_nvfp4(weight: Array) -> Written:
    octets, scales, factor = nvfp4_bytes(weight)
    divisor = np.float32(1) / factor
    tensors = {
        "weight_packed": torch.from_numpy(octets),
        "weight_scale": _e4m3(scales),
        "weight_global_scale": torch.tensor([float(divisor)]),
        "input_global_scale": torch.tensor([4.0]),
    }
    return Written(tensors, nvfp4_values(octets, E4M3[scales] / divisor))


def mxfp8(weight: Array) -> Written:
    n, k = weight.shape
    groups = weight.reshape(n, k // 32, 32)
    exponents = np.floor(np.log2(np.maximum(np.abs(groups).max(2), 1e-30))).astype(np.int32) - 8
    powers = np.exp2(exponents.astype(np.float32))[:, :, None]
    codes = nearest(np.abs(groups) / powers, E4M3)
    values = np.where(groups < 0, -E4M3[codes], E4M3[codes]) * powers
    stored = (codes | (groups < 0).astype(np.uint8) << 7).reshape(n, k)
    scales = torch.from_numpy((exponents + 127).astype(np.uint8))
    return Written({"weight": _e4m3(stored), "weight_scale": scales}, values.reshape(n, k))


def int8(weight: Array) -> Written:
    """With scales of rows in bfloat16."""
    scales = torch.from_numpy(np.abs(weight).max(1, keepdims=True) / 127).clamp(min=1e-6).bfloat16()
    wide = scales.float().numpy()
    codes = np.clip(np.rint(weight / wide), -128, 127).astype(np.int8)
    return Written({"weight": torch.from_numpy(codes), "weight_scale": scales}, codes * wide)


def fp8(weight: Array) -> Written:
    """With one scale for the tensor, as ModelOpt's FP8."""
    factor = np.float32(np.abs(weight).max() / 448) or np.float32(1)
    codes = nearest(np.abs(weight) / factor, E4M3)
    values = np.where(weight < 0, -E4M3[codes], E4M3[codes]) * factor
    stored = codes | (weight < 0).astype(np.uint8) << 7
    scale = torch.tensor(float(factor))
    return Written({"weight": _e4m3(stored), "weight_scale": scale, "input_scale": torch.tensor(0.5)}, values)


_FLOAT4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
_FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
_KINDS: dict[str, tuple[Callable[[Array], Written], dict[str, Any]]] = {
    "modelopt": (modelopt_nvfp4, {"quant_algo": "NVFP4", "group_size": 16}),
    "modelopt-mxfp8": (mxfp8, {"quant_algo": "MXFP8"}),
    "modelopt-fp8": (fp8, {"quant_algo": "FP8"}),
    "nvfp4": (
        compressed_nvfp4,
        {
            "format": "nvfp4-pack-quantized",
            "weights": {**_FLOAT4, "dynamic": False},
            "input_activations": {**_FLOAT4, "dynamic": "local"},
        },
    ),
    "mxfp8": (
        mxfp8,
        {
            "format": "mxfp8-quantized",
            "weights": {**_FLOAT8, "dynamic": False, "scale_dtype": "torch.uint8"},
            "input_activations": {**_FLOAT8, "dynamic": True},
        },
    ),
    "int8": (
        int8,
        {
            "format": "int-quantized",
            "weights": {**_INT8, "strategy": "channel", "dynamic": False},
            "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
        },
    ),
}
KINDS = tuple(_KINDS)


def write_nvfp4(
    source: Path, target: Path, kind: str, *, skip: tuple[str, ...] = (), others: Mapping[str, str] = {}
) -> tuple[Path, Tensors]:
    """Write `source` to `target` with the linear layers of its decoder in a kind of KINDS; return `target`
    and the weights that its files mean, in float32.

    skip: parts of names of modules that stay as they are. others: kinds of the same producer, by parts of
    names of modules.
    """
    target.mkdir(parents=True, exist_ok=True)
    tensors: Tensors = {}
    for path in sorted(source.iterdir()):
        if path.suffix == ".safetensors":
            tensors |= load_file(path)
        elif path.is_file() and path.name != "model.safetensors.index.json":
            shutil.copy(path, target)
    written: Tensors = {}
    meant: Tensors = {}
    kinds: dict[str, str] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        meant[name] = tensor.float()
        if name == module or not _LINEAR.fullmatch(module) or any(part in module for part in skip):
            written[name] = tensor
            continue
        kinds[module] = next((other for part, other in others.items() if part in module), kind)
        made = _KINDS[kinds[module]][0](tensor.float().numpy())
        written |= {f"{module}.{param}": value.contiguous() for param, value in made.tensors.items()}
        meant[name] = torch.from_numpy(made.weight)
    save_file(written, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    plain = [name.removesuffix(".weight") for name in written if name.endswith(".weight")]
    ignored = [name for name in plain if name not in kinds and tensors[f"{name}.weight"].dim() == 2]
    config["quantization_config"] = _stated(kind, kinds, ignored, bool(others))
    (target / "config.json").write_text(json.dumps(config, indent=2))
    return target, meant


def _stated(kind: str, kinds: Mapping[str, str], ignored: list[str], mixed: bool) -> dict[str, Any]:
    """The quantization_config of config.json."""
    _, options = _KINDS[kind]
    if "quant_algo" in options and mixed:
        layers = {name: _KINDS[each][1] for name, each in kinds.items()}
        return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    if "quant_algo" in options:
        return {"quant_method": "modelopt", "producer": {"name": "modelopt"}, **options, "ignore": ignored}
    groups = {}
    for index, each in enumerate(dict.fromkeys(kinds.values())):
        targets = [name for name, own in kinds.items() if own == each] if mixed else ["Linear"]
        groups[f"group_{index}"] = {"targets": targets, **_KINDS[each][1]}
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if mixed else options["format"],
        "quantization_status": "compressed",
        "config_groups": groups,
        "kv_cache_scheme": None,
        "ignore": [*_ROUTERS, *ignored],
    }


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="modelopt")
    args = parser.parse_args()
    print(write_nvfp4(args.source, args.target, args.kind)[0])


if __name__ == "__main__":
    main()
