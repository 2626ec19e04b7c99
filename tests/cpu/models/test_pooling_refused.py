"""Models with a head that classifies: what is refused, prompts that cannot run, and new weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checked_llm import make_tiny
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
)
from safetensors.torch import load_file, save_file
from tiny_models import edit_json, write_tiny_model

from nanovllm import (
    LLM,
    BeamSearchParams,
    ModelLoadError,
    PoolingParams,
    SamplingParams,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("heads")
    names = {SEQUENCE: 5, TOKENS: 3}
    return {
        name: write_head_model(root / name, "qwen3", name, labels=labels) for name, labels in names.items()
    }


# -- what is refused -----------------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "problem": ({"problem_type": "ranking"}, r"problem_type 'ranking' is not supported.*'regression'"),
    "number": ({"num_labels": 7}, "num_labels is 7, and id2label has 3 labels; make them agree"),
    "no number": ({"num_labels": "3"}, "num_labels must be a positive integer, not '3'"),
    "keys": ({"id2label": {"1": "a", "2": "b", "3": "c"}}, r"keys of id2label must be 0 to 2, not \['1'"),
    "names": ({"id2label": ["a", "b"]}, r"id2label must map 0, 1, \.\.\. to names"),
    "pad": ({"pad_token_id": "x"}, "pad_token_id must be an integer or null, not 'x'"),
    "function": (
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}},
        "activation function 'torch.nn.modules.activation.Tanh' is not supported",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_config_json_may_not_say(tmp_path: Path, folders: dict[str, Path], case: str) -> None:
    settings, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        LLM(str(folders[SEQUENCE]), device="cpu", skip_tokenizer_init=True, hf_overrides=_renamed(settings))


def _renamed(settings: dict[str, Any]) -> dict[str, Any]:
    """With three labels, unless the settings state them."""
    return {"id2label": {"0": "a", "1": "b", "2": "c"}} | settings


@pytest.mark.parametrize("change", ["missing", "rows", "columns", "bias", "integers"])
def test_weights_that_do_not_fit(tmp_path: Path, change: str) -> None:
    folder = write_head_model(tmp_path, "qwen3", SEQUENCE)
    tensors = load_file(folder / "model.safetensors")
    weight = tensors.pop("score.weight")
    changed, message = {
        "missing": ({}, r"1 missing: score\.weight"),
        "rows": (
            {"score.weight": weight[:2]},
            r"score\.weight is \(2, 32\), .*the 3 label.* correct its id2label",
        ),
        "columns": ({"score.weight": weight[:, :31]}, r"1 wrong shape: score\.weight is \(3, 31\)"),
        "bias": ({"score.weight": weight, "score.bias": torch.ones(3)}, r"1 unexpected: score\.bias"),
        "integers": ({"score.weight": weight.to(torch.int8)}, r"score\.weight is I8"),
    }[change]
    save_file(
        tensors | {k: v.contiguous() for k, v in changed.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(ModelLoadError, match=message):
        LLM(str(folder), device="cpu", skip_tokenizer_init=True)


def test_such_a_model_draws_no_tokens(folders: dict[str, Path]) -> None:
    few = SamplingParams(temperature=0, max_tokens=3)
    for name, instead in ((SEQUENCE, "classify"), (TOKENS, "encode")):
        message = rf"this model has no LM head \({name} has a head of \d label\(s\), for {instead}\("
        with make_tiny(folders[name]) as llm:
            for call in (
                lambda llm=llm: llm.generate(PROMPTS, few, use_tqdm=False),
                lambda llm=llm: next(llm.stream(PROMPTS, few)),
                lambda llm=llm: llm.add_request(PROMPTS[0], few),
                lambda llm=llm: llm.beam_search(PROMPTS, BeamSearchParams(beam_width=2, max_tokens=2)),
                lambda llm=llm: llm.score_pairs([(PROMPTS[0], [3])]),
            ):
                with pytest.raises(ValueError, match=message):
                    call()
            outputs = llm.generate(PROMPTS, few, use_tqdm=False, on_error="return")
            assert all("has no LM head" in str(each.error) for each in outputs) and llm.is_finished()


def test_a_model_without_a_head_is_not_asked_for_classes(model: Path) -> None:
    with make_tiny(model) as llm:
        calls: list[tuple[str, Callable[[], object]]] = [
            (r"classify\(\)", lambda: llm.classify(PROMPTS)),
            (r"reward\(\)", lambda: llm.reward(PROMPTS)),
            (r"encode\(pooling_task='classify'\)", lambda: llm.encode(PROMPTS, pooling_task="classify")),
        ]
        for name, call in calls:
            with pytest.raises(
                ValueError, match=f"{name} needs a model with a head, .*Qwen3ForCausalLM has none"
            ):
                call()
        with pytest.raises(ValueError, match=r"encode\(\) needs pooling_task, one of 'embed', .*, not None"):
            llm.encode(PROMPTS)
        with pytest.raises(ValueError, match="chat_template is for models that score pairs"):
            llm.score(PROMPTS[0], [[3]], chat_template="{{ messages }}")
        rows = llm.encode(PROMPTS, PLAIN, use_tqdm=False, pooling_task="token_embed")
        assert same([each.outputs.data for each in rows], hidden_states(model, PROMPTS))
        [score] = llm.score(PROMPTS[0], [[3]], use_tqdm=False)
        assert score.logprob < 0


def test_arguments_that_are_refused(folders: dict[str, Path]) -> None:
    with make_tiny(folders[SEQUENCE]) as llm:
        with pytest.raises(ValueError, match="dimensions is for embeddings, and 'classify' has labels"):
            llm.classify(PROMPTS, pooling_params=PoolingParams(dimensions=3))
        with pytest.raises(ValueError, match="2 pooling_params for 4 prompts"):
            llm.classify(PROMPTS, pooling_params=[PLAIN, PLAIN])
        with pytest.raises(TypeError, match=r"LLM\.classify\(\) got an unknown argument 'top_k'"):
            llm.classify(PROMPTS, top_k=3)
        with pytest.raises(ValueError, match="lora_request"):
            llm.encode(PROMPTS, pooling_task="classify", lora_request=object())
        with pytest.raises(ValueError, match=r"score\(\) needs a head of one label .* has 5 label"):
            llm.score("a", "b")
        assert len(llm.classify(PROMPTS, use_tqdm=False, lora_request=None)) == 4


def test_bad_prompts_and_values_that_are_not_finite(tmp_path: Path) -> None:
    folder = write_head_model(tmp_path, "qwen3", SEQUENCE)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][50] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    prompts = [[5, 9], [], [5, 50], [5, 7] * 40, [5, 9]]
    with make_tiny(folder, num_kvcache_blocks=16) as llm:
        with pytest.raises(ValueError, match=r"prompts\[1\]"):
            llm.classify(prompts, use_tqdm=False)
        outputs = llm.classify(prompts, use_tqdm=False, on_error="return")
        assert [each.error is None for each in outputs] == [True, False, False, False, True]
        assert outputs[2].error == "the model's hidden states were not finite"
        assert "has 80 tokens" in str(outputs[3].error)
        assert [len(each.outputs.probs) for each in outputs] == [3, 0, 0, 0, 3]
        assert outputs[0].outputs.probs == outputs[4].outputs.probs and outputs[1].outputs.label is None
        rows = llm.encode(prompts, use_tqdm=False, pooling_task="token_classify", on_error="return")
        assert [each.outputs.data.shape for each in rows] == [(2, 3), (0,), (0,), (0,), (2, 3)]


# -- weights -------------------------------------------------------------------------------------------------


def test_weights_are_replaced_and_sleep(tmp_path: Path, folders: dict[str, Path]) -> None:
    other = write_head_model(tmp_path, "qwen3", SEQUENCE, labels=5, seed=9)
    state = load_file(other / "model.safetensors")
    with make_tiny(folders[SEQUENCE]) as llm:
        before = plain_values(llm, PROMPTS)
        llm.update_weights(
            {"score.weight": load_file(folders[SEQUENCE] / "model.safetensors")["score.weight"] * 2}
        )
        assert same(plain_values(llm, PROMPTS), [each * 2 for each in before])
        with pytest.raises(ValueError, match=r"score\.weight has shape \(4, 32\).* the 5 label"):
            llm.update_weights({"score.weight": torch.zeros(4, 32)})
        llm.update_weights(state)
        wanted = transformers_values(other, PROMPTS)
        assert same(plain_values(llm, PROMPTS), wanted)
        llm.sleep(1)
        llm.wake_up()
        assert same(plain_values(llm, PROMPTS), wanted)


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantization": "fp8"}], ids=["bf16", "fp8"])
def test_a_head_stays_as_it_is(folders: dict[str, Path], options: dict[str, Any]) -> None:
    """In float32, whatever the decoder's dtype is."""
    with make_tiny(folders[SEQUENCE], **options) as llm:
        [weight] = llm.apply_model(lambda model: model.score.method.dense().clone())
        assert torch.equal(weight, load_file(folders[SEQUENCE] / "model.safetensors")["score.weight"])
        [hidden] = llm.encode(PROMPTS[:1], PLAIN, use_tqdm=False, pooling_task="embed")
        [values] = plain_values(llm, PROMPTS[:1])
        assert torch.allclose(values, weight @ hidden.outputs.data, **NEAR)


