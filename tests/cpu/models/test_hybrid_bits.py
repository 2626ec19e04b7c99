"""deterministic=True with states: the bits of an answer depend on no batch, chunk or cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checked_llm import make_tiny
from tiny_models import write_tiny_model

from nanovllm import SamplingParams
from nanovllm.kernels.compat import INTERPRET
from nanovllm.states import layers
from nanovllm.states.kernels.causal_conv import causal_conv_step_triton, causal_conv_triton
from nanovllm.states.kernels.delta_prefill import delta_prefill_triton
from nanovllm.states.kernels.delta_step import delta_step_triton
from nanovllm.states.kernels.gated_norm import gated_norm_triton

PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=2)
TEXT = [3 + 7 * index % 83 for index in range(132)]
OTHERS = [[*TEXT[:70], 9], TEXT[:129]]  # they part from the text within a chunk
MANNERS: dict[str, dict[str, Any]] = {
    "": {},
    "chunks, no cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 70},
}


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers compute with the kernels of a GPU, which run in Triton's interpreter."""
    kernels = {
        "causal_conv": causal_conv_triton,
        "causal_conv_step": causal_conv_step_triton,
        "delta_prefill": delta_prefill_triton,
        "delta_step": delta_step_triton,
        "gated_norm": gated_norm_triton,
    }
    for name, kernel in kernels.items():
        monkeypatch.setattr(layers, name, kernel)


@pytest.mark.skipif(not INTERPRET, reason="kernels are compiled here; tests/gpu runs these cases")
def test_answers_have_the_same_bits(tmp_path: Path, by_kernels: None) -> None:
    folder = write_tiny_model(tmp_path, "qwen3_5")
    found = set()
    for options in MANNERS.values():
        room = {"num_kvcache_blocks": 60, "max_model_len": 170, "kvcache_block_size": 16} | options
        with make_tiny(folder, deterministic=True, **room) as llm:
            outputs = llm.generate([*OTHERS, TEXT], PARAMS, use_tqdm=False)
            assert [each.num_cached_tokens for each in outputs] == ([0, 0, 0] if options else [0, 64, 128])
            found.add(str([each.outputs[0].logprobs for each in outputs]))
            [alone] = llm.generate([TEXT], PARAMS, use_tqdm=False)
            assert str(alone.outputs[0].logprobs) == str(outputs[-1].outputs[0].logprobs)
    assert len(found) == 1
