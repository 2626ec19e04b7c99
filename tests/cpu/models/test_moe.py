"""Mixtures of experts: logits and tokens of transformers for every kind of layer, schedule and number of
ranks; the kernels in Triton's interpreter; new weights.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import moe_cases
import numpy as np
import pytest
import torch
from checked_llm import BLOCK, CheckedLLM, make_tiny
from digests import make_digest
from engine_cases import GREEDY, make_prompts, tokens
from moe_cases import SWAPPED, WIDE, Sizes
from safetensors.torch import load_file
from tensors import BF16, F32
from test_engine import replay_steps
from test_models import check_against_transformers
from tiny_models import (
    FAMILIES,
    MOE_FAMILIES,
    edit_json,
    transformers_greedy,
    transformers_model,
    write_tiny_model,
)

from nanovllm import LLM, ModelLoadError, SamplingParams
from nanovllm.kernels.compat import INTERPRET
from nanovllm.models.registry import get_family, load_model_config
from nanovllm.models.weights import weight_bytes
from nanovllm.moe.experts import UnquantizedExpertsMethod
from nanovllm.moe.kernels.grouped_matmul import choose_experts
from nanovllm.moe.kernels.routing import Routing
from nanovllm.moe.kernels.tiles import ExpertMLP, max_tiles
from nanovllm.moe.layers import MoESpec
from nanovllm.parallel.group import TPGroup
from nanovllm.quantization.base import Normed

interpreted = pytest.mark.skipif(
    not INTERPRET, reason="kernels are compiled here; tests/gpu runs these cases"
)
MOE = "qwen3_moe"
PLAIN = choose_experts(1, 10, F32, torch.device("cpu"))


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The second of three layers is dense."""
    folder = tmp_path_factory.mktemp("moe")
    return write_tiny_model(folder, MOE, num_hidden_layers=3, mlp_only_layers=[1])


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts()


@pytest.fixture(scope="module")
def expected(moe: Path, prompts: list[list[int]]) -> list[list[int]]:
    return [transformers_greedy(moe, prompt, GREEDY.max_tokens) for prompt in prompts]


