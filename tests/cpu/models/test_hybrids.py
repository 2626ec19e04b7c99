"""Qwen3-Next and Qwen3.5: what files call their weights, what config.json may say, and kept states in use."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import inside
import pytest
import torch
from checked_llm import make_tiny
from fp8_models import dequantised, tensors_of
from safetensors.torch import load_file, save_file
from test_models import PROMPT, forward, load
from tiny_models import (
    edit_json,
    transformers_answers,
    transformers_logits,
    write_tiny_model,
)

from nanovllm import SamplingParams
from nanovllm.config import Config
from nanovllm.device import Device
from nanovllm.errors import ModelLoadError
from nanovllm.layers.stream import Group
from nanovllm.models.registry import load_model_config
from nanovllm.models.weights import weight_bytes
from nanovllm.states.spec import StateSpec, most_seqs, most_sequences, num_kept, num_rows, pool_bytes
from tools.write_fp8 import write_fp8

HYBRIDS = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SHARED = [3 + 7 * index % 83 for index in range(41)]
PROMPTS = [[*SHARED, *range(10 + own, 14 + own)] for own in range(6)]


@pytest.mark.parametrize("family", [*HYBRIDS, "lfm2", "lfm2_moe"])
def test_prompts_begin_with_a_kept_state(tmp_path: Path, family: str) -> None:
    """States are NaN at the start; prompts of one call, of another one, and a chat that goes on."""
    folder = write_tiny_model(tmp_path, family)
    with make_tiny(folder, num_kvcache_blocks=60, max_num_batched_tokens=50) as llm:
        found = [each["token_ids"] for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
        assert found == transformers_answers(folder, PROMPTS, 6, found)
        cached = sorted(seq.num_cached_tokens for seq in llm.sequences)
        assert cached == [0, 41, 41, 41, 41, 41]
        longer = [[*prompt, *tokens, 5] for prompt, tokens in zip(PROMPTS, found, strict=True)]
        found = [each["token_ids"] for each in llm.generate(longer, GREEDY, use_tqdm=False)]
        assert found == transformers_answers(folder, longer, 6, found)
        assert {seq.num_cached_tokens for seq in llm.sequences[6:]} == {45}


def test_a_preempted_sequence_begins_with_a_kept_state(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "qwen3_5")
    with make_tiny(folder, num_kvcache_blocks=20, max_num_seqs=4, max_model_len=96) as llm:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        found = [each["token_ids"] for each in llm.generate(PROMPTS[:4], params, use_tqdm=False)]
        assert found == transformers_answers(folder, PROMPTS[:4], 40, found)
        assert any(seq.num_preemptions for seq in llm.sequences)


@pytest.mark.parametrize("experts", [False, True])
def test_a_model_that_reads_images(tmp_path: Path, experts: bool) -> None:
    """Its decoder alone; the tensors of images and of speculation are left out."""
    family = "qwen3_5_moe" if experts else "qwen3_5"
    plain = write_tiny_model(tmp_path / "plain", family)
    config = json.loads((plain / "config.json").read_text())
    whole = tmp_path / "whole"
    whole.mkdir()
    kind = "Qwen3_5MoeForConditionalGeneration" if experts else "Qwen3_5ForConditionalGeneration"
    ties = config.pop("tie_word_embeddings")
    text = {"architectures": [kind], "text_config": config, "vision_config": {"depth": 2}}
    (whole / "config.json").write_text(json.dumps(text | {"tie_word_embeddings": ties}))
    tensors = {
        f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name: value
        for name, value in load_file(plain / "model.safetensors").items()
    }
    others = {f"{prefix}.weight": torch.ones(3) for prefix in ("model.visual.blocks.0.norm1", "mtp.fc")}
    save_file(tensors | others, whole / "model.safetensors")
    torch.testing.assert_close(forward(load(whole), PROMPT), forward(load(plain), PROMPT), rtol=0, atol=0)


def test_files_that_contradict_themselves_about_the_head(tmp_path: Path) -> None:
    """As transformers 5 writes them if only the part outside text_config says that the embedding is the
    head."""
    folder = write_tiny_model(tmp_path, "qwen3_5", tie_word_embeddings=True)
    expected = transformers_logits(folder, PROMPT)
    text = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(whole | {"text_config": text}))
    with pytest.raises(ModelLoadError, match=r"1 missing: lm_head\.weight \(hf_overrides=.*: True}"):
        load(folder)
    logits = forward(load(folder, overrides={"tie_word_embeddings": True}), PROMPT)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    """As other writers have them: gate and up of all experts in one tensor."""
    folder = write_tiny_model(tmp_path, "qwen3_5_moe")
    expected, file = transformers_logits(folder, PROMPT), folder / "model.safetensors"
    tensors = load_file(file)
    prefix = "model.layers.0.mlp.experts"
    if f"{prefix}.gate_up_proj" in tensors:  # this transformers writes one tensor: give each expert its own
        gate_up, down = tensors.pop(f"{prefix}.gate_up_proj"), tensors.pop(f"{prefix}.down_proj")
        for index in range(len(gate_up)):
            gate, up = gate_up[index].chunk(2)
            parts = {"gate_proj": gate, "up_proj": up, "down_proj": down[index]}
            tensors |= {f"{prefix}.{index}.{name}.weight": x.contiguous() for name, x in parts.items()}
    else:
        own = [
            torch.stack([tensors.pop(f"{prefix}.{index}.{name}.weight") for index in range(10)])
            for name in ("gate_proj", "up_proj", "down_proj")
        ]
        tensors[f"{prefix}.gate_up_proj"] = torch.cat(own[:2], dim=1)
        tensors[f"{prefix}.down_proj"] = own[2]
    save_file(tensors, file)
    torch.testing.assert_close(forward(load(folder), PROMPT), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", HYBRIDS)
def test_layers_by_an_interval(tmp_path: Path, family: str) -> None:
    folder = write_tiny_model(tmp_path, family, num_hidden_layers=4, layer_types=None)
    edit_json(folder / "config.json", remove=("layer_types",), full_attention_interval=4)
    config = load_model_config(folder)
    assert [spec.state is None for spec in config.attention] == [False, False, False, True]
    torch.testing.assert_close(
        forward(load(folder), PROMPT), transformers_logits(folder, PROMPT), rtol=1e-4, atol=1e-4
    )


def test_ropes_of_releases(tmp_path: Path) -> None:
    """With sections for images, which text does not need; a share of each head is rotated, by default too."""
    rope = {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5}
    sections = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    folder = write_tiny_model(tmp_path, "qwen3_5", rope_parameters=rope | sections)
    expected = transformers_logits(folder, PROMPT)
    torch.testing.assert_close(forward(load(folder), PROMPT), expected, rtol=1e-4, atol=1e-4)
    assert load_model_config(folder).spec(0).rope.rotary_dim(16) == 8  # type: ignore[union-attr]
    edit_json(folder / "config.json", remove=("rope_parameters",))
    assert load_model_config(folder).spec(0).rope.rotary_dim(16) == 4  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate False is not supported"),
        ({"text_config": 3}, "text_config must be an object, not 3"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; it must be 'silu'"),
        (
            {"linear_num_value_heads": 5},
            "linear_num_value_heads 5 must be 1 to 8 times linear_num_key_heads 2",
        ),
        ({"linear_key_head_dim": 24}, "linear_key_head_dim must be a multiple of 16 up to 256, not 24"),
        ({"linear_value_head_dim": 272}, "linear_value_head_dim must be a multiple of 16 up to 256, not 272"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be at least 2, not 1"),
        ({"layer_types": ["linear_attention"] * 4}, "names no full_attention layer"),
        (
            {"layer_types": ["mamba"] * 4},
            "layer_types ['mamba', 'mamba', 'mamba', 'mamba'] are not supported",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_tiny_model(tmp_path, "qwen3_5")
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ValueError, match=r"config\.json") as error:
        load_model_config(folder)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"deterministic": True, "max_num_batched_tokens": 63, "max_model_len": 60},
            "max_num_batched_tokens=63: with deterministic=True a model with states computes prompts in "
            "steps of 64 tokens",
        ),
        ({"tensor_parallel_size": 4}, "linear_num_value_heads 6 cannot be split over 4 ranks"),
    ],
)
def test_options_that_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_tiny(write_tiny_model(tmp_path, "qwen3_5"), **options)


def test_gates_of_files_in_float32(tmp_path: Path) -> None:
    """`A_log` takes the model's dtype, as in transformers."""
    folder = write_tiny_model(tmp_path, "qwen3_5", dtype="bfloat16")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.linear_attn.A_log"
    tensors[name] = tensors[name].float() + 1e-4
    save_file(tensors, folder / "model.safetensors")
    with make_tiny(folder, dtype="bfloat16") as llm:
        [output] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    assert len(output["token_ids"]) == 6


