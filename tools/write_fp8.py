"""Writes an FP8 checkpoint from one in 16 or 32 bits: `python -m tools.write_fp8 FROM TO --scales block`.

Weights of the decoder's linear layers get scales of rows or of the whole tensor (compressed-tensors), or of
blocks of 128 x 128 (as Qwen's and DeepSeek's files). Embeddings, norms, routers and the LM head stay as they
are. A checkpoint of which this makes one that nanovllm does not load is refused before anything is written.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from nanovllm.attention.reference import ReferenceBackend
from nanovllm.device import Device
from nanovllm.formats.fp8.loading import Stored, quantise_weight
from nanovllm.layers.weights import allocate
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.registry import load_model_config, open_checkpoint
from nanovllm.models.weights import WeightChecker, unpacked
from nanovllm.parallel.group import TPGroup
from nanovllm.quantization.shards import WeightOptions

SCALES = {"channel": Stored.ROWS, "tensor": Stored.TENSOR, "block": Stored.BLOCKS}
_LINEAR = re.compile(r"(.*\.)?(layers\.\d+\..*|per_layer_model_projection)\.weight")
_ROUTER = re.compile(r".*\.(gate|shared_expert_gate|in_proj_(b|a|ba)|router\.proj)\.weight")
_OTHERS = re.compile(r".*(vision|visual|audio|multi_modal).*|mtp\..*")  # modules that read images and sound


def write_fp8(source: Path, target: Path, scales: str, ignore: tuple[str, ...] = (), **config: Any) -> Path:
    """Write the checkpoint `source` to the folder `target`, with `scales` of SCALES; return `target`.

    ignore: modules whose weights stay as they are. config: other values of its quantization_config.
    ValueError or ModelLoadError, before anything is written, for a model that nanovllm does not load in FP8.
    """
    stored = SCALES[scales]
    name = "weight_scale_inv" if stored is Stored.BLOCKS else "weight_scale"
    content = open_checkpoint(source).config()
    if "quantization_config" in content:
        raise ValueError(f"{source} is quantised already; write from its checkpoint in 16 or 32 bits")
    quantised, kept = _modules(source)
    if not quantised:
        raise ValueError(f"{source} has no matrices with names like model.layers.0.mlp.up_proj.weight")
    if unknown := sorted({*ignore} - quantised):
        raise ValueError(f"ignore: {unknown[0]!r} is none of its linear layers, such as {min(quantised)!r}")
    quantised -= {*ignore}
    content["quantization_config"] = quantization_config(stored, ["lm_head", *ignore, *kept]) | config
    with tempfile.TemporaryDirectory() as plan:
        _check(source, Path(plan), content, quantised, stored, name)
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, target / path.name)
            continue
        written: dict[str, torch.Tensor] = {}
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (no mapping)
                tensor, module = file.get_tensor(key), key.removesuffix(".weight")
                if module in quantised and key.endswith(".weight"):
                    written[key], written[f"{module}.{name}"] = quantise_weight(tensor, stored)
                else:
                    written[key] = tensor
        save_file(written, target / path.name, metadata={"format": "pt"})
    for index in target.glob("*.index.json"):
        index.unlink()  # all files are read without it
    (target / "config.json").write_text(json.dumps(content, indent=2))
    return target


def _modules(source: Path) -> tuple[set[str], list[str]]:
    """The modules to quantise, and the others with a matrix, but for embeddings."""
    quantised, kept = set(), []
    with open_checkpoint(source).tensors() as tensors:
        for key, tensor in tensors.items():
            module = key.removesuffix(".weight")
            if not key.endswith(".weight") or len(_shape(tensor)) != 2:
                continue
            if _ROUTER.fullmatch(key) or _OTHERS.fullmatch(key):
                kept.append(module)
            elif _LINEAR.fullmatch(key):
                quantised.add(module)
    return quantised, kept


def _check(
    source: Path, plan: Path, content: dict[str, Any], quantised: set[str], stored: Stored, name: str
) -> None:
    """Raise what loading raises, for a checkpoint of zeros with the names and shapes that will be written."""
    (plan / "config.json").write_text(json.dumps(content))
    try:
        config = load_model_config(plan)
    except ValueError as error:
        raise ValueError(str(error).replace(str(plan), str(source))) from None
    config = replace(config, quant=config.quant.on(Device("cpu").capability))
    planned: dict[str, torch.Tensor] = {}
    with open_checkpoint(source).tensors() as tensors:
        for key, tensor in tensors.items():
            module, shape = key.removesuffix(".weight"), _shape(tensor)
            planned[key] = torch.zeros(()).expand(shape)  # takes no memory
            if module in quantised and key.endswith(".weight"):
                codes, scale = quantise_weight(torch.empty(shape, device="meta"), stored)
                planned[key] = torch.zeros((), dtype=codes.dtype).expand(codes.shape)
                planned[f"{module}.{name}"] = torch.ones(()).expand(scale.shape)
    model = DecoderForCausalLM(config, TPGroup(), ReferenceBackend(), 1)
    allocate(model, WeightOptions(torch.float32, torch.device("meta")), config.quant)
    WeightChecker(model).check(dict(unpacked(config, planned.items())), source)


def _shape(tensor: Any) -> list[int]:
    return list(tensor.shape if isinstance(tensor, torch.Tensor) else tensor.get_shape())


def quantization_config(stored: Stored, ignore: list[str]) -> dict[str, Any]:
    """What config.json says of it."""
    if stored is Stored.BLOCKS:
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ignore,
        }
    float8 = {"type": "float", "num_bits": 8, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {
            **float8,
            "strategy": "tensor" if stored is Stored.TENSOR else "channel",
            "dynamic": False,
        },
        "input_activations": {**float8, "strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
        "ignore": ignore,
    }


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--scales", choices=SCALES, default="channel")
    parser.add_argument("--ignore", action="append", default=[], metavar="MODULE")
    args = parser.parse_args()
    write_fp8(args.source, args.target, args.scales, tuple(args.ignore))


if __name__ == "__main__":
    main()
