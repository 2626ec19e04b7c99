"""Models with weights of 8 and 4 bits on a CPU: loaded, and the log-probabilities of a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checked_llm import make_tiny

from nanovllm import SamplingParams
from nanovllm.attention.reference import ReferenceBackend
from nanovllm.cpu import isa
from nanovllm.layers.weights import allocate
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.registry import load_model_config
from nanovllm.models.weights import load_weights
from nanovllm.parallel.group import TPGroup
from nanovllm.quantization.shards import WeightOptions

LARGE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512}  # of whole blocks of K-quants
PROMPT = [5, 17, 3, 42, 8, 11, 29]
SCORED = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1, prompt_logprobs=1)


@pytest.fixture
def without_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a CPU without AMX, which keeps weights of all formats."""
    monkeypatch.setattr(isa, "has_matrices", lambda: False)


def load(path: Path, quantization: str | None = None, tp: TPGroup | None = None) -> DecoderForCausalLM:
    config = load_model_config(path, quantization=quantization)
    model = DecoderForCausalLM(config, tp or TPGroup(), ReferenceBackend(), 16)
    allocate(model, WeightOptions(torch.float32, torch.device("cpu")), config.quant)
    load_weights(model, path)
    return model


def prompt_logprobs(model: Path, **options: Any) -> torch.Tensor:
    """Log-probabilities of the prompt's tokens, then of an answer's."""
    with make_tiny(model, **options) as llm:
        [output] = llm.generate([PROMPT], SCORED, use_tqdm=False)
    assert output.prompt_logprobs is not None
    pairs = zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True)
    return torch.tensor([each[token].logprob for each, token in pairs])
