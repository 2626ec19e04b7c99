"""The gate of what attended, as Qwen3-Next's attention has it: of each element, sigmoid(gate)."""

from __future__ import annotations

import torch

from nanovllm.kernels.compat import by_device


def sigmoid_gate_reference(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gate), [T, N] of one dtype; the sigmoid is rounded to it, and so is the product."""
    return x * torch.sigmoid(gate)


sigmoid_gate = by_device(sigmoid_gate_reference, sigmoid_gate_reference, "gated_norm.sigmoid_gate")
