"""Writes a checkpoint with weights of 4 bits from a bfloat16, float16 or float32 one, by plain rounding.

`python -m tools.write_int4 FOLDER OUT --format awq`. For tests and measurements: real quantisers choose the
values better, in the same files.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FORMATS = ("awq", "gptq", "gptq_v2", "compressed-tensors")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the neighbour of 8 that each nibble holds
# Of layers with states all but their gates; the last are Mixtral's experts; no router is quantised.
_LINEAR = ("_proj", ".in_proj_qkvz", ".in_proj_qkv", ".in_proj_z", "_linear", ".w1", ".w2", ".w3")
_ROUTERS = ("re:.*\\.gate$", "re:.*shared_expert_gate$", "re:.*\\.in_proj_(a|b|ba)$")
Tensors = dict[str, torch.Tensor]


def write_int4(
    source: Path,
    target: Path,
    format: str,
    *,
    group: int = 128,
    symmetric: bool = False,
    act_order: bool = False,
    scale_dtype: torch.dtype = torch.float16,
    head: bool = False,
    skip: tuple[str, ...] = (),
) -> Path:
    """Write `source` to `target` with the weights of its linear layers in 4 bits; return `target`.

    format: one of FORMATS. group: inputs that share a scale; -1: all. act_order: inputs belong to groups in
    random order. head: the LM head too. skip: parts of names of modules that stay as they are.
    """
    target.mkdir(parents=True, exist_ok=True)
    tensors: Tensors = {}
    for path in sorted(source.iterdir()):
        if path.suffix == ".safetensors":
            tensors |= load_file(path)
        elif path.is_file() and path.name != "model.safetensors.index.json":
            shutil.copy(path, target)
    written: Tensors = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        linear = module.endswith(_LINEAR) or (head and module == "lm_head")
        if not linear or name == module or any(part in module for part in skip):
            written[name] = tensor
            continue
        order = random_order(tensor.shape[1], group) if act_order else None
        codes, scales, zeros = rounded(tensor, group, symmetric, order, scale_dtype)
        parts = packed(codes, scales, zeros, format, group, symmetric, order)
        written |= {f"{module}.{param}": value.contiguous() for param, value in parts.items()}
    save_file(written, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = stated(format, group, symmetric, act_order, head, skip)
    (target / "config.json").write_text(json.dumps(config))
    return target


def random_order(k: int, group: int) -> torch.Tensor:
    """The group of each of k inputs, int32, the same for weights of equal size."""
    size = k if group == -1 else group
    return (torch.randperm(k, generator=torch.Generator().manual_seed(k)) // size).int()


def rounded(
    weight: torch.Tensor, group: int, symmetric: bool, order: torch.Tensor | None, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """weight [N, K] -> codes [N, K] uint8, scales [N, groups], zeros [N, groups] uint8.

    Asymmetric: from the least to the largest value of a group. Symmetric: zero point 8, scale max / 7.
    """
    n, k = weight.shape
    sort = torch.arange(k) if order is None else torch.argsort(order, stable=True)
    values = weight.float()[:, sort].view(n, -1, k if group == -1 else group)
    if symmetric:
        scales = values.abs().amax(-1) / 7
    else:
        scales = (values.amax(-1).clamp(min=0) - values.amin(-1).clamp(max=0)) / 15
    scales = scales.clamp(min=2e-5).to(scale_dtype)
    wide = scales.float()
    if symmetric:
        zeros = torch.full_like(wide, 8)
    else:  # GPTQ's first format cannot hold a zero point of 0
        zeros = (-values.amin(-1).clamp(max=0) / wide).round().clamp(1, 15)
    codes = ((values / wide[..., None]).round() + zeros[..., None]).clamp(0, 15).view(n, k)
    return torch.empty_like(codes).index_copy_(1, sort, codes).to(torch.uint8), scales, zeros.to(torch.uint8)


def dequantised(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group: int, order: torch.Tensor | None
) -> torch.Tensor:
    """The float32 weight [N, K] that `rounded` stands for."""
    k = codes.shape[1]
    groups = (torch.arange(k) // (k if group == -1 else group)) if order is None else order.long()
    return (codes.float() - zeros.float()[:, groups]) * scales.float()[:, groups]


def words(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """codes [m, 8 w] -> int32 words [m, w]; nibble i of a word is neighbour order[i]."""
    eight = codes.unflatten(1, (-1, 8)).to(torch.int64)
    total = sum(eight[..., element] << 4 * nibble for nibble, element in enumerate(order))
    return torch.as_tensor(total).to(torch.int32)  # the lower 32 bits


def packed(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    format: str,
    group: int,
    symmetric: bool,
    order: torch.Tensor | None,
) -> Mapping[str, torch.Tensor]:
    """The tensors of one module, by the last part of their names."""
    n, k = codes.shape
    if format == "awq":
        return {
            "qweight": words(codes.T, _AWQ_ORDER),
            "scales": scales.T,
            **({} if symmetric else {"qzeros": words(zeros.T, _AWQ_ORDER)}),
        }
    groups = torch.arange(k, dtype=torch.int32) // (k if group == -1 else group) if order is None else order
    if format in ("gptq", "gptq_v2"):
        stored = words(zeros.T) - (0x11111111 if format == "gptq" else 0)
        return {"qweight": words(codes).T, "qzeros": stored, "scales": scales.T, "g_idx": groups}
    return {
        "weight_packed": words(codes),
        "weight_scale": scales,
        "weight_shape": torch.tensor([n, k]),
        **({} if symmetric else {"weight_zero_point": words(zeros.T).T}),
        **({} if order is None else {"weight_g_idx": order}),
    }


def stated(
    format: str, group: int, symmetric: bool, act_order: bool, head: bool, skip: tuple[str, ...]
) -> dict[str, Any]:
    """The quantization_config of config.json."""
    if format == "awq":
        options = {"bits": 4, "group_size": group, "zero_point": not symmetric, "version": "gemm"}
        return {"quant_method": "awq", **options, "modules_to_not_convert": list(skip) or None}
    if format in ("gptq", "gptq_v2"):
        options = {"bits": 4, "group_size": group, "sym": symmetric, "desc_act": act_order}
        return {"quant_method": "gptq", **options, "checkpoint_format": format, "lm_head": head}
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "dynamic": False}
    weights |= {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    weights["actorder"] = "group" if act_order else None
    ignore = [*_ROUTERS, *(f"re:.*{part}.*" for part in skip), *([] if head else ["lm_head"])]
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ignore,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--format", choices=FORMATS, default="awq")
    parser.add_argument("--group", type=int, default=128, help="-1: all inputs")
    parser.add_argument("--symmetric", action="store_true")
    parser.add_argument("--act-order", action="store_true")
    parser.add_argument("--head", action="store_true", help="the LM head too")
    options = vars(parser.parse_args())
    print(write_int4(options.pop("source"), options.pop("target"), options.pop("format"), **options))


if __name__ == "__main__":
    main()
