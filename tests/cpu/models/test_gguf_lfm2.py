"""GGUF files of LFM2, dense and with experts: names, settings, blocks that stay, states in use, refusals."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checked_llm import make_tiny
from gguf_files import random_blocks, try_file
from gguf_lfm2 import of_folder, stored_name, write_lfm2
from safetensors.torch import save_file
from test_gguf import PROMPT, greedy
from test_gguf_hybrids import named
from test_lfm2 import PROMPTS
from test_models import forward, load
from tiny_models import transformers_greedy, transformers_logits, write_tiny_model

from nanovllm import ModelLoadError, SamplingParams
from nanovllm.cpu.integers import IntegerExpertsMethod, IntegerLinearMethod
from nanovllm.jobs.main import main
from nanovllm.layers.weights import methods
from nanovllm.models.registry import load_model_config, open_checkpoint
from nanovllm.parallel.group import TPGroup
from nanovllm.states.short_conv import PARTS
from tools.write_gguf import Encode

FAMILIES = ("lfm2", "lfm2_moe")
# Files state neither biases nor a factor of experts.
STATED: dict[str, dict[str, Any]] = {
    "lfm2": {"conv_bias": False},
    "lfm2_moe": {"routed_scaling_factor": 1.0},
}
BLOCKS: dict[str, Any] = {"hidden_size": 64, "vocab_size": 104}
WIDTHS: dict[str, dict[str, Any]] = {
    "lfm2": {"intermediate_size": 192, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 32},
    "lfm2_moe": {"intermediate_size": 128, "moe_intermediate_size": 64},
}


def tiny(folder: Path, family: str, **more: Any) -> Path:
    return write_tiny_model(folder, family, **STATED[family] | more)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_in_float32_is_the_folder(tmp_path: Path, family: str, tied: bool) -> None:
    """Of a dense model with the width of its MLPs, to which nothing is added again."""
    folder = tiny(tmp_path / "folder", family, tie_word_embeddings=tied)
    path = write_lfm2(folder, tmp_path / "m.gguf")
    before, after = named(folder), named(path)
    assert after.keys() == before.keys() and ("lm_head.weight" in after) is not tied
    assert all(torch.equal(after[name], before[name]) for name in before)
    ours, theirs = load_model_config(path), load_model_config(folder)
    differ = {key for key in vars(ours) if getattr(ours, key) != getattr(theirs, key)}
    assert differ == {"eos_token_ids"}  # the file has no tokenizer
    assert greedy(path) == transformers_greedy(folder, PROMPT, 12)
    torch.testing.assert_close(
        forward(load(path), PROMPT), transformers_logits(folder, PROMPT), rtol=1e-4, atol=1e-4
    )


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of a model, and of its file
    "five taps": ({"conv_L_cache": 5}, {}),
    "attention first and last": (
        {"layer_types": ["full_attention", "conv", "conv", "full_attention"]},
        {},
    ),
    "no convolutions": ({"layer_types": ["full_attention"] * 4}, {"attention__head_count_kv": 2}),
    "heads of each layer": ({}, {"attention__head_count": [0, 4, 0, 4], "feed_forward_length": [48] * 4}),
    "no dense layers": ({"num_dense_layers": 0}, {"leading_dense_block_count": None}),
    "another rope": ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}, {}),
    "weights that add up": ({}, {"expert_weights_norm": True, "expert_weights_scale": 1.0}),
}


@pytest.mark.parametrize("form", FORMS)
def test_other_forms(tmp_path: Path, form: str) -> None:
    """The kinds of layers follow from their tensors."""
    settings, keys = FORMS[form]
    folder = tiny(tmp_path / "folder", "lfm2_moe", **settings)
    path = write_lfm2(folder, tmp_path / "m.gguf", **keys)
    torch.testing.assert_close(
        forward(load(path), PROMPT), transformers_logits(folder, PROMPT), rtol=1e-4, atol=1e-4
    )


def test_a_name_of_other_files(tmp_path: Path) -> None:
    """The last norm as all other architectures call it."""
    folder = tiny(tmp_path / "folder", "lfm2")
    norm = {"output_norm.weight": of_folder(folder)["model.embedding_norm.weight"]}
    path = write_lfm2(folder, tmp_path / "m.gguf", tensors=norm | {"token_embd_norm.weight": None})
    assert torch.equal(named(path)["model.norm.weight"], norm["output_norm.weight"])
    twice = write_lfm2(folder, tmp_path / "twice.gguf", tensors=norm)
    with pytest.raises(
        ModelLoadError, match=r"twice\.gguf: tensor '\w+_norm.weight' is a second output_norm"
    ):
        load_model_config(twice)


def test_a_factor_of_experts_is_not_stated(tmp_path: Path) -> None:
    """The converter leaves it out, and llama.cpp computes as if it were 1; so does a file here."""
    folder = tiny(tmp_path / "folder", "lfm2_moe", routed_scaling_factor=2.5)
    path = write_lfm2(folder, tmp_path / "m.gguf")
    plain = tiny(tmp_path / "plain", "lfm2_moe")
    expected = transformers_logits(plain, PROMPT)
    assert not torch.allclose(transformers_logits(folder, PROMPT), expected, atol=0.1)
    torch.testing.assert_close(forward(load(path), PROMPT), expected, rtol=1e-4, atol=1e-4)


# -- blocks -------------------------------------------------------------------------------------------------


def write_both(folder: Path, target: Path, encode: Encode) -> tuple[Path, Path]:
    """A file with blocks, and a folder with the values of these blocks in float32."""
    values: dict[str, torch.Tensor] = {}

    def encoded(name: str, dense: np.ndarray) -> tuple[np.ndarray, Any]:
        raw, kind = encode(name, dense)
        values[name] = torch.from_numpy(gguf.quants.dequantize(raw, kind).copy())
        return raw, kind

    path, found = write_lfm2(folder, target / "m.gguf", encoded), {}
    for name, tensor in of_folder(folder).items():
        dense = values.get(stored_name(name), tensor).view(tensor.shape)
        if ".experts." in name:
            module, last = name.rsplit(".", 1)
            found |= {f"{module}.{n}.{last}.weight": each.clone() for n, each in enumerate(dense)}
        else:
            found[name] = dense
    save_file(found, folder / "model.safetensors")
    return path, folder


@pytest.mark.parametrize("stored_as", ["Q4_K", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("family", FAMILIES)
def test_dequantised_blocks(tmp_path: Path, family: str, stored_as: str) -> None:
    """A Q4_K_M has both of the first ones. Answers are transformers' with the values of the package gguf."""
    sizes = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256}
    experts = {"moe_intermediate_size": 256, "num_experts": 4}
    more = experts if family == "lfm2_moe" else {"block_auto_adjust_ff_dim": False}
    source = tiny(tmp_path / "folder", family, **sizes, **more)
    path, folder = write_both(source, tmp_path, random_blocks(stored_as))
    types = open_checkpoint(path).config()["quantization_config"]["types"]
    assert set(types.values()) == {stored_as}
    assert {f"model.layers.0.conv.{part}" for part in PARTS} < types.keys()
    before, after = named(folder), named(path)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert greedy(path, dtype="float32") == transformers_greedy(folder, PROMPT, 12)


