"""Writes a gpt-oss checkpoint with experts in MXFP4 from one in bfloat16, float16 or float32.

`python -m tools.write_mxfp4 FOLDER OUT`. For tests and measurements: the original was trained with such
values.
"""

from __future__ import annotations

import argparse
import json
import shutil
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from nanovllm.formats.mxfp4.kernels.values import (
    BYTES,
    GROUP,
    MAGNITUDES,
    SCALE_BIAS,
    VALUES,
    dequantise_mxfp4,
)

WEIGHTS = ("experts.gate_up_proj", "experts.down_proj")  # the ends of names
SKIPPED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
Tensors = dict[str, torch.Tensor]


def quantise_mxfp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks and scales of values [..., K]; K is a multiple of 32.

    A group's scale is the power of two with which its largest value is at most 6, and not below 3 (as the
    specification's, but nothing is clamped). Each value becomes the nearest one, ties go to the even code.
    """
    groups = values.float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1).clamp(min=2.0**-120)
    exponents = torch.ceil(torch.log2(largest / VALUES[7]))
    exponents += (largest > VALUES[7] * torch.exp2(exponents)).float()  # if the logarithm was rounded down
    scaled = (groups / torch.exp2(exponents)[..., None]).contiguous()
    middles = [(a + b) / 2 for a, b in pairwise(MAGNITUDES)]
    edges = torch.tensor(middles, device=values.device)
    below, above = (torch.bucketize(scaled.abs(), edges, right=right) for right in (False, True))
    codes = torch.where(below % 2 == 0, below, above) + 8 * (scaled.signbit())
    low, high = codes.to(torch.uint8).unflatten(-1, (BYTES, 2)).unbind(-1)
    return low | high << 4, (exponents + SCALE_BIAS).to(torch.uint8)


def write_mxfp4(source: Path, target: Path) -> Path:
    """Write `source` to `target` with its experts in MXFP4; return `target`."""
    return _write(source, target, {"quant_method": "mxfp4", "modules_to_not_convert": SKIPPED})


def write_rounded(source: Path, target: Path) -> Path:
    """The same values, in floats."""
    return _write(source, target, None)


def _write(source: Path, target: Path, stated: dict[str, object] | None) -> Path:
    target.mkdir(parents=True, exist_ok=True)
    tensors: Tensors = {}
    for path in sorted(source.iterdir()):
        if path.suffix == ".safetensors":
            tensors |= load_file(path)
        elif path.is_file() and path.name != "model.safetensors.index.json":
            shutil.copy(path, target)
    written: Tensors = {}
    for name, tensor in tensors.items():
        written |= _quantised(name, tensor, stated is not None) if name.endswith(WEIGHTS) else {name: tensor}
    save_file(written, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    if stated is not None:
        config["quantization_config"] = stated
    (target / "config.json").write_text(json.dumps(config, indent=2))
    return target


def _quantised(name: str, tensor: torch.Tensor, packs: bool) -> Tensors:
    """A weight [E, K, N], in blocks or rounded."""
    blocks, scales = quantise_mxfp4(tensor.transpose(1, 2))
    if packs:
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return {name: dequantise_mxfp4(blocks, scales, tensor.dtype).transpose(1, 2).contiguous()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="the folder of a checkpoint")
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    print(write_mxfp4(args.source, args.target))


if __name__ == "__main__":
    main()
