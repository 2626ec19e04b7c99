"""A step runs the tensor operations and kernels that tests/data/op_gate holds: those of each family on a GPU;
and graphs are captured without compiling anything meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import op_gate
import pytest
import torch
from tiny_models import write_tiny_model

from nanovllm import LLM
from nanovllm.kernels.compat import triton

pytestmark = pytest.mark.gpu

_SLIDING, _FULL = "sliding_attention", "full_attention"
# Sizes that no other test has, so that kernels are compiled here.
_WIDE = {"hidden_size": 352, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
_MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3": ("qwen3", {"num_hidden_layers": 6, "intermediate_size": 416}, {}),
    "qwen3-fp8": ("qwen3", {"num_hidden_layers": 6, "intermediate_size": 416}, {"quantization": "fp8"}),
    "gemma3": ("gemma3", {"num_hidden_layers": 12, "layer_types": [*5 * [_SLIDING], _FULL] * 2}, {}),
    "gpt_oss": ("gpt_oss", {"num_hidden_layers": 6, "layer_types": [_SLIDING, _FULL] * 3}, {}),
    "qwen3_moe": ("qwen3_moe", {"num_hidden_layers": 8, "mlp_only_layers": [0, 1, 2, 5]}, {}),
}


@pytest.mark.parametrize("name", op_gate.GPU)
def test_operations(name: str, tmp_path: Path) -> None:
    op_gate.check(name, "cuda", tmp_path)


@pytest.mark.parametrize("name", _MODELS)
def test_a_capture_compiles_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rehearsal of few layers has compiled everything before."""
    family, config, options = _MODELS[name]
    folder = write_tiny_model(tmp_path, family, dtype="bfloat16", **_WIDE | config)
    captures: list[bool] = []

    def compiles(**_: object) -> bool:
        captures.append(torch.cuda.is_current_stream_capturing())
        return False  # go on

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", compiles)
    with LLM(folder, max_num_seqs=72, max_model_len=256, skip_tokenizer_init=True, **options) as llm:
        assert captures and not any(captures)
        llm.generate([[5, 6, 7]] * 3, op_gate.GREEDY, use_tqdm=False)
