"""Functions that tests run on ranks; other processes import them by this module's name."""

from __future__ import annotations

from typing import Any

import torch

from nanovllm.cpu.kernels.team import team


def num_weights(model: torch.nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())


def place(worker: Any, name: str, factor: int = 1) -> tuple[str, int, int]:
    assert worker.get_model() is worker.model_runner.model
    return f"{name} {worker.device}", worker.rank * factor, worker.local_rank


def num_threads(worker: Any) -> tuple[int, int]:
    """Of torch, and of the kernels."""
    return torch.get_num_threads(), team().size


def fails(model: torch.nn.Module) -> None:
    raise LookupError("no such layer")


def cannot_return(model: torch.nn.Module) -> Any:
    return lambda: model


def asleep(replica: Any) -> frozenset[str]:
    """Of a replica, called by its pool."""
    found: frozenset[str] = replica.asleep
    return found
