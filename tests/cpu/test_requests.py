"""What users give to the engine and get from it: lengths, parameters, prompts, outputs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from checked_llm import make_tiny
from tiny_models import VOCAB_SIZE, write_tiny_model
from transformers import BatchEncoding

from nanovllm import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=96)


# -- lengths -------------------------------------------------------------------------------------------------


def test_the_default_length_is_the_models_own(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for asked in (None, -1, "auto", 1000):
        with make_tiny(model, max_model_len=asked) as llm:
            assert llm._runner.max_model_len == 96
    path = write_tiny_model(tmp_path, "mistral", max_position_embeddings=96, sliding_window=40)
    with caplog.at_level(logging.INFO, "nanovllm"), make_tiny(path, max_model_len=None) as llm:
        assert llm._runner.max_model_len == 40
    assert "max_model_len=40, the length up to which full attention" in caplog.text
    with pytest.raises(ValueError, match="sliding window of 40 tokens"):
        make_tiny(path, max_model_len=41)


# -- parameters ----------------------------------------------------------------------------------------------


def test_options_of_torch(model: Path) -> None:
    with make_tiny(model, dtype=torch.bfloat16, device=torch.device("cpu")) as llm:
        assert llm._runner.dtype == torch.bfloat16 and llm.config.device == "cpu"


def test_max_tokens_none_is_what_fits(model: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    huge = SamplingParams(temperature=0, max_tokens=10**400, ignore_eos=True)
    with make_tiny(model, max_model_len=32) as llm:
        for output in llm.generate([[5] * 10] * 2, [params, huge], use_tqdm=False):
            assert output["finish_reason"] == "length"
            assert len(output["token_ids"]) == 22


def test_a_request_keeps_its_own_parameters(model: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with make_tiny(model) as llm:
        llm.add_request([5, 6], params)
        params.max_tokens, params.temperature = 9, "hot"
        outputs = []
        while not llm.is_finished():
            outputs += llm.step()
        assert [len(output["token_ids"]) for output in outputs] == [4]
        with pytest.raises(TypeError, match="sampling_params: temperature must be a number"):
            llm.add_request([5, 6], params)
        with pytest.raises(TypeError, match=r"sampling_params\[1\]: temperature must be a number"):
            llm.generate([[5], [6]], [GREEDY, params], use_tqdm=False)
        params.temperature, params.stop_token_ids = 0, [VOCAB_SIZE]
        with pytest.raises(ValueError, match=rf"prompts\[1\] stop_token_ids: token id {VOCAB_SIZE}"):
            llm.generate([[5], [6]], [GREEDY, params], use_tqdm=False)
        assert llm.is_finished()


# -- prompts -------------------------------------------------------------------------------------------------


def test_prompts_of_torch_and_transformers(model: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    rows = [[5, 6, 7], [8, 9, 10]]
    with make_tiny(model) as llm:
        expected = [output["token_ids"] for output in llm.generate(rows, params, use_tqdm=False)]
        encoded = BatchEncoding({"input_ids": rows, "attention_mask": [[1] * 3] * 2})
        both = [torch.tensor(rows), encoded, encoded.convert_to_tensors("pt"), (row for row in rows)]
        for prompts in both:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [output["token_ids"] for output in outputs] == expected
        (one,) = llm.generate(torch.tensor(rows[0]), params, use_tqdm=False)
        assert one["token_ids"] == expected[0] and one.prompt_token_ids == rows[0]
        llm.add_request(torch.tensor(rows[0]), params)
        with pytest.raises(
            TypeError, match=r"the prompt: token id at position 0 must be an integer, not 5\.0"
        ):
            llm.add_request(torch.tensor([5.0]), params)


def test_a_model_that_is_none_and_one_at_home(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TypeError, match=r"model must be a folder or a Hugging Face hub id.* not None"):
        LLM(None)
    monkeypatch.setenv("HOME", str(model.parent))
    with LLM(f"~/{model.name}", device="cpu", skip_tokenizer_init=True) as llm:
        assert llm.model_config.vocab_size == VOCAB_SIZE
    with pytest.raises(ValueError, match=rf"model folder '{model.parent}/nowhere' does not exist"):
        LLM("~/nowhere")
    with pytest.raises(ValueError, match="model folder '~nobody-here/model' does not exist"):
        LLM("~nobody-here/model")
