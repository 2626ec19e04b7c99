"""Gemma 4 with experts (26B-A4B): kernels, ranks, names of tensors in files, and the experts of tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
import transformers
from checked_llm import make_tiny
from engine_cases import make_prompts, tokens
from fp8_models import dequantised, tensors_of
from moe_cases import slots_of
from safetensors.torch import load_file, save_file
from tensors import randn
from test_models import PROMPT, forward, load
from tiny_models import (
    MORE_FAMILIES,
    edit_json,
    transformers_answers,
    transformers_greedy,
    transformers_logits,
    transformers_model,
    write_tiny_model,
)

from nanovllm import SamplingParams
from nanovllm.cpu import isa
from nanovllm.formats.fp8.method import Fp8Config
from nanovllm.kernels.compat import INTERPRET
from nanovllm.models.registry import load_model_config
from nanovllm.moe.kernels.routing import route_reference, route_triton
from nanovllm.report.roofline import Cost
from tools.write_fp8 import write_fp8

FAMILY = "gemma4-experts"
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
needs_kernels = pytest.mark.skipif(not isa.has_kernels(), reason="numba is not installed")
interpreted = pytest.mark.skipif(not INTERPRET, reason="kernels are compiled here; tests/gpu runs them")


@needs_kernels
def test_the_engine_with_cpu_kernels(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, FAMILY, head_dim=24, global_head_dim=40)
    options = {"max_num_batched_tokens": 7, "num_kvcache_blocks": 12}
    with make_tiny(folder, attention_backend="cpu", **options) as llm:
        found = [tokens(llm.generate(make_prompts(), GREEDY, use_tqdm=False)) for _ in range(2)]
    assert found == [transformers_answers(folder, make_prompts(), 10, found[0])] * 2


@interpreted
def test_the_engine_with_triton_kernels(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, FAMILY, head_dim=24, global_head_dim=32)
    prompts, params = make_prompts()[3:5], replace(GREEDY, max_tokens=4)
    expected = [transformers_greedy(folder, prompt, 4) for prompt in prompts]
    options = {"attention_backend": "triton", "kvcache_block_size": 16, "max_num_batched_tokens": 17}
    with make_tiny(folder, num_kvcache_blocks=9, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [each["token_ids"] for each in outputs] == expected


@interpreted
@pytest.mark.parametrize(("rows", "tile_rows"), [(3, None), (40, 16)])
def test_the_kernel_of_routing_with_factors(rows: int, tile_rows: int | None) -> None:
    """Of rows that are padding too; some factors are negative."""
    logits, scales, slots = randn(rows, 10), randn(10, seed=1), slots_of(rows, "cpu")
    plain, _ = route_reference(logits, 3, True, slots, tile_rows)
    for route in (route_triton, route_reference):
        chosen, _ = route(logits, 3, True, slots, tile_rows, scales)
        assert torch.equal(chosen.ids, plain.ids)
        expected = torch.where(plain.ids >= 0, plain.weights * scales[plain.ids.clamp(min=0).long()], 0.0)
        torch.testing.assert_close(chosen.weights, expected)
        assert (chosen.weights < 0).any()


def test_the_text_part_of_a_model_that_reads_images(tmp_path: Path) -> None:
    """By the names and settings of the released files; and experts that have tensors of their own."""
    text = MORE_FAMILIES[FAMILY][2] | {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    text |= {"pad_token_id": 0, "use_bidirectional_attention": "vision"}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16}
    config = transformers.Gemma4Config(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    model = transformers.Gemma4ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("router.scale", "per_expert_scale")):
                parameter.normal_(1.0, 0.3)
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(forward(load(tmp_path), PROMPT), expected, atol=1e-4, rtol=1e-4)
    split_experts(tmp_path, "model.language_model.layers.1.experts")
    torch.testing.assert_close(forward(load(tmp_path), PROMPT), expected, atol=1e-4, rtol=1e-4)


def split_experts(folder: Path, *prefixes: str) -> None:
    """Give each expert tensors of its own."""
    tensors = load_file(folder / "model.safetensors")
    for prefix in prefixes:
        whole = tensors.pop(f"{prefix}.gate_up_proj"), tensors.pop(f"{prefix}.down_proj")
        for index, (both, down) in enumerate(zip(*whole, strict=True)):
            gate, up = both.chunk(2)
            parts = {"gate_proj": gate, "up_proj": up, "down_proj": down}
            tensors |= {f"{prefix}.{index}.{name}.weight": x.contiguous() for name, x in parts.items()}
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("scales", ["channel", "block"])
def test_files_in_fp8(tmp_path: Path, scales: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dequantised on a CPU; with products in FP8 as on a GPU nearly the same."""
    sizes = {"hidden_size": 144, "intermediate_size": 208, "head_dim": 32, "global_head_dim": 32}
    plain = write_tiny_model(tmp_path / "plain", FAMILY, **sizes)
    split_experts(plain, *(f"model.layers.{layer}.experts" for layer in range(3)))
    folder = write_fp8(plain, tmp_path / "fp8", scales)
    tensors = tensors_of(folder)
    kinds = {
        name: tensors[f"model.layers.1.{name}.weight"].dtype for name in ("router.proj", "experts.3.up_proj")
    }
    assert kinds == {"router.proj": torch.float32, "experts.3.up_proj": torch.float8_e4m3fn}
    meant = dequantised(tensors) | {name: tensor for name, tensor in tensors.items() if "router." in name}
    save_file({name: tensor.contiguous() for name, tensor in meant.items()}, plain / "model.safetensors")
    expected = forward(load(plain), PROMPT)
    torch.testing.assert_close(forward(load(folder, on_cpu=True), PROMPT), expected, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(Fp8Config, "on", lambda quant, _: replace(quant, products=True))
    multiplied = forward(load(folder, on_cpu=True), PROMPT)
    assert 0 < (multiplied.log_softmax(-1) - expected.log_softmax(-1)).abs().mean() < 0.4


def test_the_experts_of_tokens(tmp_path: Path) -> None:
    """`return_routed_experts`: of each token, as transformers' routers choose them."""
    folder = write_tiny_model(tmp_path, FAMILY)
    with make_tiny(
        folder, return_routed_experts=True, enable_prefix_caching=False, num_kvcache_blocks=40
    ) as llm:
        [output] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    ids = torch.tensor([[*PROMPT, *output["token_ids"][:-1]]])
    with torch.inference_mode():
        routed = transformers_model(folder)(ids, output_router_logits=True).router_logits
    expected = torch.stack([each.topk(3, dim=-1).indices.view(-1, 3) for each in routed], 1)
    assert torch.equal(torch.from_numpy(output.outputs[0].routed_experts).long(), expected)


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_the_router_is_not_quantised_on_the_fly(tmp_path: Path, quantization: str) -> None:
    folder = write_tiny_model(tmp_path, FAMILY)
    with make_tiny(folder, quantization=quantization, num_kvcache_blocks=30) as llm:
        layer = inside.model(llm).model.layers[0]
        assert layer.router.proj.weight.dtype == torch.float32
        assert type(layer.router.proj.method) is not type(layer.mlp.gate_up_proj.method)
        scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        [output] = llm.generate([PROMPT], scored, use_tqdm=False)
    rows = transformers_logits(folder, PROMPT).log_softmax(-1)
    given = [each[token].logprob for each, token in zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True)]
    own = rows[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    assert (torch.tensor(given) - own).abs().mean() < 0.4


def test_new_weights(tmp_path: Path) -> None:
    first, second = (write_tiny_model(tmp_path / str(seed), FAMILY, seed=seed) for seed in (0, 5))
    with make_tiny(first, num_kvcache_blocks=20) as llm:
        for folder in (first, second):
            if folder == second:
                llm.update_weights(transformers_model(second).state_dict())
            for _ in range(2):
                [output] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
                assert output["token_ids"] == transformers_greedy(folder, PROMPT, 10)
                llm.sleep()
                llm.wake_up()


def test_prefill_in_two_halves(tmp_path: Path) -> None:
    """Two ranks split a step of 2,048 tokens or more; both sum the MLP's and the experts' parts."""
    folder = write_tiny_model(tmp_path, FAMILY)
    prompts = [[2 + (7 * row + 3 * place) % 90 for place in range(50 + row)] for row in range(40)]
    answers = []
    for ranks in (1, 2):
        options = {"tensor_parallel_size": ranks, "max_num_batched_tokens": 2200, "max_num_seqs": 40}
        with make_tiny(folder, num_kvcache_blocks=600, max_model_len=128, **options) as llm:
            outputs = llm.generate(prompts, replace(GREEDY, max_tokens=3), use_tqdm=False)
            assert max(len(batch.token_ids) for batch in llm.batches) >= 2048
            answers.append([each["token_ids"] for each in outputs])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("family", ["gemma4", FAMILY])
def test_the_roofline_counts_its_matrices(tmp_path: Path, family: str) -> None:
    """Those of the files: the experts of a token, the MLP beside them, and values that are keys but once."""
    folder = write_tiny_model(tmp_path, family)
    cost = Cost.of(load_model_config(folder), 4, 4)
    expected = 0
    for name, tensor in load_file(folder / "model.safetensors").items():
        if ".layers." in name and tensor.dim() == 2:
            expected += tensor.numel()
        elif ".layers." in name and tensor.dim() == 3:
            expected += tensor.numel() // 10 * 3
    assert cost.layer_params == expected
    assert cost.expert_params == (0 if family == "gemma4" else 3 * 3 * 32 * 24)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k_experts": None}, "top_k_experts must be a positive integer, not None"),
        ({"top_k_experts": 11}, "num_experts_per_tok 11 is more than the 10 experts"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size must be a positive integer, not 0"),
        ({"num_experts": None}, "num_experts must be a positive integer, not None"),
        ({"num_experts": 5000}, "5000 experts are more than 4096"),
    ],
    ids=str,
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_tiny_model(tmp_path, FAMILY)
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ValueError, match=message):
        load_model_config(folder)
