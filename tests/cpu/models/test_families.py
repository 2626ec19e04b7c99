"""The families whose layers differ: the logits and tokens of transformers from the same files, in float32."""

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
from op_gate import Setting, write_config
from test_models import PROMPT, check_against_transformers, forward, load
from tiny_models import (
    FAMILIES,
    MOE_FAMILIES,
    MORE_FAMILIES,
    edit_json,
    transformers_answers,
    transformers_greedy,
    transformers_logits,
    transformers_model,
    write_tiny_model,
)

from nanovllm import SamplingParams
from nanovllm.kernels.compat import INTERPRET
from nanovllm.models.registry import get_family, load_model_config, supported_architectures

# Cells of the matrix: chunks of prompts, few blocks, no prefix cache, two ranks, blocks of other sizes.
CELLS: dict[str, dict[str, Any]] = {
    "tight": {"max_num_batched_tokens": 7, "num_kvcache_blocks": 7},
    "whole": {"num_kvcache_blocks": 100},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 1},
    "in step": {"async_scheduling": False, "kvcache_block_size": 3, "max_num_batched_tokens": 11},
    "two ranks": {"tensor_parallel_size": 2, "max_num_batched_tokens": 9, "num_kvcache_blocks": 9},
}
TIGHT = {"qwen2-window": 9, "qwen3-window": 9}  # blocks of the cell "tight" where 7 hold no sequence
# CI runs one cell for each family, and each cell for some family.
FIRST = {family: [*CELLS][index % len(CELLS)] for index, family in enumerate(MORE_FAMILIES)}


def params_of_matrix() -> list[Any]:
    return [
        pytest.param(family, cell, marks=() if FIRST[family] == cell else pytest.mark.full)
        for family in MORE_FAMILIES
        for cell in CELLS
    ]


@pytest.mark.parametrize(("family", "cell"), params_of_matrix())
def test_the_engine_gives_transformers_tokens(tmp_path: Path, family: str, cell: str) -> None:
    """Twice, so that the second pass hits the prefix cache; unwritten cells of the cache are NaN."""
    extra = {"num_attention_heads": 6, "hidden_size": 36} if cell == "two ranks" and family == "olmo2" else {}
    folder = write_tiny_model(tmp_path, family, **extra)
    prompts = make_prompts()
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    # Phi-3 starts with the factors for long sequences, which transformers takes only for those.
    lengths = [len(prompt) for prompt in prompts]
    kept = [prompt for prompt in prompts if family != "phi3" or len(prompt) > 8]
    assert max(lengths) == 24
    options = CELLS[cell] | ({"num_kvcache_blocks": TIGHT.get(family, 7)} if cell == "tight" else {})
    with make_tiny(folder, **options) as llm:
        found = tokens(llm.generate(kept, params, use_tqdm=False))
        assert found == transformers_answers(folder, kept, 14, found)
        again = kept if cell != "no prefix cache" else kept[-2:]  # a token a step, all of it as before
        assert tokens(llm.generate(again, params, use_tqdm=False)) == found[-len(again) :]
        if cell == "tight" and family != "phi3":  # whose window of 7 lets few blocks serve all
            assert any(seq.num_preemptions for seq in llm.sequences)
        if cell == "whole":
            assert any(seq.num_cached_tokens for seq in llm.sequences)


@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_families(tmp_path: Path, family: str) -> None:
    check_against_transformers(write_tiny_model(tmp_path, family))


@pytest.mark.parametrize("family", [pytest.param(each, marks=pytest.mark.full) for each in MORE_FAMILIES])
def test_families_of_other_sizes(tmp_path: Path, family: str) -> None:
    """One KV head where nothing else says so, an odd vocabulary, and a width that is no multiple of 16."""
    sizes = {"intermediate_size": 44, "num_key_value_heads": 1, "vocab_size": 101}
    sizes |= {"shared_intermediate_size": 44} if family == "granite4" else {}
    sizes |= {"vocab_size_per_layer_input": 101} if family == "gemma4-small" else {}
    check_against_transformers(write_tiny_model(tmp_path, family, **sizes))


