"""Muse Glimmer: its embedding's norm, ropes, names in files and defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from checked_llm import make_tiny
from safetensors.torch import load_file, save_file
from test_models import PROMPT, forward, load
from tiny_models import (
    edit_json,
    transformers_greedy,
    transformers_logits,
    transformers_model,
    write_tiny_model,
)

from nanovllm import SamplingParams
from nanovllm.kernels.compat import INTERPRET
from nanovllm.models.registry import load_model_config
from nanovllm.report.roofline import Cost

FAMILY = "muse_glimmer"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def test_its_text_part_alone(tmp_path: Path) -> None:
    """Tensors of images are left out; a file may have the decoder's alone, by shorter names."""
    folder = write_tiny_model(tmp_path, FAMILY)
    expected, file = transformers_logits(folder, PROMPT), folder / "model.safetensors"
    tensors = load_file(file)
    others = {
        name.split(".")[1] for name in tensors if "language_model" not in name and "lm_head" not in name
    }
    assert others == {"vision_tower", "vision_adapter", "vision_projection"}
    own = {
        name.replace("model.language_model.", "model."): tensor
        for name, tensor in tensors.items()
        if not name.startswith(tuple(f"model.{other}" for other in others))
    }
    save_file(own, file)
    torch.testing.assert_close(forward(load(folder), PROMPT), expected, rtol=1e-4, atol=1e-4)
    matrices = sum(tensor.numel() for name, tensor in own.items() if ".layers." in name and tensor.dim() == 2)
    assert Cost.of(load_model_config(folder), 4, 4).layer_params == matrices


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_embedding_that_is_the_head_too(tmp_path: Path, ranks: int) -> None:
    """The head has no norm."""
    folder = write_tiny_model(tmp_path, FAMILY, tie_word_embeddings=True)
    expected = transformers_greedy(folder, PROMPT, 6)
    with make_tiny(folder, num_kvcache_blocks=30, tensor_parallel_size=ranks) as llm:
        assert llm.generate([PROMPT], GREEDY, use_tqdm=False)[0]["token_ids"] == expected


def test_the_embedding_in_bfloat16(tmp_path: Path) -> None:
    """It is rounded once, as transformers rounds what it looks up."""
    folder = write_tiny_model(tmp_path, FAMILY, dtype="bfloat16")
    stored = load_file(folder / "model.safetensors")["model.language_model.embed_tokens.weight"].double()
    expected = stored / (stored.square().mean(1, keepdim=True) + 1e-2).sqrt()
    with make_tiny(folder, dtype="bfloat16") as llm:
        found = inside.model(llm).model.embed_tokens(torch.arange(97))
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=0)
    assert (found.float() == expected.to(torch.bfloat16).float()).float().mean() > 0.99


def test_new_weights(tmp_path: Path) -> None:
    first, second = (write_tiny_model(tmp_path / str(seed), FAMILY, seed=seed) for seed in (0, 5))
    with make_tiny(first, num_kvcache_blocks=20) as llm:
        assert llm.generate([PROMPT], GREEDY, use_tqdm=False)[0]["token_ids"] == transformers_greedy(
            first, PROMPT, 6
        )
        llm.update_weights(transformers_model(second).state_dict())
        after = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0]["token_ids"]
    assert after == transformers_greedy(second, PROMPT, 6)


def test_which_layers_have_a_rope(tmp_path: Path) -> None:
    """Every fourth from the last one has none and no window, unless config.json says otherwise."""
    folder = write_tiny_model(tmp_path, FAMILY, layer_rope_theta=[300.0, 0, 0, 300.0, 300.0])
    expected = transformers_logits(folder, PROMPT)
    torch.testing.assert_close(forward(load(folder), PROMPT), expected, rtol=1e-4, atol=1e-4)
    specs = load_model_config(folder).attention
    assert [spec.rope is not None for spec in specs] == [True, False, False, True, True]
    assert [spec.window for spec in specs] == [None, 6, 6, 6, None]
    plain = load_model_config(write_tiny_model(tmp_path / "plain", FAMILY))
    assert [spec.rope is not None for spec in plain.attention] == [False, True, True, True, False]


@pytest.mark.skipif(not INTERPRET, reason="kernels are compiled here; tests/gpu runs the engine over them")
def test_the_engine_with_triton_kernels(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, FAMILY, head_dim=16)
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layer_rope_theta": [300.0] * 4},
            r"layer_rope_theta must be 0 or rope_theta, 300\.0, for each of 5",
        ),
        ({"layer_rope_theta": [300.0, 0, 0, 0, 10.0]}, "layer_rope_theta must be 0 or rope_theta"),
        ({"qk_scale_factor": 0}, "qk_scale_factor must be a positive number, not 0"),
        ({"output_multiplier": "x"}, "output_multiplier must be a positive number, not 'x'"),
        ({"post_norm_eps": 2}, "post_norm_eps must be a number between 0 and 1, not 2"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers"),
    ],
    ids=str,
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_tiny_model(tmp_path, FAMILY)
    edit_json(folder / "config.json", text_config=_text(folder) | changes)
    with pytest.raises(ValueError, match=message):
        load_model_config(folder)


def _text(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["text_config"]
    return found
