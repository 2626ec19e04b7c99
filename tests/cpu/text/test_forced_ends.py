"""An answer that can go on in only one way to its end needs no step for these tokens, and is the same."""

from __future__ import annotations

from typing import Any

import inside_kinds
import pytest
from checked_llm import CheckedLLM

from nanovllm import SamplingParams, StructuredOutputsParams, demo_model_path
from nanovllm.batch import StepKind

FORMS: list[dict[str, Any]] = [
    {"choice": ["red", "green", "reddish"]},
    {"choice": ["positive and long", "negative", "neutral"]},
    {"choice": ["a", "ab", "abc", "abcdefgh", "é\\n!"]},
    {"regex": "(yes|no|maybe)"},
    {"json": {"enum": [1, 12, "x"]}},
    {"regex": "[a-c]{3,6}"},
]
MORE: list[dict[str, Any]] = [
    {},
    {},
    {"logprobs": 1},
    {"stop_token_ids": [70]},
    {"min_tokens": 2},
    {"stop": ["e"]},
    {"n": 3, "temperature": 1},
    {"max_tokens": 1},
    {"max_tokens": 2},
    {"max_tokens": 3, "stop_token_ids": [90]},
    {"stop_token_ids": [71, 75, 81, 86]},  # e, i, o and t: within the ends of labels
    {"logit_bias": {80: 4.0, 82: -2.0}},
    {"bad_words": ["po"]},
    {"presence_penalty": 1.5, "min_p": 0.01},
    {"repetition_penalty": 1.3, "ignore_eos": True},
    {"prompt_logprobs": 0},
    {"include_stop_str_in_output": True, "skip_special_tokens": False},
]
ENGINES: dict[str, dict[str, Any]] = {
    "ahead": {},
    "in_step": {"async_scheduling": False},
    "tight": {"num_kvcache_blocks": 14, "kvcache_block_size": 4, "max_num_batched_tokens": 13},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}


def make(**options: Any) -> CheckedLLM:
    defaults = {"device": "cpu", "async_scheduling": True, "max_model_len": 96, "dtype": "float32"}
    defaults |= {"max_num_seqs": 128, "kvcache_block_size": 32}  # room for all rows, in a tenth of the memory
    return CheckedLLM(demo_model_path(), **defaults | options)


def rows_of(number: int) -> tuple[list[str], list[SamplingParams]]:
    params = []
    for index in range(number):
        form = StructuredOutputsParams(**FORMS[index % len(FORMS)])
        asked = {"max_tokens": 32, "temperature": index % 2, "seed": index} | MORE[index % len(MORE)]
        params.append(SamplingParams(structured_outputs=form, **asked))
    return [f"Question {index % 4}:" for index in range(number)], params


@pytest.mark.parametrize("name", ENGINES)
def test_answers_are_those_of_which_every_token_is_computed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = rows_of(len(FORMS) * len(MORE))
    found, rows, written = [], [], []
    for _ in range(2):
        with make(**ENGINES[name]) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            stats = llm.stats()
            rows.append(sum(len(batch.seq_ids) for batch in llm.batches if batch.kind is StepKind.DECODE))
            written.append((stats.num_output_tokens, stats.num_finished_requests))
        found.append(
            [
                (each.text, each.token_ids, each.finish_reason, each.stop_reason, str(each.logprobs))
                for output in outputs
                for each in output.outputs
            ]
        )
        inside_kinds.end_no_answer_early(monkeypatch)
    assert found[0] == found[1] and written[0] == written[1]
    assert {reason for _, _, reason, _, _ in found[0]} == {"stop", "length"}
    if name == "in_step":
        assert rows[0] <= rows[1] - len(prompts) // 2


def test_labels_of_one_token_need_no_decode_step() -> None:
    form = StructuredOutputsParams(choice=["a", "b"])
    with make(async_scheduling=False) as llm:
        outputs = llm.generate(
            [f"Question {n}:" for n in range(9)],
            SamplingParams(structured_outputs=form, max_tokens=8),
            use_tqdm=False,
        )
        assert {batch.kind for batch in llm.batches} == {StepKind.PREFILL}
    assert {each["text"] for each in outputs} <= {"a", "b"}
    assert {(len(each["token_ids"]), each["finish_reason"]) for each in outputs} == {(2, "stop")}


def test_labels_that_differ_in_their_first_token_need_no_decode_step() -> None:
    labels = ["aa long label", "bb another one", "cc"]
    form = StructuredOutputsParams(choice=labels)
    for most in (30, 3):
        with make(async_scheduling=False) as llm:
            params = SamplingParams(structured_outputs=form, max_tokens=most, temperature=2, seed=1)
            prompts = [f"Question {n}:" for n in range(9)]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert {batch.kind for batch in llm.batches} == {StepKind.PREFILL}
        for each in outputs:
            assert each["text"] in labels if most > 3 else len(each["token_ids"]) <= 3
            assert each["finish_reason"] == ("stop" if each["text"] in labels else "length")


def test_a_forced_end_is_cut_by_a_stop_token_within_it() -> None:
    form, letter = StructuredOutputsParams(choice=["aa and long", "bb and long"]), 78  # l
    params = SamplingParams(structured_outputs=form, stop_token_ids=[letter], temperature=2, max_tokens=30)
    with make(async_scheduling=False) as llm:
        outputs = llm.generate([f"Question {n}:" for n in range(9)], params, use_tqdm=False)
        assert {batch.kind for batch in llm.batches} == {StepKind.PREFILL}
    for output in outputs:
        [answer] = output.outputs
        assert (answer.finish_reason, answer.stop_reason, answer.token_ids[-1]) == ("stop", letter, letter)
        assert answer.text in ("aa and ", "bb and ")


def test_parts_of_a_stream_have_all_tokens() -> None:
    form = StructuredOutputsParams(choice=["red", "green"])
    params = SamplingParams(structured_outputs=form, max_tokens=8, temperature=0)
    prompts = [f"Question {n}:" for n in range(9)]
    with make() as llm:
        whole = [each["token_ids"] for each in llm.generate(prompts, params, use_tqdm=False)]
        parts: list[list[int]] = [[] for _ in prompts]
        for part in llm.stream(prompts, params, deltas=True):
            parts[part.index] += part.outputs[0].token_ids
    assert parts == whole


def test_the_experts_of_every_token_but_the_last_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    inside_kinds.keep_experts(monkeypatch)
    form = StructuredOutputsParams(choice=["a", "b"])
    with make() as llm:
        llm.generate(["Question:"], SamplingParams(structured_outputs=form, max_tokens=8), use_tqdm=False)
        assert [batch.kind for batch in llm.batches][-1] is StepKind.DECODE
