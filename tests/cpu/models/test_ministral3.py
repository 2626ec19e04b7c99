"""Ministral 3 and the decoder of Mistral 3: factors of queries, names in files, FP8 as it is published."""

from __future__ import annotations

import json
from math import log
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
import transformers
from checked_llm import make_tiny
from safetensors.torch import load_file, save_file
from test_models import PROMPT, forward, load
from tiny_families import MORE_FAMILIES
from tiny_models import edit_json, transformers_greedy, transformers_logits, write_tiny_model

from nanovllm import SamplingParams
from nanovllm.families.ministral3 import ScaledAttention
from nanovllm.formats.fp8.loading import Stored, quantise_weight
from nanovllm.kernels.compat import INTERPRET
from nanovllm.models.registry import load_model_config

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SIZES: dict[str, Any] = {
    **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "head_dim": 12},
}
ROPE = MORE_FAMILIES["ministral3"][2]["rope_parameters"]


@pytest.mark.parametrize("kind", ["mistral", "ministral3"])
def test_the_decoder_of_a_model_that_reads_images(tmp_path: Path, kind: str) -> None:
    """By the names of the released files, which transformers writes too, and by those of its modules."""
    text = SIZES | {"model_type": kind, "sliding_window": None, "tie_word_embeddings": False}
    text |= {"rope_parameters": ROPE} if kind == "ministral3" else {"rope_theta": 1e4}
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "head_dim": 8, "image_size": 28, "patch_size": 14}
    config = transformers.Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = transformers.Mistral3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(forward(load(tmp_path), PROMPT), expected, atol=1e-3, rtol=1e-4)
    tensors = load_file(tmp_path / "model.safetensors")
    assert any("vision_tower" in name for name in tensors)
    renamed = {}
    for name, tensor in tensors.items():
        own = name.replace("language_model.model.", "model.language_model.").replace(
            "language_model.lm", "lm"
        )
        renamed[f"model.{own}" if own.startswith(("vision", "multi")) else own] = tensor
    assert renamed.keys() != tensors.keys()
    save_file(renamed, tmp_path / "model.safetensors")
    torch.testing.assert_close(forward(load(tmp_path), PROMPT), expected, atol=1e-3, rtol=1e-4)


def test_short_sequences_have_no_factors(tmp_path: Path) -> None:
    """Up to a period all are 1, and nothing is multiplied."""
    folder = write_tiny_model(tmp_path, "ministral3")
    for longest, scaled in ((7, False), (8, True)):
        with make_tiny(folder, max_model_len=longest, num_kvcache_blocks=9) as llm:
            layer = inside.model(llm).attention_layers[0]
            assert isinstance(layer, ScaledAttention)
            found = layer.factors(torch.tensor([0, 6, 7]))
            assert (found is not None) == scaled
            assert found is None or found.tolist() == pytest.approx([1, 1, 1 + 0.7 * log(2)])
            [output] = llm.generate(
                [PROMPT[:4]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
            )
            assert output["token_ids"] == transformers_greedy(folder, PROMPT[:4], 3)


@pytest.mark.parametrize("form", ["no factor", "null"])
def test_without_factors(tmp_path: Path, form: str) -> None:
    """0, as Devstral 2 123B states it, changes nothing; nor does null."""
    folder = write_tiny_model(tmp_path, "ministral3", rope_parameters=ROPE | {"llama_4_scaling_beta": 0.0})
    expected = transformers_logits(folder, PROMPT)
    if form == "null":
        edit_json(folder / "config.json", rope_parameters=ROPE | {"llama_4_scaling_beta": None})
    assert load_model_config(folder).layer is None
    torch.testing.assert_close(forward(load(folder), PROMPT), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not INTERPRET, reason="kernels are compiled here; tests/gpu runs the engine over them")
def test_the_engine_with_triton_kernels(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "ministral3", head_dim=16)
    prompts = [PROMPT, PROMPT[3:]]
    expected = [transformers_greedy(folder, prompt, 6) for prompt in prompts]
    options = {"attention_backend": "triton", "kvcache_block_size": 16, "max_num_batched_tokens": 7}
    with make_tiny(folder, num_kvcache_blocks=9, **options) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [each["token_ids"] for each in outputs] == expected


def test_fp8_as_it_is_published(tmp_path: Path) -> None:
    """Scales of whole tensors and of inputs, by their names in the released files."""
    folder = write_tiny_model(tmp_path, "ministral3", hidden_size=48)
    tensors, stored = load_file(folder / "model.safetensors"), {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            codes, scale = quantise_weight(tensor, Stored.TENSOR)
            module = name.removesuffix(".weight")
            tensors[name] = codes.float() * scale
            stored |= {name: codes, f"{module}.weight_scale_inv": scale.view(()).bfloat16().float()}
            stored[f"{module}.activation_scale"] = torch.tensor(0.1)
            tensors[name] = codes.float() * stored[f"{module}.weight_scale_inv"]
    save_file(tensors, folder / "model.safetensors")
    expected = forward(load(folder), PROMPT)
    wrapped = {f"language_model.{name}": tensor for name, tensor in (tensors | stored).items()}
    text = json.loads((folder / "config.json").read_text())
    quantised = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    quantised["modules_to_not_convert"] = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(whole | {"quantization_config": quantised}))
    save_file(wrapped | {"vision_tower.patch_conv.weight": torch.ones(2)}, folder / "model.safetensors")
    torch.testing.assert_close(forward(load(folder, on_cpu=True), PROMPT), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"llama_4_scaling_beta": "x"}, "llama_4_scaling_beta must be a number of at least 0, not 'x'"),
        ({"llama_4_scaling_beta": -1.0}, r"llama_4_scaling_beta must be a number of at least 0, not -1\.0"),
        (
            {"rope_type": "default", "original_max_position_embeddings": None},
            "llama_4_scaling_beta needs a whole number as original_max_position_embeddings, not None",
        ),
    ],
    ids=str,
)
def test_what_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    folder = write_tiny_model(tmp_path, "ministral3")
    edit_json(folder / "config.json", rope_parameters=ROPE | settings)
    with pytest.raises(ValueError, match=message):
        load_model_config(folder)


def test_another_decoder_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "ministral3")
    text = {"model_type": "mistral4"}
    edit_json(folder / "config.json", architectures=["Mistral3ForConditionalGeneration"], text_config=text)
    with pytest.raises(
        ValueError, match=r"model_type 'mistral4' is not supported in Mistral3For.*'ministral3'"
    ):
        load_model_config(folder)
