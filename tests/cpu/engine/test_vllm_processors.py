"""Classes of logits processors, `extra_args`, `trace_decode_token_ids` and `vllm_config`, as scripts for vLLM
have them."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm_processors import Adapter, Counted, Only

from nanovllm import (
    LLM,
    EngineArgs,
    LogitsProcessor,
    SamplingParams,
    StructuredOutputsParams,
    demo_model_path,
)

PROMPTS = ["What is 2 + 3?", "Sort: d b a", "Spell: cat"]
OPTIONS: dict[str, Any] = {
    "model": demo_model_path(),
    "device": "cpu",
    "num_kvcache_blocks": 32,
    "dtype": "float32",  # decode and prefill give the same tokens, on any CPU
}


def greedy(**extra_args: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, extra_args=extra_args)


def ids(llm: LLM, params: Any, prompts: list[str] = PROMPTS) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(**OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM.from_engine_args(
        EngineArgs(**OPTIONS, logits_processors=[Only, "vllm_processors:Adapter"])
    ) as llm:
        yield llm


def test_extra_args_reach_the_classes_of_one_request(llm: LLM, plain: LLM) -> None:
    expected = ids(plain, greedy())
    found = ids(llm, [greedy(only=30), greedy(), greedy(adapted=[40, 41])])
    assert found == [[30] * 6, expected[1], [40, 41] * 3]
    assert ids(llm, greedy(only=31)) == [[31] * 6] * 3  # one object for all prompts
    ordered = [out.outputs[0].token_ids for out in llm.stream(PROMPTS, greedy(only=32))]
    assert ordered == [[32] * 6] * 3
    llm.enqueue(PROMPTS[:1], greedy(only=33))
    [out] = llm.wait_for_completion(use_tqdm=False)
    assert out.outputs[0].token_ids == [33] * 6


def test_a_class_refuses_parameters_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ValueError, match="only must be a token id, not 'a'"):
        llm.generate(PROMPTS, [greedy(), greedy(only="a"), greedy()], use_tqdm=False)
    outputs = llm.generate(PROMPTS, [greedy(), greedy(only="a"), greedy()], use_tqdm=False, on_error="return")
    assert [out.error is None for out in outputs] == [True, False, True]
    assert "only must be a token id" in (outputs[1].error or "")


def test_each_completion_has_its_own_object() -> None:
    """`Counted` sees each sequence's own tokens, in order: also with preemption, and with completions that
    begin alike."""
    Counted.wrong.clear()
    options = OPTIONS | {"num_kvcache_blocks": 6, "kvcache_block_size": 16, "max_num_seqs": 4}
    with LLM(**options, logits_processors=[Counted]) as llm:
        params = SamplingParams(temperature=1.5, n=3, max_tokens=24, seed=3, ignore_eos=True)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert llm.stats().num_preemptions > 0
    assert not Counted.wrong and all(len(each.token_ids) == 24 for out in outputs for each in out.outputs)
    with LLM(**OPTIONS) as llm:
        expected = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [[e.token_ids for e in out.outputs] for out in outputs] == [
        [e.token_ids for e in out.outputs] for out in expected
    ]


def test_an_error_of_a_class_ends_its_request(llm: LLM) -> None:
    outputs = llm.generate(
        PROMPTS, [greedy(adapted="fail"), greedy(), greedy()], use_tqdm=False, on_error="return"
    )
    assert [out.error is None for out in outputs] == [False, True, True]
    assert "ZeroDivisionError" in (outputs[0].error or "")
    with pytest.raises(ZeroDivisionError):
        llm.generate(PROMPTS, greedy(adapted="fail"), use_tqdm=False)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([int], TypeError, r"logits_processors\[0\] must be a subclass of nanovllm\.LogitsProcessor"),
        (["vllm_processors"], ValueError, r"\[0\] must be a class or 'module:Class', not 'vllm_processors'"),
        (
            [Only, "vllm_processors:Nothing"],
            ValueError,
            r"\[1\]='vllm_processors:Nothing' cannot be imported",
        ),
        ([LogitsProcessor], TypeError, r"LogitsProcessor lacks __init__, apply, is_argmax_invariant, update"),
        (
            5,
            ValueError,
            r"logits_processors=5 is not supported; pass a list of subclasses of LogitsProcessor",
        ),
    ],
)
def test_what_is_no_class(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LLM(**OPTIONS, logits_processors=given)


def test_classes_need_one_process() -> None:
    with pytest.raises(ValueError, match="need tensor_parallel_size=1 and data_parallel_size=1, not 2 and 1"):
        LLM(**OPTIONS, logits_processors=[Only], tensor_parallel_size=2)


def test_extra_args_without_classes(plain: LLM, caplog: pytest.LogCaptureFixture) -> None:
    params = greedy(anything=object())
    assert (
        params.clone().extra_args == params.extra_args and params.clone().extra_args is not params.extra_args
    )
    with caplog.at_level(logging.WARNING):
        assert ids(plain, params) == ids(plain, greedy())
    assert "extra_args of SamplingParams has no effect" in caplog.text
    wrongs: tuple[Any, ...] = ([1], "a", 5, {1: 2})
    for wrong in wrongs:
        with pytest.raises(TypeError, match=r"extra_args must be a dictionary with strings as keys, not "):
            SamplingParams(extra_args=wrong)
        params.extra_args = wrong
        with pytest.raises(TypeError, match=r"sampling_params: extra_args must be a dictionary"):
            plain.generate(PROMPTS, params, use_tqdm=False)
    assert SamplingParams(extra_args={"a": 1}) != SamplingParams() == SamplingParams(extra_args=None)
    assert SamplingParams(extra_args={"a": 1}) == SamplingParams(extra_args={"a": 1})
    params.extra_args = {"only": 3}
    assert params.extra_args == {"only": 3} and SamplingParams().extra_args is None


# -- trace_decode_token_ids ----------------------------------------------------------------------------------


def test_a_trace_is_replayed_with_the_models_logprobs(plain: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2)
    [[free]] = [out.outputs for out in plain.generate(PROMPTS[:1], params, use_tqdm=False)]
    trace = SamplingParams(
        trace_decode_token_ids=free.token_ids, logprobs=2, stop_token_ids=[free.token_ids[2]]
    )
    [[again]] = [out.outputs for out in plain.generate(PROMPTS[:1], trace, use_tqdm=False)]
    assert again.token_ids == free.token_ids and again.text == free.text and again.finish_reason == "length"
    torch.testing.assert_close(again.cumulative_logprob, free.cumulative_logprob, rtol=0, atol=1e-4)
    other = [*free.token_ids[::-1], 2]  # ends with the end-of-sequence token
    forced_params = SamplingParams(trace_decode_token_ids=other, logprobs=0)
    [out] = plain.generate(PROMPTS[:1], forced_params, use_tqdm=False)
    whole = [*out.prompt_token_ids, *other]
    [scored] = plain.generate([whole], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    rows = (scored.prompt_logprobs or [])[-len(other) :]
    expected = [row[token_id].logprob for row, token_id in zip(rows, other, strict=True) if row is not None]
    found = [
        row[token_id].logprob for row, token_id in zip(out.outputs[0].logprobs or [], other, strict=True)
    ]
    assert out.outputs[0].token_ids == other and len(expected) == len(other)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-3, atol=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trace_decode_token_ids": []}, "trace_decode_token_ids is empty"),
        ({"trace_decode_token_ids": 5}, "trace_decode_token_ids must be a list of token ids, not 5"),
        ({"trace_decode_token_ids": [5, -1]}, "trace_decode_token_ids must be .* not -1"),
        ({"trace_decode_token_ids": [5, 100_000]}, "trace_decode_token_ids: token id 100000 at position 1"),
        ({"n": 2}, "trace_decode_token_ids needs n=1, not 2"),
        ({"bad_words": ["a"]}, "trace_decode_token_ids needs bad_words at its default"),
        ({"allowed_token_ids": [5]}, "trace_decode_token_ids needs allowed_token_ids at its default"),
    ],
)
def test_traces_that_cannot_run(changes: dict[str, Any], message: str, plain: LLM) -> None:
    params = SamplingParams(trace_decode_token_ids=[5, 6])
    for name, value in changes.items():
        setattr(params, name, value)
    with pytest.raises((TypeError, ValueError), match=rf"(sampling_params|prompts\[0\]): {message}"):
        plain.generate(PROMPTS[:1], params, use_tqdm=False)


def test_nothing_else_acts_on_a_trace(plain: LLM) -> None:
    """The caller's parameters stay as they are: a trace that is taken back leaves nothing."""

    def never(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits.new_full(logits.shape, float("-inf"))

    params = SamplingParams(temperature=1.3, top_p=0.1, min_p=0.9, max_tokens=2, min_tokens=1, seed=3)
    kept = params.clone()
    params.trace_decode_token_ids = [40, 2, 40, 41]
    params.logits_processors, params.repetition_penalty = [never], 1.7
    params.logit_bias, params.stop, params.stop_token_ids = {40: float("-inf")}, ["a", " "], [41]
    [out] = plain.generate(PROMPTS[:1], params, use_tqdm=False)
    assert out.outputs[0].token_ids == [40, 2, 40, 41] and out.outputs[0].finish_reason == "length"
    [mixed, free] = plain.generate(PROMPTS[:2], [params, kept], use_tqdm=False)
    assert mixed.outputs[0].token_ids == [40, 2, 40, 41]
    assert free.outputs[0].token_ids == ids(plain, kept, PROMPTS[1:2])[0]
    assert (params.max_tokens, params.min_tokens, params.stop) == (2, 1, ["a", " "])
    params.trace_decode_token_ids, params.logits_processors, params.repetition_penalty = None, [], 1.0
    params.logit_bias, params.stop, params.stop_token_ids = {}, [], []
    assert params == kept and ids(plain, params) == ids(plain, kept)


# -- structured_outputs_config -------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"enum": [5, 6]}}, "required": ["a"]}


def structured(**options: Any) -> SamplingParams:
    params = StructuredOutputsParams(json=SCHEMA, **options)
    return SamplingParams(temperature=1.0, max_tokens=80, seed=1, structured_outputs=params)


def texts(llm: LLM, params: Any) -> list[str]:
    return [out.outputs[0].text for out in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_an_engine_may_allow_whitespace_and_close_objects(plain: LLM) -> None:
    """What an engine says holds where a request says nothing."""
    config = {"backend": "xgrammar", "disable_any_whitespace": False, "disable_additional_properties": True}
    with LLM(**OPTIONS, structured_outputs_config=config) as llm:
        expected = texts(plain, structured(disable_any_whitespace=False, disable_additional_properties=True))
        assert texts(llm, structured()) == expected and any(map(re.compile(r"\s").search, expected))
        own = structured(disable_any_whitespace=True)
        expected = texts(plain, structured(disable_additional_properties=True))
        assert texts(llm, own) == expected
        assert set(expected) <= {'{"a":5}', '{"a":6}'}
        assert own.structured_outputs == StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)


def test_replicas_have_both(plain: LLM) -> None:
    """What an engine adds, and a trace, are in the parameters that a replica gets."""
    config = {"disable_any_whitespace": False, "disable_additional_properties": True}
    with LLM(**OPTIONS, data_parallel_size=2, structured_outputs_config=config) as llm:
        expected = texts(plain, structured(disable_any_whitespace=False, disable_additional_properties=True))
        assert texts(llm, structured()) == expected
        trace = [40, 2, 41]
        assert ids(llm, SamplingParams(trace_decode_token_ids=trace)) == [trace] * 3


def test_the_reasoning_parser_may_be_in_it() -> None:
    with pytest.raises(
        ValueError, match="reasoning_parser='x', and in structured_outputs_config 'y'; pass one"
    ):
        LLM(**OPTIONS, structured_outputs_config={"reasoning_parser": "y"}, reasoning_parser="x")
    with pytest.raises(ValueError, match="reasoning_parser"):
        LLM(**OPTIONS, structured_outputs_config={"reasoning_parser": "no_such_parser"})


# -- settings ------------------------------------------------------------------------------------------------


def test_settings_under_vllms_names(plain: LLM) -> None:
    config = plain.llm_engine.vllm_config
    assert config.model_config.max_model_len == plain.model_config.max_model_len == 1024
    assert config.model_config.get_vocab_size() == plain.model_config.get_vocab_size() == 512
    [embedding] = plain.embed(PROMPTS[:1], use_tqdm=False)
    assert len(embedding.outputs.embedding) == plain.llm_engine.model_config.embedding_size == 256
    assert config.cache_config.num_gpu_blocks == 32 and config.parallel_config.world_size == 1
    assert config.scheduler_config.max_num_seqs == plain.config.max_num_seqs
    assert config.lora_config is None
    with pytest.raises(AttributeError, match="cache_config has no 'blocksize'; did you mean 'block_size'"):
        _ = config.cache_config.blocksize
    assert replace(config, model_config=None).model_config is None
    assert isinstance(Adapter(config, torch.device("cpu"), False), LogitsProcessor)
