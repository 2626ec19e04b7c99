"""generation_config.json: default sampling parameters and end-of-sequence tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import inside
import pytest
from checked_llm import make_tiny
from tiny_models import write_tiny_model

from nanovllm import LLM, ModelLoadError, SamplingParams, demo_model_path

RECOMMENDED = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": None,
    "max_new_tokens": 7,
    "repetition_penalty": 1.0,
    "do_sample": True,
    "eos_token_id": [1, 9],
}


def write(folder: Path, **content: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(write_tiny_model(tmp_path / "model"), **RECOMMENDED)


def test_recommended_parameters_are_the_default(model: Path) -> None:
    expected = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, max_tokens=7)
    prompts = [[5, 6], [7] * 9, [8]]
    with make_tiny(model) as llm:
        assert llm.get_default_sampling_params() == expected
        llm.get_default_sampling_params().temperature = 5  # a copy that the caller may change
        first = inside.next_id(llm)
        found = llm.generate(prompts, use_tqdm=False)
        inside.next_id(llm, first)  # with the same seeds
        assert [out["token_ids"] for out in found] == [
            out["token_ids"] for out in llm.generate(prompts, expected, use_tqdm=False)
        ]
        assert max(len(out["token_ids"]) for out in found) == 7
        llm.add_request([5])
        llm.step()
        [request] = inside.scheduler_state(inside.scheduler(llm)).unfinished.values()
        assert request.params == expected
        assert llm.model_config.eos_token_ids == (1, 9)


def test_generation_config_vllm_uses_only_eos_tokens(model: Path) -> None:
    with make_tiny(model, generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
        assert llm.model_config.eos_token_ids == (1, 9)


@pytest.mark.parametrize("kind", [str, Path])
def test_generation_config_of_another_folder(model: Path, tmp_path: Path, kind: type) -> None:
    other = write(tmp_path / "other", temperature=0, eos_token_id=11)
    with make_tiny(model, generation_config=kind(other)) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0)
        assert llm.model_config.eos_token_ids == (1, 11)  # config.json says 1
        assert llm.config.generation_config == str(other)


def test_without_the_file_the_defaults_hold(model: Path) -> None:
    (model / "generation_config.json").unlink()
    with make_tiny(model) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


def test_do_sample_false_is_greedy(model: Path) -> None:
    """As in transformers. Five answers to one prompt are one answer, whatever temperature the file has."""
    write(model, do_sample=False, temperature=0.6, top_p=0.8, max_new_tokens=6)
    with make_tiny(model) as llm:
        assert llm.get_default_sampling_params().temperature == 0
        found = [out["token_ids"] for out in llm.generate([[5, 6, 7]] * 5, use_tqdm=False)]
        greedy = SamplingParams(temperature=0, max_tokens=6)
        assert found == [llm.generate([[5, 6, 7]], greedy, use_tqdm=False)[0]["token_ids"]] * 5
    for options, temperature in (
        ({"override_generation_config": {"temperature": 0.3}}, 0.3),
        ({"override_generation_config": {"temperature": None, "top_k": 3}}, 0),
        ({"generation_config": "vllm"}, 1),
    ):
        with make_tiny(model, **options) as llm:
            assert llm.get_default_sampling_params().temperature == temperature
    write(model, do_sample=True, temperature=0.6)
    with make_tiny(model) as llm:
        assert llm.get_default_sampling_params().temperature == 0.6


def test_a_repetition_penalty_counts(model: Path) -> None:
    write(model, repetition_penalty=1.7, temperature=0.0)
    with make_tiny(model) as llm:
        assert llm.get_default_sampling_params().repetition_penalty == 1.7
        params = SamplingParams(temperature=0, repetition_penalty=1.7, max_tokens=12)
        recommended = llm.generate([[5, 6, 7]], use_tqdm=False)[0]["token_ids"]
        assert recommended[:12] == llm.generate([[5, 6, 7]], params, use_tqdm=False)[0]["token_ids"]


def test_wrong_values_and_files(model: Path, tmp_path: Path) -> None:
    write(model, top_p=1.5)
    with make_tiny(model) as llm:
        with pytest.raises(ValueError, match=r"generation_config\.json: top_p must be .* not 1\.5; pass"):
            llm.generate([[5]], use_tqdm=False)
        assert len(llm.generate([[5]], SamplingParams(max_tokens=1), use_tqdm=False)) == 1
    with pytest.raises(ValueError, match=r"a folder with generation_config\.json, not '.*nowhere'"):
        LLM(model, generation_config=tmp_path / "nowhere")
    with pytest.raises(TypeError, match="generation_config must be a string that is not empty, not 5"):
        LLM(model, generation_config=5)
    with pytest.raises(ValueError, match=r"^override_generation_config: temperature must be .* not -1$"):
        make_tiny(model, override_generation_config={"temperature": -1})
    (model / "generation_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="cannot be read as JSON"):
        make_tiny(model)


def test_the_demo_model_recommends_greedy_answers() -> None:
    with LLM(demo_model_path(), device="cpu", num_kvcache_blocks=64) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0)
        assert (
            len({llm.chat([{"role": "user", "content": "a"}], use_tqdm=False)[0]["text"] for _ in "12345"})
            == 1
        )
