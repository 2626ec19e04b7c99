"""GLM-4.5 and MiniMax M2: what their files and configs say, and the router's float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import inside
import moe_cases
import pytest
import torch
import torch.nn.functional as F
from checked_llm import make_tiny
from safetensors.torch import load_file, save_file
from test_models import PROMPT, forward, load
from tiny_models import edit_json, transformers_logits, write_tiny_model

from nanovllm import SamplingParams
from nanovllm.kernels.compat import INTERPRET
from nanovllm.layers.weights import finish_loading
from nanovllm.models.registry import load_model_config
from nanovllm.moe.sigmoid import SigmoidRouter, SigmoidSpec
from nanovllm.quantization.config import QuantConfig
from nanovllm.quantization.shards import WeightOptions

FAMILIES = ("glm4_moe", "minimax_m2")


def test_layers_for_speculation_are_left_out(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "glm4_moe")
    expected, file = transformers_logits(folder, PROMPT), folder / "model.safetensors"
    names = ("eh_proj.weight", "shared_head.head.weight", "mlp.gate.e_score_correction_bias")
    save_file(load_file(file) | {f"model.layers.3.{name}": torch.ones(2) for name in names}, file)
    torch.testing.assert_close(forward(load(folder), PROMPT), expected, rtol=1e-4, atol=1e-4)


def test_half_heads_by_their_released_name(tmp_path: Path) -> None:
    """`rotary_dim` of MiniMax M2, in place of a share."""
    rope = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}
    folder = write_tiny_model(tmp_path, "minimax_m2", rope_parameters=rope)
    expected = transformers_logits(folder, PROMPT)
    torch.testing.assert_close(forward(load(folder), PROMPT), expected, rtol=1e-4, atol=1e-4)
    released = {"rotary_dim": 6, "rope_theta": 5e6, "scoring_func": "sigmoid", "use_qk_norm": True}
    edit_json(folder / "config.json", remove=("rope_parameters",), use_routing_bias=True, **released)
    torch.testing.assert_close(forward(load(folder), PROMPT), expected, rtol=1e-4, atol=1e-4)


def test_without_norms_of_queries_and_groups(tmp_path: Path) -> None:
    """As GLM-4.5 Air."""
    plain = {"use_qk_norm": False, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    folder = write_tiny_model(tmp_path, "glm4_moe", **plain)
    expected = transformers_logits(folder, PROMPT)
    torch.testing.assert_close(forward(load(folder), PROMPT), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_router_of_a_model_in_bfloat16_is_float32(tmp_path: Path, family: str) -> None:
    folder = write_tiny_model(tmp_path, family, dtype="bfloat16")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.gate" if family == "glm4_moe" else "model.layers.1.block_sparse_moe.gate"
    x = torch.randn(50, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    with make_tiny(folder, dtype="bfloat16") as llm:
        router = inside.model(llm).get_submodule(name)
        found = router(x).double()
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        [output] = llm.generate([PROMPT], params, use_tqdm=False)
    assert len(output["token_ids"]) == 4
    expected = F.logsigmoid(x.double() @ tensors[f"{name}.weight"].double().T)
    chosen = found > -1e29
    assert (chosen.sum(1) == 3).all()
    torch.testing.assert_close(found[chosen], expected[chosen], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob false is not supported"),
        ("glm4_moe", {"n_group": 5}, "n_group 5 and topk_group 2 do not fit 12 experts"),
        ("glm4_moe", {"topk_group": 4}, "n_group 3 and topk_group 4 do not fit 12 experts"),
        ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace must be a number of layers"),
        ("glm4_moe", {"first_k_dense_replace": 2**31}, "number of layers, at most 10000, not 2147483648"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm False is not supported"),
        (
            "granite_swa",
            {"layer_rope_theta": [1e4]},
            "layer_rope_theta must be a number for each of 4 layers",
        ),
        ("mellum", {"mlp_layer_types": ["moe"] * 3}, "mlp_layer_types must be 'dense' or 'sparse'"),
    ],
)
def test_what_is_refused(tmp_path: Path, family: str, changes: dict[str, Any], message: str) -> None:
    folder = write_tiny_model(tmp_path, family)
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ValueError, match=message):
        load_model_config(folder)


@pytest.mark.skipif(not INTERPRET, reason="tests/gpu runs the compiled kernel")
@pytest.mark.parametrize(("experts", "top_k"), [(12, 3), (256, 8)])
def test_the_kernel_of_softmax_routing(experts: int, top_k: int) -> None:
    moe_cases.check_chosen(experts, top_k, "cpu")


def test_the_weights_of_the_chosen_are_their_scores() -> None:
    """The softmax of what the router returns: scores over their sum, of the best of the best groups."""
    spec = SigmoidSpec(12, 3, 8, groups=3, top_groups=2)
    router = SigmoidRouter(16, spec)
    router.allocate("gate", WeightOptions(torch.bfloat16, torch.device("cpu")), QuantConfig())
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(12, 16, generator=generator), torch.randn(12, generator=generator)
    for shard in router.shards:
        router.load(shard, weight if shard.param == "weight" else bias)
    finish_loading(router)
    x = torch.randn(50, 16, generator=generator)
    weights = router(x).softmax(1)
    for row, found in zip(x, weights, strict=True):
        scores = torch.sigmoid(weight @ row)
        choice = scores + bias
        groups = sorted(range(3), key=lambda g: -choice[4 * g : 4 * g + 4].sort().values[-2:].sum())[:2]
        eligible = [index for index in range(12) if index // 4 in groups]
        chosen = sorted(eligible, key=lambda index: -choice[index])[:3]
        expected = torch.zeros(12)
        expected[chosen] = scores[chosen] / scores[chosen].sum()
        torch.testing.assert_close(found, expected)