ROPE = {"rope_type": "default", "rope_theta": 500.0}
# Settings of real checkpoints, each with the windows, and whether each layer has a rotary embedding.
OTHER_FORMS: dict[str, tuple[str, dict[str, Any], list[int | None], list[bool]]] = {
    "exaone4 without windows": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
        [None] * 3,
        [True] * 3,
    ),
    "smollm3 as by default": (
        "smollm3",
        {"no_rope_layers": None, "num_hidden_layers": 5, "use_sliding_window": False, "sliding_window": None},
        [None] * 5,
        [True, True, True, False, True],
    ),
    "phi3 of short texts": (
        "phi3",
        {"sliding_window": None, "rope_parameters": ROPE, "original_max_position_embeddings": 512},
        [None] * 2,
        [True] * 2,
    ),
    "phi4": (
        "phi3",
        {
            **{"sliding_window": None, "original_max_position_embeddings": 512},
            "rope_parameters": ROPE | {"partial_rotary_factor": 0.75},
        },
        [None] * 2,
        [True] * 2,
    ),
    "granite4 with null": ("granite4", {"position_embedding_type": None}, [None] * 2, [False] * 2),
    "granite4 with nope": ("granite4", {"position_embedding_type": "nope"}, [None] * 2, [False] * 2),
}


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_other_forms(tmp_path: Path, form: str) -> None:
    family, settings, windows, rotated = OTHER_FORMS[form]
    folder = write_tiny_model(tmp_path, family, **settings)
    edit_json(folder / "config.json", remove=("no_rope_layers",))  # transformers has written its default
    config = load_model_config(folder)
    specs = [config.spec(layer) for layer in range(config.num_layers)]
    assert [spec.window for spec in specs] == windows
    assert [spec.rope is not None for spec in specs] == rotated
    if family == "phi3":
        assert specs[0].rope.rope_type == "default"
        assert specs[0].rope.rotary_share == (0.75 if form == "phi4" else 1.0)
    check_against_transformers(folder)


@pytest.mark.parametrize(
    ("family", "settings", "windows"),
    [
        ("qwen3_moe", {"use_sliding_window": True}, [6, 6, 6, 6]),
        ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 3}, [6, None, 6, None]),
        ("mixtral", {}, [6, 6, 6, 6]),
    ],
    ids=MOE_FAMILIES,
)
def test_experts_behind_windows(
    tmp_path: Path, family: str, settings: dict[str, Any], windows: list[int | None]
) -> None:
    folder = write_tiny_model(tmp_path, family, num_hidden_layers=4, sliding_window=6, **settings)
    config = load_model_config(folder)
    assert [config.spec(layer).window for layer in range(4)] == windows
    check_against_transformers(folder)


def test_every_registered_architecture_is_tested() -> None:
    tested = {each[1].__name__ for each in (*FAMILIES.values(), *MORE_FAMILIES.values())}
    kinds = ("Gemma3", "Gemma4", "Gemma4Unified", "Qwen3_5", "Qwen3_5Moe")
    with_images = {f"{kind}ForConditionalGeneration" for kind in kinds}
    with_images.add("Mistral3ForConditionalGeneration")
    assert tested | with_images == set(supported_architectures())


@pytest.mark.parametrize("family", [each for each in MORE_FAMILIES if each != "granite4"])
def test_absent_keys_take_the_defaults_of_transformers(family: str) -> None:
    config_class, model_class, _ = MORE_FAMILIES[family]
    reader = get_family(model_class.__name__)
    absent = reader.model_config("X", {})
    stated = reader.model_config("X", config_class().to_dict())
    specs = [[config.spec(layer) for layer in range(config.num_layers)] for config in (absent, stated)]
    assert specs[0] == specs[1]
    assert replace(absent, attention=stated.attention) == stated


@pytest.mark.skipif(not INTERPRET, reason="kernels are compiled here; tests/gpu runs the engine over them")
@pytest.mark.parametrize(
    "family", ["gemma2", "gemma3", "gpt_oss", pytest.param("glm4", marks=pytest.mark.full)]
)
def test_the_engine_with_triton_kernels(tmp_path: Path, family: str) -> None:
    """In Triton's interpreter, with a window shorter than a block. `test_engine.py` has shared prefixes."""
    folder = write_tiny_model(tmp_path, family, head_dim=16)
    prompts, params = make_prompts()[3:7], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    expected = [transformers_greedy(folder, prompt, 5) for prompt in prompts]
    options = {"attention_backend": "triton", "kvcache_block_size": 16, "max_num_batched_tokens": 17}
    with make_tiny(folder, num_kvcache_blocks=9, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [each["token_ids"] for each in outputs] == expected


@pytest.mark.parametrize("family", ["gemma2", "granite"])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_logprobs_and_scores_are_of_final_logits(tmp_path: Path, family: str, ranks: int) -> None:
    """After softcap and multiplier, for drawn tokens, prompt tokens and scores."""
    folder = write_tiny_model(tmp_path, family)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3, prompt_logprobs=1)
    with make_tiny(folder, tensor_parallel_size=ranks, num_kvcache_blocks=40) as llm:
        [output] = llm.generate([PROMPT], params, use_tqdm=False)
        [score] = llm.score_pairs([(PROMPT[:6], PROMPT[6:])], use_tqdm=False)
    [answer] = output.outputs
    ids = [*PROMPT, *answer.token_ids]
    wanted = torch.log_softmax(transformers_logits(folder, ids), -1)[torch.arange(len(ids) - 1), ids[1:]]
    drawn, stated = answer.logprobs, output.prompt_logprobs[1:]
    drawn = [each[token].logprob for each, token in zip(drawn, answer.token_ids, strict=True)]
    prompt = [each[token].logprob for each, token in zip(stated, PROMPT[1:], strict=True)]
    torch.testing.assert_close(torch.tensor(prompt + drawn), wanted, atol=1e-4, rtol=1e-4)
    assert score.logprobs == pytest.approx(wanted[5 : len(PROMPT) - 1].tolist(), abs=1e-4)


