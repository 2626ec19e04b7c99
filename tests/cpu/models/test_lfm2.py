"""LFM2: what config.json and files say, states of a gated convolution in use, and what each option does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from checked_llm import make_tiny
from safetensors.torch import load_file, save_file
from test_hybrid_dtypes import errors
from test_models import PROMPT, forward, load
from tiny_models import (
    edit_json,
    transformers_answers,
    transformers_greedy,
    transformers_logits,
    transformers_model,
    write_tiny_model,
)

from nanovllm import SamplingParams
from nanovllm.config import Config
from nanovllm.device import Device
from nanovllm.kernels.compat import INTERPRET
from nanovllm.models.registry import load_model_config
from nanovllm.report.roofline import Cost
from nanovllm.states import short_conv
from nanovllm.states.kernels.causal_conv import causal_conv_step_triton, causal_conv_triton
from nanovllm.states.short_conv import ConvSpec
from nanovllm.states.spec import num_rows, pool_bytes

FAMILIES = ("lfm2", "lfm2_moe")
FULL, CONV = "full_attention", "conv"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SHARED = [3 + 7 * index % 83 for index in range(41)]
PROMPTS = [[*SHARED, *range(10 + own, 14 + own)] for own in range(6)]
ODD = {"hidden_size": 56, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 14}


def check(folder: Path, expected: torch.Tensor | None = None) -> None:
    """Logits are those of transformers."""
    expected = transformers_logits(folder, PROMPT) if expected is None else expected
    torch.testing.assert_close(forward(load(folder), PROMPT), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_biases_and_tied_embeddings(tmp_path: Path, family: str, tied: bool, bias: bool) -> None:
    folder = write_tiny_model(tmp_path, family, conv_bias=bias, tie_word_embeddings=tied, **ODD)
    names = load_file(folder / "model.safetensors").keys()
    assert any(name.endswith("conv.in_proj.bias") for name in names) == bias
    assert ("lm_head.weight" in names) != tied
    check(folder)


@pytest.mark.parametrize(
    ("settings", "width"),
    [
        ({"block_auto_adjust_ff_dim": False}, 71),
        ({"block_ffn_dim_multiplier": 1}, 48),
        ({"block_ffn_dim_multiplier": 1.0, "block_multiple_of": 7}, 49),
        ({"block_ffn_dim_multiplier": 0.9, "block_multiple_of": 1}, 42),
        ({}, 72),
    ],
    ids=str,
)
def test_the_width_of_an_mlp(tmp_path: Path, settings: dict[str, Any], width: int) -> None:
    folder = write_tiny_model(tmp_path, "lfm2", **settings)
    assert load_model_config(folder).intermediate_size == width
    assert load_file(folder / "model.safetensors")["model.layers.0.feed_forward.w1.weight"].shape[0] == width
    check(folder)


def test_a_width_without_a_multiplier(tmp_path: Path) -> None:
    """Null rounds to no multiple. transformers 5 does not write it."""
    folder = write_tiny_model(tmp_path, "lfm2", block_ffn_dim_multiplier=1.0, block_multiple_of=1)
    edit_json(folder / "config.json", block_ffn_dim_multiplier=None, block_multiple_of=24)
    assert load_model_config(folder).intermediate_size == 47
    load(folder)


@pytest.mark.parametrize("taps", [2, 3, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_taps(tmp_path: Path, family: str, taps: int) -> None:
    check(write_tiny_model(tmp_path, family, conv_L_cache=taps))


def test_the_spellings_of_releases(tmp_path: Path) -> None:
    """Numbers of layers with attention, other names of sizes, and a theta at the top; an override wins."""
    folder = write_tiny_model(tmp_path, "lfm2", tie_word_embeddings=True, hidden_size=48)
    expected = transformers_logits(folder, PROMPT)
    made = ("layer_types", "rope_parameters", "intermediate_size", "tie_word_embeddings", "dtype")
    edit_json(
        folder / "config.json",
        made,
        **{"full_attn_idxs": [1], "block_ff_dim": 71, "rope_theta": 1000000.0, "theta": 1000000.0},
        **{"tie_embedding": True, "block_dim": 48, "conv_dim": 48, "conv_dim_out": 48, "num_heads": 4},
        **{"block_use_swiglu": True, "use_pos_enc": True, "torch_dtype": "float32"},
    )
    transformers_model.cache_clear()
    torch.testing.assert_close(transformers_logits(folder, PROMPT), expected)
    config = load_model_config(folder)
    assert [spec.state is None for spec in config.attention] == [False, True, False, False]
    assert config.tie_word_embeddings and config.rms_norm_eps == 1e-5
    check(folder, expected)
    assert not load_model_config(folder, overrides={"tie_word_embeddings": False}).tie_word_embeddings
    assert not load_model_config(folder, overrides={"tie_embedding": False}).tie_word_embeddings
    assert load_model_config(folder, overrides={"intermediate_size": 36}).intermediate_size == 48
    changed = load_model_config(folder, overrides={"rope_theta": 7.0}).spec(1).rope
    assert changed is not None and changed.theta == 7.0


def test_all_layers_with_attention(tmp_path: Path) -> None:
    """As without either list."""
    folder = write_tiny_model(tmp_path, "lfm2", layer_types=[FULL] * 4)
    expected = transformers_logits(folder, PROMPT)
    edit_json(folder / "config.json", ("layer_types", "full_attn_idxs"))
    assert all(spec.state is None for spec in load_model_config(folder).attention)
    check(folder, expected)
    with make_tiny(folder) as llm:
        [output] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    assert output["token_ids"] == transformers_greedy(folder, PROMPT, 6)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bare_decoder(tmp_path: Path, family: str) -> None:
    """Files that leave out `model.` before names."""
    folder = write_tiny_model(tmp_path, family)
    expected, file = transformers_logits(folder, PROMPT), folder / "model.safetensors"
    save_file({name.removeprefix("model."): each for name, each in load_file(file).items()}, file)
    check(folder, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_begin_with_a_kept_state(tmp_path: Path, family: str) -> None:
    """Three of a prompt that was answered before, and of a new one. `test_hybrids.py` has other prompts."""
    folder = write_tiny_model(tmp_path, family)
    prompts = [PROMPTS[0], [*PROMPTS[1], 5][::-1]]
    many = SamplingParams(n=3, max_tokens=9, ignore_eos=True, logprobs=0)
    with make_tiny(folder, num_kvcache_blocks=60, max_num_batched_tokens=50) as llm:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        found = errors(folder, prompts, llm.generate(prompts, many, use_tqdm=False))
        assert len(found) == 6 and max(found) < 1e-4


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_preempted_sequences_in_every_manner(tmp_path: Path, family: str, ranks: int) -> None:
    """Chunks of prompts beside drawn tokens, few blocks, steps one ahead; after sleep again."""
    folder = write_tiny_model(tmp_path, family)
    options = {"num_kvcache_blocks": 20, "max_num_seqs": 4, "max_model_len": 96, "max_num_batched_tokens": 19}
    with make_tiny(folder, tensor_parallel_size=ranks, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        for _ in range(2):
            found = [each["token_ids"] for each in llm.generate(PROMPTS[:4], params, use_tqdm=False)]
            assert found == transformers_answers(folder, PROMPTS[:4], 40, found)
            llm.sleep()
            llm.wake_up()
        assert any(seq.num_preemptions for seq in llm.sequences)


def test_ranks_hold_parts_of_each_third(tmp_path: Path) -> None:
    """b, c and x of the same channels, their taps and biases."""
    from nanovllm.parallel.group import TPGroup

    folder = write_tiny_model(tmp_path, "lfm2")
    tensors = load_file(folder / "model.safetensors")
    for rank in range(2):
        layer = load(folder, tp=TPGroup(rank, 2)).state_layers[0]
        own = slice(24 * rank, 24 * rank + 24)
        for name in ("weight", "bias"):
            whole = tensors[f"model.layers.0.conv.in_proj.{name}"].chunk(3)
            found = layer.in_proj.bias if name == "bias" else layer.in_proj.method.apply(torch.eye(48)).T
            assert torch.equal(found, torch.cat([part[own] for part in whole]))
            assert torch.equal(
                layer.conv.get_parameter(name), tensors[f"model.layers.0.conv.conv.{name}"][own]
            )


@pytest.mark.skipif(not INTERPRET, reason="kernels are compiled here; tests/gpu runs the engine over them")
def test_the_engine_with_triton_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of states, with the cells of a second chunk and of a kept state."""
    monkeypatch.setattr(short_conv, "causal_conv", causal_conv_triton)
    monkeypatch.setattr(short_conv, "causal_conv_step", causal_conv_step_triton)
    folder = write_tiny_model(tmp_path, "lfm2", num_hidden_layers=2, layer_types=[CONV, FULL])
    prompts = [PROMPTS[0][:20], [*PROMPTS[0][:18], 5, 6]]
    expected = [transformers_greedy(folder, prompt, 3) for prompt in prompts]
    options = {"attention_backend": "triton", "kvcache_block_size": 16, "max_num_batched_tokens": 11}
    with make_tiny(folder, num_kvcache_blocks=9, **options) as llm:
        outputs = llm.generate(prompts, replace(GREEDY, max_tokens=3), use_tqdm=False)
        assert [seq.num_cached_tokens for seq in llm.sequences] == [0, 18]
    assert [each["token_ids"] for each in outputs] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bits_in_every_batch(tmp_path: Path, family: str) -> None:
    """With deterministic=True."""
    folder = write_tiny_model(tmp_path, family)
    text = [3 + 7 * index % 83 for index in range(132)]
    others = [[*text[:70], 9], text[:129]]
    params, found = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2), set()
    for manner in ({}, {"enable_prefix_caching": False, "max_num_batched_tokens": 70}):
        room = {"num_kvcache_blocks": 60, "max_model_len": 170, "kvcache_block_size": 16} | manner
        with make_tiny(folder, deterministic=True, **room) as llm:
            outputs = llm.generate([*others, text], params, use_tqdm=False)
            assert [each.num_cached_tokens for each in outputs] == ([0, 0, 0] if manner else [0, 64, 128])
            found.add(str([each.outputs[0].logprobs for each in outputs]))
            [alone] = llm.generate([text], params, use_tqdm=False)
            assert str(alone.outputs[0].logprobs) == str(outputs[-1].outputs[0].logprobs)
    assert len(found) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16(tmp_path: Path, family: str) -> None:
    """Log-probabilities as near to float32 as those of transformers in bfloat16, and states of that dtype."""
    folder = write_tiny_model(tmp_path, family, dtype="bfloat16")
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    exact = transformers_logits(folder, PROMPTS[0]).log_softmax(-1)
    index = torch.tensor(PROMPTS[0][1:])[:, None]
    own = exact[:-1].gather(1, index)[:, 0]
    with make_tiny(folder, dtype="bfloat16", max_num_batched_tokens=16) as llm:
        assert {layer.conv_pool.dtype for layer in inside.model(llm).state_layers} == {torch.bfloat16}
        [output] = llm.generate(PROMPTS[:1], scored, use_tqdm=False)
        first = [each["token_ids"] for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
        assert {len(each) for each in first} == {6}
    pairs = zip(output.prompt_logprobs[1:], PROMPTS[0][1:], strict=True)
    given = torch.tensor([each[token].logprob for each, token in pairs])
    error = (given - own).abs().mean()
    print(f"{family}: {error:.3f}")
    assert error < 0.2


def test_the_option_for_other_states_changes_nothing(tmp_path: Path) -> None:
    folder, params = write_tiny_model(tmp_path, "lfm2"), replace(GREEDY, logprobs=1)
    found = []
    for dtype in ("auto", "float32", "bfloat16"):
        with make_tiny(folder, mamba_ssm_cache_dtype=dtype) as llm:
            assert {layer.conv_pool.dtype for layer in inside.model(llm).state_layers} == {torch.float32}
            found.append(str([each.outputs[0].logprobs for each in llm.generate(PROMPTS, params)]))
    assert len(set(found)) == 1


@pytest.mark.parametrize("options", [{"kv_cache_dtype": "fp8"}, {"enforce_eager": True}], ids=str)
def test_beside_other_options(tmp_path: Path, options: dict[str, Any]) -> None:
    """Two calls give one answer, and nearly that of transformers."""
    folder = write_tiny_model(tmp_path, "lfm2")
    scored = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    with make_tiny(folder, num_kvcache_blocks=60, **options) as llm:
        first, second = (llm.generate(PROMPTS, GREEDY, use_tqdm=False) for _ in range(2))
        assert [each["token_ids"] for each in first] == [each["token_ids"] for each in second]
        found = errors(folder, PROMPTS, llm.generate(PROMPTS, scored, use_tqdm=False))
    assert max(found) < (0.3 if "kv_cache_dtype" in options else 1e-4)


def test_the_memory_of_states(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "lfm2")
    spec, model, device = ConvSpec(48, 3, True), load_model_config(folder), Device("cpu")
    assert [each.state for each in model.attention] == [spec, None, spec, spec]
    assert spec.row_bytes(4) == 4 * 2 * 48
    options = Config("m", max_num_seqs=5, dtype="float32")
    assert pool_bytes(options, model, device) == 3 * num_rows(5) * spec.row_bytes(4)
    assert pool_bytes(replace(options, tensor_parallel_size=2), model, device) * 2 == 3 * num_rows(5) * 384
    with make_tiny(folder, max_num_seqs=5) as llm:
        for layer in inside.model(llm).state_layers:
            assert layer.conv_pool.nbytes == layer.state_bytes(5) == num_rows(5) * spec.row_bytes(4)
    assert Cost.of(model, 4, 4).state_bytes == 2 * 3 * spec.row_bytes(4)


def test_the_roofline_counts_its_matrices(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "lfm2")
    tensors = load_file(folder / "model.safetensors").items()
    matrices = sum(tensor.numel() for name, tensor in tensors if ".layers." in name and tensor.dim() == 2)
    assert Cost.of(load_model_config(folder), 4, 4).layer_params == matrices


@pytest.mark.parametrize("family", FAMILIES)
def test_the_state_dict_of_transformers_updates(tmp_path: Path, family: str) -> None:
    """Experts as one tensor, the correction beside the router."""
    old, new = (write_tiny_model(tmp_path / str(seed), family, seed=seed) for seed in range(2))
    expected = [transformers_greedy(new, prompt, 6) for prompt in PROMPTS[:2]]
    weights = dict(transformers_model(new).state_dict())
    with make_tiny(old) as llm:
        llm.update_weights(weights.items())
        outputs = llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
    assert [each["token_ids"] for each in outputs] == expected


def test_experts_of_tokens(tmp_path: Path) -> None:
    """Of layers with experts; the first layer has an MLP."""
    folder = write_tiny_model(tmp_path, "lfm2_moe")
    with make_tiny(folder, return_routed_experts=True, enable_prefix_caching=False) as llm:
        [output] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    experts = output.outputs[0].routed_experts
    assert experts is not None and experts.shape[1:] == (4, 3)
    assert not experts[:, 0].any() and experts[:, 1:].max() < 10


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("lfm2", {"layer_types": [CONV] * 4}, "names no full_attention layer"),
        ("lfm2", {"layer_types": [CONV, FULL]}, "layer_types names 2 layers"),
        ("lfm2", {"layer_types": [CONV, "sliding_attention", FULL, CONV]}, r"'sliding_attention'\] are not"),
        ("lfm2", {"full_attn_idxs": [2]}, r"layer_types and full_attn_idxs \[2\] name different layers"),
        ("lfm2", {"full_attn_idxs": "2"}, "full_attn_idxs must be a list of layers, not '2'"),
        ("lfm2", {"layer_types": None, "full_attn_idxs": [1], "num_hidden_layers": 10**9}, "at most 10000"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache must be at least 2, not 1"),
        ("lfm2", {"conv_bias": 1}, "conv_bias must be true or false, not 1"),
        ("lfm2", {"conv_dim": 24}, "conv_dim 24 is not supported; it must be hidden_size 48"),
        ("lfm2", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; it must be 'silu'"),
        ("lfm2", {"use_pos_enc": False}, "use_pos_enc False is not supported; it must be True"),
        ("lfm2", {"block_ffn_dim_multiplier": -1}, "block_ffn_dim_multiplier must be a positive number"),
        ("lfm2", {"intermediate_size": 1}, "gives an MLP of width 0"),
        ("lfm2", {"block_multiple_of": 2**31 - 1, "block_ffn_dim_multiplier": 2**30}, "gives an MLP of wid"),
        ("lfm2_moe", {"use_expert_bias": False}, "use_expert_bias False is not supported; it must be True"),
        ("lfm2_moe", {"norm_topk_prob": False}, "norm_topk_prob false is not supported"),
        ("lfm2_moe", {"num_dense_layers": -1}, "num_dense_layers must be a number of layers, at most 100"),
        ("lfm2_moe", {"num_dense_layers": 2**31}, "num_dense_layers must be a number of layers, at most 10"),
        ("lfm2_moe", {"routed_scaling_factor": 0}, "routed_scaling_factor must be a positive number"),
    ],
    ids=str,
)
def test_what_is_refused(tmp_path: Path, family: str, changes: dict[str, Any], message: str) -> None:
    folder = write_tiny_model(tmp_path, family)
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ValueError, match=message):
        load_model_config(folder)


def test_ranks_that_cannot_share_channels(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 54, "head_dim": 16}
    folder = write_tiny_model(tmp_path, "lfm2", **heads)
    with pytest.raises(ValueError, match="channels of the convolution 54 cannot be split over 4 ranks"):
        make_tiny(folder, tensor_parallel_size=4)


def test_heads_of_files_without_head_dim(tmp_path: Path) -> None:
    """As in the released files."""
    folder = write_tiny_model(tmp_path, "lfm2", **ODD)
    expected = transformers_logits(folder, PROMPT)
    edit_json(folder / "config.json", ("head_dim",))
    check(folder, expected)