# -- the same logits and tokens as transformers ------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
@pytest.mark.parametrize(
    "settings",
    [
        {"norm_topk_prob": False},
        {"num_hidden_layers": 4, "decoder_sparse_step": 2},
        {"num_hidden_layers": 3, "mlp_only_layers": [0, 2]},
        {"num_experts_per_tok": 1},
        {"num_experts_per_tok": 10},
        {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    ],
    ids=str,
)
def test_kinds_of_layers(tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    check_against_transformers(write_tiny_model(tmp_path, family, **settings))


def test_a_qwen2_moe_without_biases(tmp_path: Path) -> None:
    check_against_transformers(write_tiny_model(tmp_path, "qwen2_moe", qkv_bias=False))


def test_the_names_of_transformers_4(tmp_path: Path) -> None:
    """There the number of experts had another name in config.json."""
    folder = write_tiny_model(tmp_path, MOE)
    before = load_model_config(folder)
    content = json.loads((folder / "config.json").read_text())
    edit_json(folder / "config.json", remove=("num_local_experts",), num_experts=content["num_local_experts"])
    assert load_model_config(folder) == before


MATRIX = [
    {"max_num_batched_tokens": budget, "num_kvcache_blocks": blocks, "async_scheduling": ahead}
    for budget in (1, 7, BLOCK + 1, 512)
    for blocks in (200, 14, 6)
    for ahead in (True, False)
]


@pytest.mark.parametrize(
    "options",
    [pytest.param(each, marks=[] if i in (7, 20) else pytest.mark.full) for i, each in enumerate(MATRIX)],
)
def test_every_schedule(moe: Path, prompts: list, expected: list, options: dict[str, Any]) -> None:
    """Chunked prefill, preemption, and in the second pass the prefix cache."""
    with make_tiny(moe, **options) as llm:
        for _ in range(2):
            assert tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected
        if options["num_kvcache_blocks"] == 200:
            assert max(seq.num_cached_tokens for seq in llm.sequences) >= 2 * BLOCK


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_two_ranks(tmp_path: Path, family: str, prompts: list) -> None:
    """A rank's part of an expert is 10 wide, which the method pads to 12."""
    width = "intermediate_size" if family == "mixtral" else "moe_intermediate_size"
    folder = write_tiny_model(tmp_path, family, **{width: 20})
    short = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with make_tiny(folder, tensor_parallel_size=2, max_num_batched_tokens=9) as llm:
        outputs = tokens(llm.generate(prompts, short, use_tqdm=False))
    assert outputs == [transformers_greedy(folder, prompt, 6) for prompt in prompts]


@interpreted
def test_padding_of_graphs_goes_nowhere(moe: Path, prompts: list, expected: list) -> None:
    """Three sequences in steps of seven rows."""
    padded: list[int] = []
    few = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with make_tiny(moe, attention_backend="triton", kvcache_block_size=16, max_num_seqs=7) as llm:
        replay_steps(llm)
        apply = UnquantizedExpertsMethod.apply

        def spy(
            method: UnquantizedExpertsMethod, x: Normed, routing: Routing, mlp: ExpertMLP
        ) -> torch.Tensor:
            if routing.slots is not None and len(routing.slots) == 7:
                padded.append(int((routing.chosen().ids < 0).all(1).sum()))
                assert torch.equal(routing.chosen().ids[:, 0] < 0, routing.slots < 0)
                x.tensor()[routing.slots < 0] = torch.nan
            return apply(method, x, routing, mlp)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(UnquantizedExpertsMethod, "apply", spy)
            assert tokens(llm.generate(prompts[:3], few, use_tqdm=False)) == [ids[:6] for ids in expected[:3]]
    assert set(padded) == {4}


@interpreted
def test_deterministic(moe: Path, prompts: list, expected: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels compute every product of experts."""
    monkeypatch.setattr("nanovllm.moe.experts.experts_reference", None)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with make_tiny(moe, deterministic=True, kvcache_block_size=16, max_num_batched_tokens=23) as llm:
        outputs = llm.generate(prompts[2:4], params, use_tqdm=False)
    assert tokens(outputs) == [ids[:3] for ids in expected[2:4]]


# -- kernels ------------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize(
    ("rows", "sizes", "tile_rows"),
    [
        (1, Sizes(), 16),
        (3, Sizes(), 2),
        (64, Sizes(60, 4), 16),
        (97, Sizes(), 4),
        (130, Sizes(8, 2), 128),
        (1300, Sizes(12, 8), 64),
    ],
)
def test_routing(rows: int, sizes: Sizes, tile_rows: int) -> None:
    moe_cases.check_routing(rows, sizes, BF16 if rows % 2 else F32, "cpu", tile_rows)


@interpreted
@pytest.mark.parametrize("choice", [PLAIN, SWAPPED, WIDE], ids=["plain", "swapped", "wide"])
@pytest.mark.parametrize(("rows", "dtype"), [(1, F32), (2, BF16), (3, F32), (97, F32), (20, BF16)])
def test_experts(rows: int, dtype: torch.dtype, choice: Any) -> None:
    moe_cases.check_experts(rows, Sizes(), dtype, "cpu", choice)


@interpreted
@pytest.mark.parametrize("only", [(4, 5, 6), (0, 9, 3, 7)])
def test_experts_without_rows_and_with_all(only: tuple[int, ...]) -> None:
    """In the first case every row goes to the same three."""
    moe_cases.check_experts(40, Sizes(), F32, "cpu", PLAIN, only)


@interpreted
@pytest.mark.parametrize("choice", [PLAIN, WIDE], ids=["plain", "wide"])
def test_all_rows_to_one_expert(choice: Any) -> None:
    moe_cases.check_experts(40, Sizes(10, 1), F32, "cpu", choice, only=(4,))


@interpreted
def test_rows_are_independent() -> None:
    moe_cases.check_rows_are_independent([1, 3, 17, 40], Sizes(clamped=True), F32, "cpu", [PLAIN])


@interpreted
def test_no_rows() -> None:
    moe_cases.check_no_rows(Sizes(), "cpu", PLAIN)


def test_the_bound_of_tiles() -> None:
    """The worst routing: one pair for each of all experts but one, which gets the rest."""
    for pairs, experts, rows in ((8, 128, 16), (2048, 128, 32), (100, 10, 16), (1, 1, 128), (24, 10, 1)):
        counts = [1] * (min(experts, pairs) - 1)
        worst = len(counts) + -(-(pairs - len(counts)) // rows)
        assert worst <= max_tiles(pairs, experts, rows) <= pairs


# -- weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "ranks"), [*((family, 1) for family in MOE_FAMILIES), ("mixtral", 2)])
def test_the_state_dict_of_transformers_updates(tmp_path: Path, family: str, ranks: int) -> None:
    """It holds the experts of a layer in two tensors."""
    first, second = (write_tiny_model(tmp_path / str(i), family, seed=i) for i in range(2))
    state = {**transformers_model(second).state_dict()}
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in state)
    with make_digest(second, tensor_parallel_size=ranks) as llm:
        expected = llm.on_ranks("digest")
    with make_digest(first, tensor_parallel_size=ranks) as llm:
        assert llm.on_ranks("digest") != expected
        llm.update_weights(state)
        assert llm.on_ranks("digest") == expected


def test_bad_updates(moe: Path) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    with make_tiny(moe) as llm:
        with pytest.raises(ValueError, match=r"no tensor 'model\.layers\.0\.mlp\.experts\.10\.gate_proj"):
            llm.update_weights({name: torch.zeros(11, 48, 32)})
        with pytest.raises(
            ValueError, match=r"experts\.0\.gate_proj\.weight has shape \(20, 32\), but .*24, 32"
        ):
            llm.update_weights({name: torch.zeros(10, 40, 32)})
        with pytest.raises(
            ValueError, match=r"no tensor 'model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight'"
        ):
            llm.update_weights({"model.layers.1.mlp.experts.3.up_proj.weight": torch.zeros(24, 32)})


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "mixtral")
    edit_json(folder / "config.json", num_local_experts=11)
    with pytest.raises(ModelLoadError, match=r"missing: .*block_sparse_moe\.experts\.10\.w1\.weight"):
        make_tiny(folder)


def test_kinds_of_many_layers_are_counted_without_building_them() -> None:
    spec = MoESpec(4, 2, 8, step=3, dense=frozenset([0, 5, 11, 100, -1]))
    for num_layers in (1, 3, 6, 12, 200):
        kinds = [(kind.has_experts(0), count) for kind, count in spec.kinds(num_layers)]
        sparse = sum(map(spec.has_experts, range(num_layers)))
        assert kinds == [each for each in ((True, sparse), (False, num_layers - sparse)) if each[1]]
    assert spec.kinds(10**12)


@pytest.mark.parametrize("ranks", [1, 2])
def test_weight_bytes_of_unequal_layers(moe: Path, ranks: int) -> None:
    config = load_model_config(moe)
    total = sum(each.numel() * 4 for each in load_file(moe / "model.safetensors").values())
    found = weight_bytes(config, TPGroup(0, ranks), F32)
    if ranks == 1:
        assert found == total
    else:
        assert total / 2 < found < total


def test_18_thousand_tensors_are_quick() -> None:
    """Those of Qwen3-30B-A3B."""
    config = get_family("Qwen3MoeForCausalLM").model_config("X", {"num_hidden_layers": 48, "head_dim": 128})
    start = time.perf_counter()
    assert 61.0e9 < weight_bytes(config, TPGroup(), BF16) < 61.2e9
    assert time.perf_counter() - start < 5


# -- bad configs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 11}, "num_experts_per_tok 11 is more than the 10 experts"),
        ({"num_local_experts": 2**20}, "1048576 experts are more than 4096"),
        (
            {"moe_intermediate_size": 2**30, "hidden_size": 2**20},
            "10 experts of width 1073741824, .* no memory",
        ),
        ({"num_local_experts": 0, "num_experts": 0}, "num_experts must be a positive integer, not 0"),
        ({"moe_intermediate_size": "24"}, "moe_intermediate_size must be a positive integer, not '24'"),
        ({"mlp_only_layers": 3}, "mlp_only_layers must be a list of layers, not 3"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive integer, not 0"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false, not 1"),
        ({"n_routed_experts": 4}, "n_routed_experts 4 is not supported"),
    ],
)
def test_bad_configs(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_tiny_model(tmp_path, MOE)
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ValueError, match=message):
        load_model_config(folder)


def test_ranks_must_divide_the_width_of_experts() -> None:
    raw = {"num_attention_heads": 12, "num_key_value_heads": 12, "moe_intermediate_size": 20}
    family = get_family(FAMILIES[MOE][1].__name__)
    config = family.model_config("X", raw | {"intermediate_size": 7})
    config.check_tensor_parallel_size(4)
    with pytest.raises(ValueError, match=r"tensor_parallel_size=3 .* intermediate size 20; .* 1, 2, 4$"):
        config.check_tensor_parallel_size(3)
    config = family.model_config("X", raw | {"intermediate_size": 6, "mlp_only_layers": [1]})
    with pytest.raises(ValueError, match=r"intermediate size 20 and 6; .* 1, 2$"):
        config.check_tensor_parallel_size(4)


def test_other_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="not supported, because it is a mixture of experts of another kind"):
        get_family("DeepseekV3ForCausalLM", {"n_routed_experts": 256})


# -- return_routed_experts ----------------------------------------------------------------------------------


@torch.inference_mode()
def transformers_routing(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """The experts [tokens, layers, 3] of all tokens; 0 in the dense layer."""
    logits = transformers_model(folder)(torch.tensor([token_ids]), output_router_logits=True).router_logits
    chosen = [each.topk(3, dim=-1).indices for each in logits]
    return torch.stack([chosen[0], torch.zeros_like(chosen[0]), chosen[-1]], 1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7, "num_kvcache_blocks": 8, "async_scheduling": True},
        {"tensor_parallel_size": 2},
        {"data_parallel_size": 2},
    ],
    ids=["ample", "chunked_and_preempted", "two_ranks", "two_replicas"],
)
def test_routed_experts(moe: Path, prompts: list, options: dict[str, Any]) -> None:
    """Of every token but the last one; all settings agree with transformers."""
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    settings: dict[str, Any] = {"return_routed_experts": True, "enable_prefix_caching": False, **options}
    make = LLM if "data_parallel_size" in options else CheckedLLM
    base = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "kvcache_block_size": BLOCK}
    with make(moe, **base | {"max_model_len": 48, "num_kvcache_blocks": 200} | settings) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        if "num_kvcache_blocks" in options:
            assert any(seq.num_preemptions for seq in llm.sequences)
    for prompt, output in zip(prompts, outputs, strict=True):
        found = output.outputs[0].routed_experts
        whole = [*prompt, *output["token_ids"]]
        assert found.dtype == np.int16
        assert found.shape == (len(whole) - 1, 3, 3)
        assert torch.equal(torch.from_numpy(found).long(), transformers_routing(moe, whole[:-1]))


def test_routed_experts_need_a_computed_prompt_and_experts(moe: Path, model: Path) -> None:
    with pytest.raises(ValueError, match="return_routed_experts=True needs enable_prefix_caching=False"):
        make_tiny(moe, return_routed_experts=True)
    with pytest.raises(ValueError, match="needs a mixture of experts, and Qwen3ForCausalLM is none"):
        make_tiny(model, enable_return_routed_experts=True, enable_prefix_caching=False)
    with make_tiny(moe) as llm:
        [output] = llm.generate([[5, 6]], SamplingParams(max_tokens=2), use_tqdm=False)
        assert output.outputs[0].routed_experts is None