@pytest.mark.parametrize("options", [{"kv_cache_dtype": "fp8"}, {"tensor_parallel_size": 2}], ids=str)
def test_beside_other_options(tmp_path: Path, options: dict[str, Any]) -> None:
    """Two calls give one answer, and nearly that of transformers."""
    folder = write_tiny_model(tmp_path, "qwen3_5")
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    expected = transformers_logits(folder, PROMPTS[0]).log_softmax(-1)
    with make_tiny(folder, num_kvcache_blocks=60, **options) as llm:
        first, second = (llm.generate(PROMPTS, GREEDY, use_tqdm=False) for _ in range(2))
        assert [each["token_ids"] for each in first] == [each["token_ids"] for each in second]
        [output] = llm.generate(PROMPTS[:1], scored, use_tqdm=False)
    given = [
        each[token].logprob for each, token in zip(output.prompt_logprobs[1:], PROMPTS[0][1:], strict=True)
    ]
    own = expected[:-1].gather(1, torch.tensor(PROMPTS[0][1:])[:, None])[:, 0]
    assert (torch.tensor(given) - own).abs().mean() < (0.3 if "kv_cache_dtype" in options else 1e-4)


def test_the_memory_of_states(tmp_path: Path) -> None:
    """As the door's page computes it; fewer sequences run at once where the states of more take too much."""
    folder = write_tiny_model(tmp_path, "qwen3_5")
    spec = StateSpec(2, 6, 16, 32, 4)
    assert spec.row_bytes(4) == 4 * (6 * 16 * 32 + 3 * (2 * 2 * 16 + 6 * 32))
    with make_tiny(folder, max_num_seqs=5) as llm:
        layers = inside.model(llm).state_layers
        assert len(layers) == 3 and num_rows(5) == 5 + num_kept(5) == 21
        for layer in layers:
            assert layer.pool.nbytes + layer.conv_pool.nbytes == 21 * spec.row_bytes(4)
            assert layer.state_bytes(5) == 21 * spec.row_bytes(4)
    for rows in (17, 100, 1000):
        most = most_sequences(10, 10 * rows)
        assert num_rows(most) <= rows < num_rows(most + 2)
    assert most_sequences(2**40, 2**40) == most_sequences(1, 0) == 1, "one always runs"


