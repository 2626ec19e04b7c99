"""Laguna: gates, heads of each layer, the router, and what files call its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from checked_llm import make_tiny
from safetensors.torch import load_file, save_file
from test_models import PROMPT, forward, load
from tiny_models import edit_json, transformers_greedy, transformers_logits, write_tiny_model

from nanovllm import SamplingParams
from nanovllm.kernels.compat import INTERPRET
from nanovllm.models.registry import load_model_config
from nanovllm.report.roofline import Cost

FAMILY = "laguna"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize("gating", [True, "per-head", "per-element"])
def test_gates(tmp_path: Path, gating: bool | str) -> None:
    folder = write_tiny_model(tmp_path, FAMILY, gating=gating)
    expected = transformers_logits(folder, PROMPT)
    torch.testing.assert_close(forward(load(folder), PROMPT), expected, rtol=1e-4, atol=1e-4)
    in_layers = {
        name: tensor.numel()
        for name, tensor in load_file(folder / "model.safetensors").items()
        if ".layers." in name and tensor.dim() >= 2
    }
    experts = sum(size for name, size in in_layers.items() if ".experts." in name)
    matrices = sum(in_layers.values()) - experts + experts // 10 * 3
    assert Cost.of(load_model_config(folder), 4, 4).layer_params == matrices


def test_capped_logits_of_the_router(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, FAMILY, moe_router_logit_softcapping=0.4)
    expected = transformers_logits(folder, PROMPT)
    torch.testing.assert_close(forward(load(folder), PROMPT), expected, rtol=1e-4, atol=1e-4)
    edit_json(folder / "config.json", moe_router_logit_softcapping=0.0)
    assert (forward(load(folder), PROMPT) - expected).abs().max() > 1e-3


def test_the_names_of_files(tmp_path: Path) -> None:
    """The correction beside the router, or beside the experts; the shared expert by both names."""
    folder = write_tiny_model(tmp_path, FAMILY)
    expected, file = transformers_logits(folder, PROMPT), folder / "model.safetensors"
    tensors = load_file(file)
    pairs = ((".mlp.experts.e_score", ".mlp.gate.e_score"), (".mlp.shared_expert.", ".mlp.shared_experts."))
    for old, new in (*pairs, *((new, old) for old, new in pairs)):
        renamed = {name.replace(old, new): tensor for name, tensor in tensors.items()}
        save_file(renamed | {"mtp.fc.weight": torch.ones(2)}, file)
        torch.testing.assert_close(forward(load(folder), PROMPT), expected, rtol=1e-4, atol=1e-4)
        assert any(new in name for name in renamed)


def test_settings_of_the_released_files(tmp_path: Path) -> None:
    """They state which layers are dense twice, and what no model has."""
    folder = write_tiny_model(tmp_path, FAMILY)
    expected = load_model_config(folder)
    released = {"mlp_only_layers": [0], "decoder_sparse_step": 1, "norm_topk_prob": True}
    released |= {"moe_apply_router_weight_on_input": False, "swa_attention_sink_enabled": False}
    edit_json(folder / "config.json", **released, moe_router_use_sigmoid=True)
    assert load_model_config(folder) == expected
    edit_json(folder / "config.json", remove=("mlp_layer_types",))
    assert load_model_config(folder) == expected
    edit_json(folder / "config.json", remove=("mlp_only_layers", "mlp_layer_types"))
    assert load_model_config(folder) == expected
    assert [spec.num_heads for spec in expected.attention] == [4, 6, 8]
    assert [spec.rope and spec.rope.rotary_dim(12) for spec in expected.attention] == [6, 12, 6]


@pytest.mark.skipif(not INTERPRET, reason="kernels are compiled here; tests/gpu runs the engine over them")
def test_the_engine_with_triton_kernels(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, FAMILY, head_dim=16)
    expected = transformers_greedy(folder, PROMPT, 3)
    options = {"attention_backend": "triton", "kvcache_block_size": 16, "max_num_batched_tokens": 7}
    with make_tiny(folder, num_kvcache_blocks=9, **options) as llm:
        [output] = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert output["token_ids"] == expected


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_the_router_is_not_quantised_on_the_fly(tmp_path: Path, quantization: str) -> None:
    folder = write_tiny_model(tmp_path, FAMILY)
    with make_tiny(folder, quantization=quantization, num_kvcache_blocks=30) as llm:
        block = inside.model(llm).model.layers[1].mlp
        assert block.gate.weight.dtype == torch.float32
        assert len(llm.generate([PROMPT], GREEDY, use_tqdm=False)[0]["token_ids"]) == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"gating": "per-layer"},
            "gating 'per-layer' is not supported; supported: true, 'per-head', 'per-el",
        ),
        ({"gating": False}, "gating False is not supported"),
        ({"num_attention_heads_per_layer": [4, 6]}, "a multiple of the 2 KV heads for each of 3 layers, not"),
        ({"num_attention_heads_per_layer": [4, 6, 7]}, "must be a multiple of the 2 KV heads"),
        ({"mlp_layer_types": ["moe"] * 3}, "mlp_layer_types must be 'dense' or 'sparse'"),
        (
            {"moe_apply_router_weight_on_input": True},
            "moe_apply_router_weight_on_input True is not supported",
        ),
        ({"swa_attention_sink_enabled": True}, "swa_attention_sink_enabled True is not supported"),
        ({"norm_topk_prob": False}, "norm_topk_prob False is not supported"),
        ({"moe_router_logit_softcapping": -1.0}, r"moe_router_logit_softcapping must be a positive number"),
    ],
    ids=str,
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_tiny_model(tmp_path, FAMILY)
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ValueError, match=message):
        load_model_config(folder)
