"""Writes an FP8 checkpoint from one in 16 or 32 bits: `python -m tools.write_fp8 FROM TO --scales block`.

Weights of linear layers get scales of rows or of the whole tensor (compressed-tensors), or of blocks of 128 x
128 (as Qwen's and DeepSeek's files). Embeddings, norms, routers and the LM head stay as they are.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from nanovllm.quantization.fp8_loading import Stored, quantise_weight

SCALES = {"channel": Stored.ROWS, "tensor": Stored.TENSOR, "block": Stored.BLOCKS}
_LINEAR = re.compile(r"model\.layers\.\d+\..*(_proj|\.w[123])\.weight")

_ROUTER = re.compile(r".*\.(gate|shared_expert_gate)\.weight")


def write_fp8(source: Path, target: Path, scales: str, ignore: tuple[str, ...] = (), **config: Any) -> Path:
    """Write the checkpoint `source` to the folder `target`, with `scales` of SCALES; return `target`.

    ignore: modules whose weights stay as they are. config: other values of its quantization_config.
    """
    target.mkdir(parents=True, exist_ok=True)
    stored = SCALES[scales]
    name = "weight_scale_inv" if stored is Stored.BLOCKS else "weight_scale"
    routers: list[str] = []
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, target / path.name)
            continue
        written: dict[str, torch.Tensor] = {}
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (no mapping)
                tensor, module = file.get_tensor(key), key.removesuffix(".weight")
                if not _LINEAR.fullmatch(key) or module in ignore:
                    written[key] = tensor
                    routers += [module] if _ROUTER.fullmatch(key) else []
                else:
                    written[key], written[f"{module}.{name}"] = quantise_weight(tensor, stored)
        save_file(written, target / path.name, metadata={"format": "pt"})
    for index in target.glob("*.index.json"):
        index.unlink()  # all files are read without it
    content = json.loads((target / "config.json").read_text())
    kept = ["lm_head", *ignore, *routers]
    content["quantization_config"] = quantization_config(stored, kept) | config
    (target / "config.json").write_text(json.dumps(content, indent=2))
    return target


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
