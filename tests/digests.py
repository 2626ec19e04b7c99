"""Engines whose ranks return hashes of their weights and scales, and the sizes of their memory."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import checked_llm
import inside
import pytest
import torch
from checked_llm import CheckedLLM

from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.residency.core import ResidentCore
from nanovllm.residency.runner import ResidentModelRunner

Digest = dict[str, str]


def digest(model: DecoderForCausalLM) -> Digest:
    """A hash of each parameter, and of each layer's FP8 cache scales."""
    tensors = dict(model.named_parameters())
    for index, layer in enumerate(model.attention_layers):
        for name in ("k_scale", "v_scale"):
            scale = getattr(layer.cache, name)
            if scale is not None:
                tensors[f"{index}.{name}"] = scale
    return {
        name: hashlib.sha256(tensor.detach().to("cpu", copy=True).view(torch.uint8).numpy()).hexdigest()
        for name, tensor in tensors.items()
    }


class DigestRunner(ResidentModelRunner):
    """Workers unpickle this class, so it runs on every rank."""

    def digest(self) -> Digest:
        return digest(self.model)

    def weight_bytes(self) -> int:
        return sum(parameter.untyped_storage().nbytes() for parameter in self.model.parameters())

    def cache_bytes(self) -> int:
        return self.kv_cache.untyped_storage().nbytes()

    def free_bytes(self) -> int:
        return self.device.memory()[0]


class DigestLLM(CheckedLLM):
    def __init__(self, model: Path, **options: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ResidentCore, "runner_class", DigestRunner)
            super().__init__(model, **options)

    def on_ranks(self, method: str) -> list[Any]:
        """Call a method of `DigestRunner` on all ranks; return all answers, rank 0's first."""
        return inside.workers(self).call(getattr(DigestRunner, method))


def make_digest(model: Path, **options: Any) -> DigestLLM:
    """Like `make_tiny`, for a DigestLLM."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checked_llm, "CheckedLLM", DigestLLM)
        llm = checked_llm.make_tiny(model, **options)
    assert isinstance(llm, DigestLLM)
    return llm
