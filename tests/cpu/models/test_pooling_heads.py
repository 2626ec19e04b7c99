"""Models with a head that classifies: their values beside those of transformers, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checked_llm import CheckedLLM, make_tiny
from fp8_models import dequantised, tensors_of
from head_models import (
    NEAR,
    PLAIN,
    PROMPTS,
    SEQUENCE,
    TOKENS,
    hidden_states,
    plain_values,
    same,
    transformers_values,
    write_head_model,
    write_reward_model,
)
from safetensors.torch import save_file
from tiny_models import edit_json

from nanovllm import (
    ClassificationRequestOutput,
    ModelLoadError,
    PoolingParams,
    PoolingRequestOutput,
)
from nanovllm.pooling_heads.head import read_head
from tools.write_fp8 import write_fp8

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2ForSequenceClassification": ("qwen2", {}),
    "LlamaForSequenceClassification": ("llama", {}),
    "MistralForSequenceClassification": ("mistral-window", {}),
    "Ministral3ForSequenceClassification": ("ministral3", {}),
    "Phi3ForSequenceClassification": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "Gemma2ForSequenceClassification": ("gemma2", {}),
    "Gemma3TextForSequenceClassification": ("gemma3", {}),
    "Olmo3ForSequenceClassification": ("olmo3", {}),
    "Qwen3MoeForSequenceClassification": ("qwen3_moe", {}),
    "MixtralForTokenClassification": ("mixtral", {}),
    "GptOssForSequenceClassification": ("gpt_oss", {}),
    "Qwen3NextForSequenceClassification": ("qwen3_next", {}),
    "SmolLM3ForTokenClassification": ("smollm3", {}),
    "Glm4ForSequenceClassification": ("glm4", {}),
    "Exaone4ForTokenClassification": ("exaone4", {}),
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_families_give_the_values_of_transformers(tmp_path: Path, architecture: str) -> None:
    family, settings = FAMILIES[architecture]
    folder = write_head_model(tmp_path, family, architecture, decoder=settings)
    wanted = transformers_values(folder, PROMPTS)
    last = [each.reshape(-1, 3)[-1] for each in wanted]
    assert (last[0] - last[1]).abs().max() > 0.01
    with make_tiny(folder) as llm:
        assert same(plain_values(llm, PROMPTS), wanted)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("heads")
    names = {SEQUENCE: 5, TOKENS: 3}
    return {
        name: write_head_model(root / name, "qwen3", name, labels=labels) for name, labels in names.items()
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunked": {"max_num_batched_tokens": 7},
    "tight": {"num_kvcache_blocks": 4, "max_num_seqs": 2},
    "deterministic": {"deterministic": True, "kvcache_block_size": 16},
    "no ahead": {"async_scheduling": False, "enable_prefix_caching": False},
    "two ranks": {"tensor_parallel_size": 2},
}


@pytest.fixture(params=VARIANTS)
def engines(
    request: pytest.FixtureRequest, folders: dict[str, Path]
) -> Iterator[Callable[[str], CheckedLLM]]:
    made: list[CheckedLLM] = []

    def make(architecture: str) -> CheckedLLM:
        made.append(make_tiny(folders[architecture], **VARIANTS[request.param]))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


@pytest.mark.parametrize("architecture", [SEQUENCE, TOKENS])
def test_engines_give_the_values_of_transformers(
    folders: dict[str, Path], engines: Callable[[str], CheckedLLM], architecture: str
) -> None:
    wanted = transformers_values(folders[architecture], PROMPTS)
    hidden = hidden_states(folders[architecture], PROMPTS)
    llm = engines(architecture)
    for _ in range(2):  # also if the prefix cache has the prompts
        assert same(plain_values(llm, PROMPTS), wanted)
    rows = llm.encode(PROMPTS, PLAIN, use_tqdm=False, pooling_task="token_embed")
    assert same([each.outputs.data for each in rows], hidden)
    assert same(plain_values(llm, PROMPTS[:2]), wanted[:2])
    if architecture == SEQUENCE:
        cached = [each.num_cached_tokens for each in llm.classify(PROMPTS, use_tqdm=False)]
        assert any(cached) == llm.config.enable_prefix_caching


def test_each_task_has_its_output(folders: dict[str, Path]) -> None:
    [wanted], [hidden] = (
        each(folders[SEQUENCE], PROMPTS[:1]) for each in (transformers_values, hidden_states)
    )
    with make_tiny(folders[SEQUENCE]) as llm:

        def data(task: str, params: PoolingParams | None = None) -> torch.Tensor:
            [output] = llm.encode(PROMPTS[0], params, use_tqdm=False, pooling_task=task)
            assert isinstance(output, PoolingRequestOutput) and output.prompt_token_ids == PROMPTS[0]
            assert output.outputs.data.dtype == torch.float32 and output.finished
            return output.outputs.data

        assert torch.allclose(data("classify"), wanted.softmax(-1), **NEAR)
        assert torch.allclose(data("classify", PLAIN), wanted, **NEAR)
        assert torch.allclose(data("token_classify", PLAIN)[-1], wanted, **NEAR)
        assert torch.allclose(data("embed"), hidden[-1] / hidden[-1].norm(), **NEAR)
        assert torch.allclose(data("token_embed"), hidden / hidden.norm(dim=-1, keepdim=True), **NEAR)
        part = data("token_embed", PoolingParams(dimensions=7))
        assert torch.allclose(part, torch.nn.functional.normalize(hidden[:, :7]), **NEAR)
        [output] = llm.classify(PROMPTS[0], use_tqdm=False)
        assert isinstance(output, ClassificationRequestOutput) and output.outputs.num_classes == 5
        assert output.outputs.probs == pytest.approx(wanted.softmax(-1).tolist(), abs=1e-4)
        assert output.outputs.label == f"label {int(wanted.argmax())}"
        hf_config = llm.llm_engine.vllm_config.model_config.hf_config
        assert hf_config.id2label[2] == "label 2" and hf_config.num_labels == 5
        [reward] = llm.reward(PROMPTS[0], use_tqdm=False)
        assert torch.allclose(reward.outputs.data, wanted, **NEAR)
        many = llm.classify(PROMPTS, use_tqdm=False, pooling_params=[PLAIN, *[PoolingParams()] * 3])
        assert many[0].outputs.probs == pytest.approx(wanted.tolist(), abs=1e-4)
        assert all(sum(each.outputs.probs) == pytest.approx(1, abs=1e-5) for each in many[1:])


ACTIVATIONS: dict[str, tuple[int, dict[str, Any], str]] = {
    "several labels": (3, {}, "softmax"),
    "one label": (1, {}, "sigmoid"),
    "single": (3, {"problem_type": "single_label_classification"}, "softmax"),
    "single, one label": (1, {"problem_type": "single_label_classification"}, "sigmoid"),
    "multi": (3, {"problem_type": "multi_label_classification"}, "sigmoid"),
    "regression": (1, {"problem_type": "regression"}, "none"),
    "identity": (1, {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "none"),
    "older": (1, {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "none"),
    "sigmoid": (
        1,
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}},
        "sigmoid",
    ),
}


@pytest.mark.parametrize("case", ACTIVATIONS)
def test_config_json_chooses_the_activation(tmp_path: Path, case: str) -> None:
    labels, settings, activation = ACTIVATIONS[case]
    folder = write_head_model(tmp_path, "qwen3", SEQUENCE, labels=labels)
    wanted = transformers_values(folder, PROMPTS)
    edit_json(folder / "config.json", **settings)
    if activation != "none":
        wanted = [each.softmax(-1) if activation == "softmax" else each.sigmoid() for each in wanted]
    with make_tiny(folder) as llm:
        outputs = llm.classify(PROMPTS, use_tqdm=False)
        assert same([torch.tensor(each.outputs.probs) for each in outputs], wanted)


def test_the_last_token_that_is_no_padding_is_judged(tmp_path: Path) -> None:
    """As transformers does it: trailing ones are left out, others count."""
    folder = write_head_model(tmp_path, "qwen3", SEQUENCE, pad_token_id=7)
    prompts = [[5, 9, 7, 7], [7, 7, 5], [5, 7, 9, 7], [7, 7, 7], [5, 9]]
    wanted = transformers_values(folder, prompts)
    assert torch.allclose(wanted[0], wanted[4]) and not torch.allclose(wanted[1], wanted[0])
    with make_tiny(folder) as llm:
        outputs = llm.encode(prompts, PLAIN, use_tqdm=False, pooling_task="classify")
        assert same([each.outputs.data for each in outputs], wanted)
        assert [each.prompt_token_ids for each in outputs] == prompts
        rows = llm.encode(prompts, use_tqdm=False, pooling_task="token_classify")
        assert [len(each.outputs.data) for each in rows] == [*map(len, prompts)]


def test_the_padding_of_a_family_holds_where_config_json_states_none() -> None:
    labels = {"id2label": {"0": "a", "1": "b"}}

    def pad(architecture: str, **settings: Any) -> int | None:
        head = read_head(architecture, labels | settings)
        assert head is not None
        return head.pad_token_id

    assert pad("Gemma2ForSequenceClassification") == 0 and pad("Qwen3ForSequenceClassification") is None
    assert pad("Gemma2ForSequenceClassification", pad_token_id=None) is None
    assert pad("Gemma3ForSequenceClassification", text_config={"pad_token_id": 3}, pad_token_id=4) == 3


# -- reward models -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Reward", "ProcessReward"])
def test_reward_models_of_qwen(tmp_path: Path, kind: str) -> None:
    folder, score = write_reward_model(tmp_path, f"Qwen2For{kind}Model", 1 if kind == "Reward" else 2)
    hidden = hidden_states(folder, PROMPTS)
    with torch.inference_mode():
        wanted = [score(each) for each in hidden]
    with make_tiny(folder) as llm:
        if kind == "Reward":
            assert same(
                [e.outputs.data for e in llm.reward(PROMPTS, use_tqdm=False)], [w[-1] for w in wanted]
            )
            rows = llm.encode(PROMPTS, use_tqdm=False, pooling_task="token_classify")
            assert same([each.outputs.data for each in rows], wanted)
            return
        with pytest.raises(ValueError, match=r"classify\(\) needs a head for a whole text"):
            llm.classify(PROMPTS, use_tqdm=False)
        assert [each.outputs.data.shape for each in llm.reward(PROMPTS, use_tqdm=False)] == [(0, 2)] * 4


def test_a_process_reward_is_that_of_step_tokens(tmp_path: Path) -> None:
    """The vocabulary has the token that ends a step."""
    settings = {"vocab_size": 151_660, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder, score = write_reward_model(tmp_path, "Qwen2ForProcessRewardModel", 2, **settings)
    prompt = [5, 9, 151_651, 17, 3, 151_651]
    with torch.inference_mode():
        wanted = score(hidden_states(folder, [prompt])[0][[2, 5]])
    with make_tiny(folder) as llm:
        [output] = llm.encode([prompt], use_tqdm=False, pooling_task="token_classify")
        assert same([output.outputs.data], [wanted.softmax(-1)])


@pytest.mark.parametrize("scales", ["channel", "block"])
def test_a_decoder_in_fp8_with_a_head_in_16_bits(tmp_path: Path, scales: str) -> None:
    """The values are those of the dequantised decoder; a head with scales of its own is refused."""
    source = write_head_model(tmp_path / "source", "qwen3", SEQUENCE)
    folder = write_fp8(source, tmp_path / "fp8", scales)
    stored = tensors_of(folder)
    save_file(dequantised(stored), source / "model.safetensors")
    wanted = transformers_values(source, PROMPTS)
    with make_tiny(folder) as llm:
        assert same(plain_values(llm, PROMPTS), wanted)
    stored |= {
        "score.weight": stored["score.weight"].to(torch.float8_e4m3fn),
        "score.weight_scale": torch.ones(3, 1),
    }
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"score\.weight is F8_E4M3"):
        make_tiny(folder)
