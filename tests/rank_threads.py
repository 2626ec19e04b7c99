"""Ranks in threads of one process, which sum through its memory: several ranks without more processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from test_models import BLOCK_SIZE, forward
from threads import SECONDS, in_threads

from nanovllm.attention.reference import ReferenceBackend
from nanovllm.config import Config
from nanovllm.device import Device
from nanovllm.engine.startup import read_model_config
from nanovllm.formats.dummy import init_dummy_weights
from nanovllm.kernels.paged import KVCache
from nanovllm.layers.stream import Group
from nanovllm.layers.weights import allocate
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.weights import load_weights
from nanovllm.quantization.shards import WeightOptions

LENGTH = 64


class Meeting:
    """Where the ranks of a model leave their parts of a sum."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=SECONDS)
        self.parts = [torch.empty(0)] * size


class RankInThread(Group):
    """One of them."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, len(meeting.parts))
        self._meeting = meeting

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        meeting = self._meeting
        meeting.parts[self.rank] = x.clone()
        meeting.barrier.wait()
        total = torch.stack(meeting.parts).sum(0)
        meeting.barrier.wait()
        return total


def config_of(folder: Path, **options: Any) -> ModelConfig:
    """The model's config as an engine with these options on a CPU reads it."""
    config = Config.from_kwargs(folder, device="cpu", skip_tokenizer_init=True, **options)
    return read_model_config(config, folder, {}, Device("cpu"))


def loaded(
    config: ModelConfig, folder: Path | None, tp: Group, dtype: torch.dtype = torch.float32
) -> DecoderForCausalLM:
    """A rank's part of a model, with an empty KV cache. folder: None for dummy weights."""
    model = DecoderForCausalLM(config, tp, ReferenceBackend(), LENGTH)
    allocate(model, WeightOptions(dtype, torch.device("cpu")), config.quant)
    if folder is None:
        init_dummy_weights(model, 0)
    else:
        load_weights(model, folder)
    for layer in model.attention_layers:
        shape = (LENGTH // BLOCK_SIZE, BLOCK_SIZE, layer.spec.num_kv_heads, layer.spec.head_dim)
        layer.cache = KVCache(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))
        if layer.spec.kv_from is not None:
            layer.cache = model.attention_layers[layer.spec.kv_from].cache
    for state_layer in model.state_layers:
        state_layer.allocate_states(1)
    return model


def on_ranks(size: int, load: Callable[[Group], DecoderForCausalLM], prompt: list[int]) -> torch.Tensor:
    """Logits [tokens, vocabulary] of a prompt that `size` ranks compute together."""
    meeting = Meeting(size)
    models = [load(RankInThread(rank, meeting)) for rank in range(size)]
    parts = in_threads(size, lambda rank: forward(models[rank], prompt))
    return torch.cat(parts, 1)[:, : models[0].config.vocab_size]


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Float32, summed in another order."""
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
