"""Mixtures of experts on CPUs: the same bits in any batch, and only experts that have rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_models import forward, load
from tiny_models import write_tiny_model

from nanovllm import LLM, SamplingParams
from nanovllm.cpu import isa
from nanovllm.moe import experts as moe_experts
from nanovllm.moe.kernels import reference as experts_reference


@pytest.mark.skipif(not isa.has_kernels(), reason="needs the CPU's kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_bits_of_a_row_depend_on_no_other_row(tmp_path: Path, family: str, dtype: str) -> None:
    """Of drawn tokens and their log-probabilities, on a CPU with kernels."""
    model = write_tiny_model(tmp_path, family, hidden_size=64)
    prompts = [torch.randint(2, 97, (20,), generator=seeded(row)).tolist() for row in range(12)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
    options = {"device": "cpu", "skip_tokenizer_init": True, "enable_prefix_caching": False}
    with LLM(str(model), dtype=dtype, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        alone = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    for one, other in zip(outputs, alone, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_only_experts_with_rows_are_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU."""
    model = load(write_tiny_model(tmp_path, "qwen3_moe"))
    computed = []

    def counted(linear: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def counting(x: torch.Tensor, weight: Any) -> torch.Tensor:
            computed.append(len(x))
            return linear(x, weight)

        return counting

    # In plain torch, and with kernels for this CPU.
    monkeypatch.setattr(experts_reference, "F", SimpleNamespace(linear=counted(torch.nn.functional.linear)))
    monkeypatch.setattr(moe_experts, "expert_linear", counted(moe_experts.expert_linear))
    forward(model, [5])
    assert computed == [1] * (2 * 3 * len(model.model.layers))
