"""OLMo Hybrid: what config.json says of rope and states, names in files, and kept states in use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checked_llm import make_tiny
from safetensors.torch import load_file, save_file
from test_models import PROMPT, forward, load
from tiny_models import edit_json, transformers_greedy, transformers_logits, write_tiny_model

from nanovllm import SamplingParams
from nanovllm.errors import ModelLoadError
from nanovllm.kernels.compat import INTERPRET
from nanovllm.models.registry import load_model_config
from nanovllm.report.roofline import Cost

FAMILY = "olmo_hybrid"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SHARED = [3 + 7 * index % 83 for index in range(41)]
NO_THETA = {"rope_type": "default", "rope_theta": None}


@pytest.mark.parametrize(
    ("rope", "rotates"),
    [
        ({"rope_parameters": NO_THETA}, False),
        ({"rope_theta": None}, False),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}, True),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}, "rope_theta": None}, True),
        ({"rope_theta": 300.0}, True),
        ({"rope_parameters": None}, True),
    ],
    ids=str,
)
def test_rope_where_theta_is_not_null(tmp_path: Path, rope: dict[str, Any], rotates: bool) -> None:
    folder = write_tiny_model(tmp_path, FAMILY, **{"rope_parameters": None} | rope)
    expected = transformers_logits(folder, PROMPT)
    edit_json(folder / "config.json", remove=("rope_parameters",))
    edit_json(folder / "config.json", **rope)
    assert [spec.rope is not None for spec in load_model_config(folder).attention] == [rotates] * 4
    torch.testing.assert_close(forward(load(folder), PROMPT), expected, rtol=1e-4, atol=1e-4)
    changed = load_model_config(folder, overrides={"rope_theta": 7.0})
    assert [spec.rope and spec.rope.theta for spec in changed.attention] == [7.0] * 4


@pytest.mark.parametrize("negative", [False, True])
def test_eigenvalues_below_zero(tmp_path: Path, negative: bool) -> None:
    folder = write_tiny_model(tmp_path, FAMILY, linear_allow_neg_eigval=negative)
    expected = transformers_logits(folder, PROMPT)
    torch.testing.assert_close(forward(load(folder), PROMPT), expected, rtol=1e-4, atol=1e-4)
    edit_json(folder / "config.json", linear_allow_neg_eigval=not negative)
    assert (forward(load(folder), PROMPT) - expected).abs().max() > 0.01


def test_sizes_that_follow_from_others(tmp_path: Path) -> None:
    """Heads as attention has them, keys of 3/4 of such a head, values of twice that."""
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 192, "layer_types": None}
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    folder = write_tiny_model(tmp_path, FAMILY, **heads, **dict.fromkeys(names))
    expected = transformers_logits(folder, PROMPT)
    edit_json(folder / "config.json", ("layer_types", *names))
    config = load_model_config(folder)
    assert [spec.state is not None for spec in config.attention] == [True, True, True, False]
    state = config.attention[0].state
    assert (state.k_heads, state.v_heads, state.k_dim, state.v_dim) == (3, 3, 48, 96)
    torch.testing.assert_close(forward(load(folder), PROMPT), expected, rtol=1e-4, atol=1e-4)


def test_other_names_of_files(tmp_path: Path) -> None:
    """A convolution as one tensor; norms by their first names."""
    folder = write_tiny_model(tmp_path, FAMILY)
    expected, file = transformers_logits(folder, PROMPT), folder / "model.safetensors"
    tensors, renamed = load_file(file), {}
    for layer in (0, 2):
        parts = [tensors.pop(f"model.layers.{layer}.linear_attn.{part}_conv1d.weight") for part in "qkv"]
        renamed[f"model.layers.{layer}.linear_attn.conv1d.weight"] = torch.cat(parts)
        olds = (
            ("attention_layer_norm", "feedforward_layer_norm"),
            ("input_layernorm", "post_attention_layernorm"),
        )
        for first, now in zip(*olds, strict=True):
            prefix = f"model.layers.{layer}."
            found = [f"{prefix}{name}.weight" for name in (first, now) if f"{prefix}{name}.weight" in tensors]
            tensor = tensors.pop(found[0])
            renamed[f"{prefix}{first}.weight" if layer else f"{prefix}{now}.weight"] = tensor
    save_file(tensors | renamed, file)
    torch.testing.assert_close(forward(load(folder), PROMPT), expected, rtol=1e-4, atol=1e-4)


def test_convolutions_in_three_equal_parts_are_refused(tmp_path: Path) -> None:
    """As transformers 5.24 writes them, whatever they hold."""
    folder = write_tiny_model(tmp_path, FAMILY)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    names = [f"model.layers.0.linear_attn.{part}_conv1d.weight" for part in "qkv"]
    whole = torch.cat([tensors[name] for name in names])
    tensors |= dict(zip(names, map(torch.clone, whole.chunk(3)), strict=True))
    save_file(tensors, file)
    with pytest.raises(ModelLoadError, match=r"conv_v\.weight is \(84, 1, 4\), but the model needs \(192, 1"):
        load(folder)


def test_prompts_begin_with_a_kept_state(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, FAMILY)
    prompts = [[*SHARED, *range(10 + own, 14 + own)] for own in range(4)]
    expected = [transformers_greedy(folder, prompt, 6) for prompt in prompts]
    with make_tiny(folder, num_kvcache_blocks=60, max_num_batched_tokens=50) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [each["token_ids"] for each in outputs] == expected
        assert sorted(seq.num_cached_tokens for seq in llm.sequences) == [0, 41, 41, 41]


@pytest.mark.skipif(not INTERPRET, reason="kernels are compiled here; tests/gpu runs the engine over them")
def test_the_engine_with_triton_kernels(tmp_path: Path) -> None:
    kinds = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    folder = write_tiny_model(tmp_path, FAMILY, **kinds)
    expected = transformers_greedy(folder, PROMPT, 3)
    options = {"attention_backend": "triton", "kvcache_block_size": 16, "max_num_batched_tokens": 7}
    with make_tiny(folder, num_kvcache_blocks=9, **options) as llm:
        [output] = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert output["token_ids"] == expected


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_quantised_on_the_fly(tmp_path: Path, quantization: str) -> None:
    folder = write_tiny_model(tmp_path, FAMILY)
    with make_tiny(folder, quantization=quantization, num_kvcache_blocks=30) as llm:
        assert len(llm.generate([PROMPT], GREEDY, use_tqdm=False)[0]["token_ids"]) == 6


def test_the_roofline_counts_its_matrices(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, FAMILY)
    tensors = load_file(folder / "model.safetensors").items()
    matrices = sum(tensor.numel() for name, tensor in tensors if ".layers." in name and tensor.dim() == 2)
    assert Cost.of(load_model_config(folder), 4, 4).layer_params == matrices


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "names no full_attention layer"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types names 3 layers"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; it must be 'silu'"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads 5 must be 1 to 8 times"),
        ({"rope_parameters": 3}, "rope parameters must be an object, not 3"),
        ({"linear_allow_neg_eigval": 2}, "linear_allow_neg_eigval must be true or false, not 2"),
    ],
    ids=str,
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_tiny_model(tmp_path, FAMILY)
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ValueError, match=message):
        load_model_config(folder)
