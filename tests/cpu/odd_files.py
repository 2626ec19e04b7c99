"""Helpers for checkpoints that differ from usual ones: editing them, and comparing what they hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from digests import digest
from fp8_models import Tensors, tensors_of
from safetensors.torch import save_file
from test_models import PROMPT, forward, load
from tiny_models import edit_json

from nanovllm.models.registry import load_model_config
from nanovllm.models.weights import check_weights

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
GLM = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


def edit_quantization(folder: Path, **changes: Any) -> dict[str, Any]:
    """Change the quantization_config of a folder, and return it."""
    stated: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"] | changes
    edit_json(folder / "config.json", quantization_config=stated)
    return stated


def edit_tensors(folder: Path, edit: Callable[[Tensors], Any]) -> Path:
    tensors = tensors_of(folder)
    edit(tensors)
    made = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def in_floats(folder: Path, target: Path, tensors: Tensors) -> Path:
    """A folder with the same config, these tensors, and no quantisation."""
    target.mkdir()
    save_file({name: each.contiguous() for name, each in tensors.items()}, target / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (target / "config.json").write_text(json.dumps(config))
    return target


def check_same(folder: Path, other: Path) -> None:
    """Both folders hold the same model, as far as a float32 tells."""
    check_weights(load_model_config(folder), folder)
    ours, theirs = load(folder), load(other)
    assert digest(ours) == digest(theirs)
    assert torch.equal(forward(ours, PROMPT), forward(theirs, PROMPT))