@pytest.mark.parametrize("ranks", [1, 2])
def test_states_take_half_of_what_weights_leave(tmp_path: Path, ranks: int) -> None:
    """On a GPU, so that a small one still has a KV cache; without room for any, one sequence runs."""
    model = load_model_config(write_tiny_model(tmp_path, "qwen3_5"))
    config = Config("m", tensor_parallel_size=ranks, gpu_memory_utilization=0.5, dtype="float32")
    weights = weight_bytes(model, Group(0, ranks), torch.float32)
    row = 3 * StateSpec(2, 6, 16, 32, 4).row_bytes(4) // ranks
    for rows in (0, 17, 100):
        total = 2 * (weights + 2 * rows * row) + 1
        device = a_gpu(total)
        most = most_seqs(config, model, device)
        assert most == most_sequences(row, rows * row) == {0: 1, 17: 1, 100: 80}[rows]
        assert rows == 0 or pool_bytes(config, model, device) <= (total // 2 - weights) // 2
    assert most_seqs(config, model, a_gpu(weights)) == 1


def a_gpu(memory: int) -> Any:
    """What asks for a device's memory sees one with so many bytes."""
    return SimpleNamespace(is_cuda=True, memory=lambda: (0, memory), resolve_dtype=lambda *_: torch.float32)


def test_fewer_sequences_than_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The default is lowered without a word, a wish with a warning."""
    folder = write_tiny_model(tmp_path, "qwen3_5")
    monkeypatch.setattr("nanovllm.states.spec._CPU_BYTES", 30 * 3 * StateSpec(2, 6, 16, 32, 4).row_bytes(4))
    for asked, told in ((1024, False), (20, True), (14, False)):
        caplog.clear()
        with make_tiny(folder, max_num_seqs=asked) as llm:
            assert inside.scheduler(llm).max_num_seqs == 14
        assert ("max_num_seqs is 14, not 20" in caplog.text) == told


@pytest.mark.parametrize("scales", ["block", "channel", "tensor"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_files_in_fp8(tmp_path: Path, family: str, scales: str) -> None:
    """Scales follow the rows of queries, gates and key heads; gates of Gated DeltaNet stay as they are."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "hidden_size": 144}
    linear = {"linear_num_key_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    plain = write_tiny_model(tmp_path / "plain", family, **heads, **linear)
    folder = write_fp8(plain, tmp_path / "fp8", scales)
    meant, stored = dequantised(tensors_of(folder)), tensors_of(plain)
    assert meant.keys() == stored.keys()
    assert sum(not torch.equal(meant[name], stored[name]) for name in meant) > 10
    save_file({name: tensor.contiguous() for name, tensor in meant.items()}, plain / "model.safetensors")
    torch.testing.assert_close(
        forward(load(folder, on_cpu=True), PROMPT), forward(load(plain), PROMPT), rtol=1e-4, atol=1e-4
    )


def test_blocks_that_hold_several_heads(tmp_path: Path) -> None:
    """A block of 128 rows is of two heads, and of queries and gates."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "hidden_size": 144}
    linear = {"linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 128}
    plain = write_tiny_model(tmp_path / "plain", "qwen3_5", **heads, **linear, linear_value_head_dim=128)
    with pytest.raises(
        (ValueError, ModelLoadError), match=r"q_proj\S* its blocks hold rows of several heads"
    ):
        write_fp8(plain, tmp_path / "fp8", "block")


def test_what_doctor_counts(tmp_path: Path) -> None:
    """States of all sequences and kept rows, on each rank its share; nothing for a model without."""
    folder = write_tiny_model(tmp_path / "hybrid", "qwen3_5")
    model, device = load_model_config(folder), Device("cpu")
    options = Config("m", max_num_seqs=5, dtype="float32")
    assert pool_bytes(options, model, device) == 3 * num_rows(5) * StateSpec(2, 6, 16, 32, 4).row_bytes(4)
    halves = replace(options, tensor_parallel_size=2)
    assert pool_bytes(halves, model, device) == pool_bytes(options, model, device) // 2
    plain = load_model_config(write_tiny_model(tmp_path / "plain", "qwen3"))
    assert pool_bytes(options, plain, device) == 0


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_gates_are_not_quantised_on_the_fly(tmp_path: Path, quantization: str) -> None:
    """Decays are exponentials of them."""
    folder = write_tiny_model(tmp_path, "qwen3_5")
    with make_tiny(folder, quantization=quantization, num_kvcache_blocks=30) as llm:
        [first, *_] = inside.model(llm).state_layers
        assert type(first.gates_proj.method) is not type(first.in_proj.method)
        assert len(llm.generate([PROMPT], GREEDY, use_tqdm=False)[0]["token_ids"]) == 6