@pytest.mark.parametrize("stored_as", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_stay_as_they_are_stored(tmp_path: Path, family: str, stored_as: str) -> None:
    """Of each matrix but routers; each rank has its part."""
    source = tiny(tmp_path / "folder", family, **BLOCKS, **WIDTHS[family])
    path = write_lfm2(source, tmp_path / "m.gguf", stored_as)
    tensors, model = named(path), load(path, on_cpu=True)
    kept = Counter[str]()
    for module, method in methods(model):
        last = module.rpartition(".")[2]
        if isinstance(method, IntegerLinearMethod):
            layer = model.get_submodule(module)
            names = [f"{shard.module_name(module)}.weight" for shard in layer.shards]  # type: ignore[union-attr]
            assert torch.equal(method.weight.dense(), torch.cat([tensors[name] for name in names])), names
            kept[last] += 1
        elif isinstance(method, IntegerExpertsMethod):
            for part, dense in (("w2", method.down), ("w1", method.gate_up)):
                whole = torch.stack([tensors[f"{module}.{index}.{part}.weight"] for index in range(10)])
                own = torch.stack([dense[index].dense() for index in range(10)])
                assert torch.equal(own[:, : whole.shape[1]], whole)
            kept[last] += 1
        else:
            assert module.endswith(("feed_forward.gate", ".conv.conv", "norm")), module
    convs = 3 if family == "lfm2" else 2
    assert (kept["in_proj"], kept["out_proj"], kept["qkv_proj"], kept["o_proj"]) == (
        *(convs, convs),
        *(4 - convs, 4 - convs),
    )
    assert (kept["gate_up_proj"], kept["experts"]) == ((4, 0) if family == "lfm2" else (1, 3))
    parts = [load(path, on_cpu=True, tp=TPGroup(rank, 2)).state_layers[0] for rank in range(2)]
    dense = [part.out_proj.method.weight.dense() for part in parts]
    assert torch.equal(torch.cat(dense, 1), tensors["model.layers.0.conv.out_proj.weight"])
    split = [part.in_proj.method.weight.dense().split(part.in_proj.output_sizes) for part in parts]
    for name, *halves in zip(PARTS, *split, strict=True):
        assert torch.equal(torch.cat(halves), tensors[f"model.layers.0.conv.{name}.weight"])


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_with_blocks(tmp_path: Path, family: str) -> None:
    """Two ranks, and weights as they are stored; activations of 8 bits."""
    folder = tiny(tmp_path / "folder", family, **BLOCKS, **WIDTHS[family])
    path = write_lfm2(folder, tmp_path / "m.gguf", "Q8_0")
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    expected = transformers_logits(folder, PROMPT).log_softmax(-1)
    own = expected[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    for options in ({}, {"tensor_parallel_size": 2}):
        with make_tiny(path, dtype="float32", **options) as llm:
            [output] = llm.generate([PROMPT], params, use_tqdm=False)
        pairs = zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True)
        given = torch.tensor([each[token].logprob for each, token in pairs])
        assert (given - own).abs().mean() < 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_states_of_a_file(tmp_path: Path, family: str) -> None:
    """Prompts that begin alike, in steps of few tokens and again from kept states."""
    folder = tiny(tmp_path / "folder", family)
    path = write_lfm2(folder, tmp_path / "m.gguf")
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with make_tiny(path, num_kvcache_blocks=60, max_num_batched_tokens=50) as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                assert output["token_ids"] == transformers_greedy(folder, prompt, 6)
        assert all(seq.num_cached_tokens for seq in llm.sequences[len(PROMPTS) :])


@pytest.mark.parametrize("family", FAMILIES)
def test_doctor_says_what_stays(tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny(tmp_path / "folder", family, **BLOCKS, **WIDTHS[family])
    path = write_lfm2(folder, tmp_path / "m.gguf", "Q8_0")
    code = main(["doctor", str(path), "--device", "cpu", "--skip-tokenizer-init"])
    shown = capsys.readouterr().out
    assert code == 0, shown
    assert "files: all weights are there, with the right shapes" in shown
    assert "quantised weights: GGUF weights are used as they are stored: " in shown


# -- refused ------------------------------------------------------------------------------------------------

KEYS: dict[str, tuple[dict[str, Any], str]] = {
    "a window": ({"attention__sliding_window": 8}, r"lfm2moe\.attention\.sliding_window 8 is not supported"),
    "a softmax": ({"expert_gating_func": 1}, r"expert_gating_func 1 is not supported; it must be 2, a sigm"),
    "no gating": ({"expert_gating_func": None}, r"expert_gating_func None is not supported; it must be 2"),
    "a factor": ({"expert_weights_scale": 2.5}, r"lfm2moe\.expert_weights_scale 2\.5 is not supported"),
    "no sum": ({"expert_weights_norm": False}, r"norm_topk_prob false is not supported"),
    "both directions": ({"attention__causal": False}, r"lfm2moe\.attention\.causal False is not supported"),
    "KV heads": ({"attention__head_count_kv": [0, 1, 0, 2]}, r"head_count_kv \[1, 2\], not one number"),
    "no KV heads": ({"attention__head_count_kv": [0] * 4}, r"head_count_kv \[\], not one number"),
    "widths": ({"feed_forward_length": [48, 48, 48, 64]}, r"feed_forward_length \[48, 48, 48, 64\], not the"),
    "no taps": ({"shortconv__l_cache": None}, r"shortconv\.l_cache must be a number from 1 on, not None"),
    "one tap": ({"shortconv__l_cache": 1}, r"conv_L_cache must be at least 2, not 1"),
    "too many layers": ({"block_count": 9}, r"block_count says that it has 9 layers, and the file has 4"),
    "a width": ({"embedding_length": 8}, r"embedding_length is 8, and 'token_embd\.weight' has 32 columns"),
    "an MLP": ({"feed_forward_length": 8}, r"length is 8, and 'blk\.0\.ffn_down\.weight' has 48 columns"),
    "an expert": ({"expert_feed_forward_length": 8}, r"is 8, and 'blk\.1\.ffn_down_exps\.weight' has 24 co"),
    "no layers": ({"block_count": 0}, r"lfm2moe\.block_count must be a number from 1 on, not 0"),
    "dense layers": (
        {"leading_dense_block_count": 9},
        r"9 missing: model\.layers\.1\.feed_forward\.gate_proj",
    ),
    "a list": ({"leading_dense_block_count": [1, 1]}, r"leading_dense_block_count must be of type int"),
    "another rope": ({"rope__scaling__type": "longrope"}, r"rope\.scaling\.type longrope is not supported"),
}


@pytest.mark.parametrize("case", KEYS)
def test_keys_that_are_refused(tmp_path: Path, case: str) -> None:
    changes, message = KEYS[case]
    path = write_lfm2(tiny(tmp_path / "f", "lfm2_moe"), tmp_path / "x.gguf", **changes)
    with pytest.raises((ModelLoadError, ValueError), match=rf"x\.gguf.*{message}"):
        load(path)


TENSORS: list[tuple[dict[str, torch.Tensor | None], str]] = [
    (
        {"blk.0.attn_q.weight": torch.ones(64, 32)},
        r"layer 0 has both of blk\.0\.attn_q and blk\.0\.shortconv\.in_proj$",
    ),
    (
        {"blk.0.shortconv.in_proj.weight": None},
        r"layer 0 has none of blk\.0\.attn_q and blk\.0\.shortconv\.in_proj$",
    ),
    (
        {"blk.0.shortconv.in_proj.bias": torch.ones(96)},
        r"tensor 'blk\.0\.shortconv\.in_proj\.bias' is none of lfm2moe$",
    ),
    ({"blk.1.ffn_gate_shexp.weight": torch.ones(24, 32)}, r"'blk\.1\.ffn_gate_shexp\.weight' is none of lfm"),
    (
        {"blk.0.shortconv.in_proj.weight": torch.ones(95, 32)},
        r"shape \(95, 32\); 3 parts of equally many rows are needed$",
    ),
    ({"blk.0.shortconv.in_proj.weight": torch.ones(93, 32)}, r"in_proj_before\.weight .*31"),
    (
        {"blk.0.shortconv.conv.weight": torch.ones(32, 1, 3)},
        r"shape \(32, 1, 3\); two dimensions are needed$",
    ),
    ({"blk.0.shortconv.conv.weight": torch.ones(32, 4)}, r"conv\.conv\.weight .*\(32, 1, 4\)"),
    ({"blk.1.ffn_up_exps.weight": torch.ones(24, 32)}, r"\(24, 32\); the matrices of at most 4096 experts"),
    ({"blk.1.ffn_up_exps.weight": torch.ones(4097, 1, 1)}, r"\(4097, 1, 1\); the matrices of at most 4096"),
    ({"blk.1.exp_probs_b.bias": None}, r"1 missing: .*e_score_correction_bias"),
    ({"dense_2.weight": torch.ones(32, 32)}, r"1 unexpected: dense_2\.weight"),
]


@pytest.mark.parametrize(("tensors", "message"), TENSORS, ids=range(len(TENSORS)))
def test_tensors_that_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor | None], message: str
) -> None:
    path = write_lfm2(tiny(tmp_path / "f", "lfm2_moe"), tmp_path / "x.gguf", tensors=tensors)
    with pytest.raises(ModelLoadError, match=message):
        load(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_mutated_headers_load_or_are_refused_by_name(tmp_path: Path, family: str) -> None:
    folder = tiny(tmp_path / "folder", family, **BLOCKS, **WIDTHS[family])
    base = write_lfm2(folder, tmp_path / "base.gguf", "Q8_0").read_bytes()
    outcomes = Counter(try_file(base, tmp_path / "mutated.gguf", seed, False)[1] for seed in range(25))
    assert outcomes["refused"] > 8 and outcomes["loaded"] > 0
