"""Gated MLPs of experts on a CPU, one expert after the other. A row's bits depend on no other row."""

from __future__ import annotations

import torch

from nanovllm.cpu.kernels.activation import silu_and_mul
from nanovllm.cpu.kernels.int_layout import IntExperts
from nanovllm.cpu.kernels.int_matmul import int_linear
from nanovllm.cpu.kernels.matmul import PackedExperts, expert_linear
from nanovllm.moe.kernels.reference import experts_in_turn
from nanovllm.moe.kernels.tiles import PLAIN_MLP, Chosen, ExpertMLP


def int_experts(
    x: torch.Tensor, gate_up: IntExperts, down: IntExperts, chosen: Chosen, mlp: ExpertMLP = PLAIN_MLP
) -> torch.Tensor:
    """`experts_reference` with weights of integers."""
    return experts_in_turn(x, gate_up, down, chosen, mlp, int_linear, silu_and_mul)


def packed_experts(
    x: torch.Tensor, gate_up: PackedExperts, down: PackedExperts, chosen: Chosen, mlp: ExpertMLP = PLAIN_MLP
) -> torch.Tensor:
    """`experts_reference` with packed weights."""
    return experts_in_turn(x, gate_up, down, chosen, mlp, expert_linear, silu_and_mul)