def test_the_text_part_of_a_gemma_that_reads_images(tmp_path: Path) -> None:
    text = MORE_FAMILIES["gemma3"][2] | {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision | {"image_size": 28}, mm_tokens_per_image=4
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(forward(load(tmp_path), PROMPT), expected, atol=1e-4, rtol=1e-4)
    names = [name for name, _ in model.state_dict().items()]
    assert any("vision_tower" in name for name in names)


def test_new_weights_of_packed_projections_and_norms(tmp_path: Path) -> None:
    """The tensors of an update have the names of the files."""
    for family in ("phi3", "gemma3"):
        first, second = (write_tiny_model(tmp_path / f"{family}{seed}", family, seed=seed) for seed in (0, 5))
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        with make_tiny(first, num_kvcache_blocks=20) as llm:
            before = llm.generate([PROMPT], params, use_tqdm=False)[0]["token_ids"]
            assert before == transformers_greedy(first, PROMPT, 6)
            llm.update_weights(transformers_model(second).state_dict())
            after = llm.generate([PROMPT], params, use_tqdm=False)[0]["token_ids"]
        assert after == transformers_greedy(second, PROMPT, 6) != before


def test_longrope_follows_the_longest_sequence(tmp_path: Path) -> None:
    """An engine whose sequences all fit the training length takes the factors for them."""
    folder = write_tiny_model(tmp_path, "phi3", original_max_position_embeddings=20)
    for length in (20, 60):
        prompt = [*PROMPT, *range(2, 30)][: 11 if length == 20 else 30]
        expected = transformers_logits(folder, prompt)
        torch.testing.assert_close(forward(load(folder, length), prompt), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive number, not 0"),
        (
            "gemma2",
            {"layer_types": ["full_attention"]},
            "layer_types names 1 layers",
        ),
        (
            "gemma2",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention True is not supported",
        ),
        ("granite", {"residual_multiplier": "x"}, "residual_multiplier must be a positive number, not 'x'"),
        (
            "phi3",
            {"partial_rotary_factor": 2, "rope_parameters": None},
            "partial_rotary_factor must be above 0",
        ),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers must have 0 or 1 for each layer"),
        (
            "exaone4",
            {"layer_types": None, "sliding_window_pattern": "LLLG"},
            "must be a positive integer, or",
        ),
        ("granite4", {"num_local_experts": 8}, r"num_experts \(or num_local_experts\) 8 is not supported"),
        ("granite4", {"layer_types": ["mamba", "attention"]}, r"layer_types \['mamba'\] are not supported"),
        ("granite4", {"layer_types": None}, "layer_types must be a list"),
        ("gpt_oss", {"swiglu_limit": 5.0}, r"swiglu_limit 5\.0 is not supported; supported: 7\.0"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, r"swiglu_alpha 1\.0 is not supported; supported: 1\.702"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: 'silu'"),
        ("gpt_oss", {"num_experts_per_tok": 11}, "num_experts_per_tok 11 is more than the 10 experts"),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}},
            "'gptq' is not supported in GptOssForCausalLM, whose experts have biases",
        ),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv 8.0 is not supported"),
        ("olmo3", {"layer_types": ["full_attention"] * 2}, "layer_types names 2 layers"),
        (
            "olmo3",
            {"rope_parameters": {"full_attention": {"rope_type": "fast"}}},
            "rope type 'fast' is not supported",
        ),
        ("glm", {"attention_bias": "no"}, "attention_bias must be true or false, not 'no'"),
        ("glm4", {"partial_rotary_factor": 1.5, "rope_parameters": None}, "must be above 0, at most 1"),
        ("ernie", {"use_bias": 1}, "use_bias must be true or false, not 1"),
        ("ernie", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5 is not supported"),
    ],
)
def test_variants_are_refused_by_name(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    folder = write_tiny_model(tmp_path, family)
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ValueError, match=message):
        load_model_config(folder)


def test_the_documents_add_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example runs as it stands, with another path and random weights."""
    inside.keep_families(monkeypatch)
    text = (Path(__file__).parents[3] / "docs/options.md").read_text()
    example = text.partition("## Models")[2].partition("```python\n")[2].partition("```")[0]
    folder = write_config(
        tmp_path, Setting("llama", {"architectures": ["MyForCausalLM"], "sliding_window": 5})
    )
    options = "load_format='dummy', device='cpu', skip_tokenizer_init=True, num_kvcache_blocks=9"
    names: dict[str, Any] = {}
    exec(example.replace('"path/to/my-model"', f"{str(folder)!r}, {options}"), names)
    with names["llm"] as llm:
        specs = [layer.spec for layer in inside.model(llm).attention_layers]
        assert [(spec.window, spec.softcap) for spec in specs] == [(5, 50.0), (None, None)]
        assert len(llm.generate([PROMPT], SamplingParams(max_tokens=3), use_tqdm=False)[0]["token_ids"]) <= 3
