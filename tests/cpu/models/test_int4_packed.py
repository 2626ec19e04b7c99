"""AWQ, GPTQ and compressed-tensors files of families whose files hold several projections as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checked_llm import make_tiny
from safetensors.torch import load_file, save_file
from test_int4_hybrids import FORMATS, check_pair, write_pair
from test_models import PROMPT, load
from tiny_models import transformers_greedy

from nanovllm import ModelLoadError, SamplingParams
from nanovllm.models.registry import load_model_config
from nanovllm.models.weights import check_weights

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
FAMILIES: dict[str, dict[str, Any]] = {
    "phi3": SIZES | ROPE,
    "glm": SIZES | {"head_dim": 16},
    "glm4": SIZES | {"head_dim": 16},
    "granite4": SIZES | {"shared_intermediate_size": 64},
}
PACKED = {"phi3": "self_attn.qkv_proj", "granite4": "shared_mlp.input_linear"}


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_its_dequantised_weights(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    packed, dense = write_pair(tmp_path, family, sizes=FAMILIES[family], **options)
    module = PACKED.get(family, "mlp.gate_up_proj")
    assert f"model.layers.0.{module}.weight" not in load_file(packed / "model.safetensors")
    check_weights(load_model_config(packed), packed)
    check_pair(packed, dense)


@pytest.mark.parametrize("format", ["awq", "gptq", "compressed-tensors"])
def test_ranks_hold_their_parts(tmp_path: Path, format: str) -> None:
    packed, dense = write_pair(tmp_path, "phi3", sizes=FAMILIES["phi3"], format=format)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with make_tiny(packed, tensor_parallel_size=2) as llm:
        [output] = llm.generate([PROMPT], params, use_tqdm=False)
    assert output["token_ids"] == transformers_greedy(dense, PROMPT, 8)


@pytest.mark.parametrize("name", ["qweight", "scales"])
def test_a_tensor_of_another_length_is_named(tmp_path: Path, name: str) -> None:
    packed, _ = write_pair(tmp_path, "phi3", sizes=FAMILIES["phi3"], format="awq")
    tensors, full = load_file(packed / "model.safetensors"), f"model.layers.1.mlp.gate_up_proj.{name}"
    tensors[full] = tensors[full][:, :-1].contiguous()
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(ModelLoadError, match=rf"missing: model\.layers\.1\.mlp\.gate_proj\.{name}"):
        load(packed)
