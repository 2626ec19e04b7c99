"""Sequences with equal rules and outputs share a mask: it is computed once, and no answer changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from checked_llm import CheckedLLM

from nanovllm import SamplingParams, StructuredOutputsParams, demo_model_path
from nanovllm.extras import planned, token_rules

FORMS: list[dict[str, Any]] = [
    {"choice": ["red", "green", "reddish"]},
    {"regex": "(ab|ac){8,12}"},
    {"json": {"enum": [1, 12, "x"]}},
]
ENGINES: dict[str, dict[str, Any]] = {
    "ahead": {},
    "tight": {"num_kvcache_blocks": 14, "kvcache_block_size": 4, "max_num_batched_tokens": 13},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}


def make(**options: Any) -> CheckedLLM:
    defaults = {"device": "cpu", "async_scheduling": True, "max_model_len": 96, "dtype": "float32"}
    defaults |= {"max_num_seqs": 128, "kvcache_block_size": 32}  # room for all rows, in a tenth of the memory
    return CheckedLLM(demo_model_path(), **defaults | options)


def requests(number: int) -> tuple[list[str], list[SamplingParams]]:
    """Sampled and greedy, some with another stop token or a second rule."""
    params = []
    for index in range(number):
        more: dict[str, Any] = {"temperature": index % 2, "seed": index % 5}
        if index % 7 == 3:
            more["stop_token_ids"] = [100 + index % 3]
        if index % 11 == 5:
            more["min_tokens"] = 2
        form = StructuredOutputsParams(**FORMS[index % 3])
        params.append(SamplingParams(max_tokens=32, structured_outputs=form, **more))
    return [f"Question {index % 4}:" for index in range(number)], params


@pytest.mark.parametrize("name", ENGINES)
def test_no_answer_changes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    computed, restrict_all = [0], token_rules.restrict_all

    def count(rows: Any, bits: np.ndarray) -> None:
        computed[0] += len(rows)
        restrict_all(rows, bits)

    monkeypatch.setattr(planned, "restrict_all", count)
    prompts, params = requests(45)
    found, numbers = [], []
    for most in (token_rules.SHARED_TOKENS, -1):
        monkeypatch.setattr(token_rules, "SHARED_TOKENS", most)
        computed[0] = 0
        with make(**ENGINES[name]) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            if name == "tight":
                assert any(seq.num_preemptions for seq in llm.sequences)
        found.append([(each.outputs[0].token_ids, each.outputs[0].finish_reason) for each in outputs])
        numbers.append(computed[0])
    assert found[0] == found[1]
    assert {reason for _, reason in found[0]} == {"stop"}
    if name == "ahead":
        assert numbers[0] < numbers[1] / 2


def test_each_row_ends_at_a_dead_end_of_all() -> None:
    """A mask without tokens is that of all that share it: each says why."""
    bad = StructuredOutputsParams(grammar="start: /[a-c]{20}/ /[^\\s\\S]/" + " " * 60 + '"c"')
    params = [SamplingParams(structured_outputs=bad, temperature=0, max_tokens=60)] * 3
    with make() as llm:
        answers = llm.generate(["a"] * 3, params, use_tqdm=False)
    assert [each.outputs[0].finish_reason for each in answers] == ["error"] * 3
    assert len({each.error for each in answers}) == 1
    assert "allows no token at place" in str(answers[2].error)


def test_a_row_that_parts_follows_its_own_text() -> None:
    """Its matcher begins late, with all tokens of the output."""
    form = StructuredOutputsParams(regex="(ab|ac){6}")
    params = [SamplingParams(structured_outputs=form, seed=seed, max_tokens=40) for seed in range(12)]
    with make() as llm:
        together = [each["text"] for each in llm.generate(["a"] * 12, params, use_tqdm=False)]
        alone = [llm.generate(["a"], each, use_tqdm=False)[0]["text"] for each in params]
    assert together == alone and len(set(together)) > 3