def test_dummy_weights_have_a_head(folders: dict[str, Path]) -> None:
    with make_tiny(folders[SEQUENCE], load_format="dummy") as llm:
        values = plain_values(llm, PROMPTS)
    assert all(np.isfinite(each).all() and each.abs().max() > 0 for each in values)


def test_overrides_make_a_classifier_of_its_files(tmp_path: Path) -> None:
    """`architectures`, and the names of labels."""
    folder = write_head_model(tmp_path, "qwen3", SEQUENCE)
    wanted = transformers_values(folder, PROMPTS)
    edit_json(folder / "config.json", architectures=["Qwen3ForCausalLM"], remove=("id2label", "num_labels"))
    with pytest.raises(ModelLoadError, match=r"1 unexpected: score\.weight"):
        LLM(str(folder), device="cpu", skip_tokenizer_init=True)
    names = {"architectures": [SEQUENCE], "id2label": {"0": "x", "1": "y", "2": "z"}}
    with make_tiny(folder, hf_overrides=names) as llm:
        assert same(plain_values(llm, PROMPTS), wanted)
        assert llm.classify(PROMPTS[0], use_tqdm=False)[0].outputs.label in "xyz"
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


def test_a_file_with_another_ending_is_no_classifier(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    for name in ("Qwen3ForQuestionAnswering", "LlamaForRewardModel"):
        edit_json(folder / "config.json", architectures=[name])
        with pytest.raises(ValueError, match=rf"{name}.* is not supported"):
            LLM(str(folder), device="cpu", skip_tokenizer_init=True)
