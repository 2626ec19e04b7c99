"""Structured outputs and the other token rules through the engine, with the demo model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import inside
import jsonschema
import pytest
from checked_llm import CheckedLLM
from random_schemas import random_schema

from nanovllm import LLM, SamplingParams, StructuredOutputsParams, demo_model_path
from nanovllm.checks import show
from nanovllm.outputs import RequestOutput

ENGINES: dict[str, dict[str, Any]] = {
    "ahead": {},
    "in_step": {"async_scheduling": False},
    "tight": {"num_kvcache_blocks": 40, "kvcache_block_size": 4, "max_num_batched_tokens": 13},
    "two_ranks": {"tensor_parallel_size": 2},
}
# Constraints, each with a pattern that the text must match.
KINDS: list[tuple[dict[str, Any], str]] = [
    ({}, "(?s).*"),
    ({"structured_outputs": StructuredOutputsParams(regex="[a-c]{3,6}-[0-9]{2}")}, "[a-c]{3,6}-[0-9]{2}"),
    ({"bad_words": ["e", "th", "L"], "temperature": 0}, r"(?s)[^eL]*"),
    ({"structured_outputs": StructuredOutputsParams(choice=["red", "green"])}, "red|green"),
    ({"temperature": 0}, "(?s).*"),
    ({"allowed_token_ids": [67, 68, 69]}, "[abc]{24}"),
    ({"structured_outputs": StructuredOutputsParams(grammar='root ::= "x" | "(" root ")"')}, r"\(*x\)*"),
    ({"min_tokens": 20, "stop_token_ids": list(range(3, 300))}, "(?s).*"),
]


def make(**options: Any) -> CheckedLLM:
    defaults = {"device": "cpu", "async_scheduling": True, "max_model_len": 96, "dtype": "float32"}
    defaults |= {"max_num_seqs": 32, "kvcache_block_size": 32}  # room for all rows, in little memory
    return CheckedLLM(demo_model_path(), **defaults | options)


def requests() -> tuple[list[str], list[SamplingParams]]:
    params = [
        SamplingParams(**{"max_tokens": 24, "seed": index} | KINDS[index % len(KINDS)][0])
        for index in range(24)
    ]
    return [f"Question {index}:" for index in range(24)], params


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """The tokens of each request when it runs alone."""
    with make() as llm:
        return [
            llm.generate(*each, use_tqdm=False)[0].outputs[0].token_ids
            for each in zip(*requests(), strict=True)
        ]


@pytest.mark.parametrize("name", ENGINES)
def test_a_mixed_batch_is_its_rows_alone(name: str, alone: list[list[int]]) -> None:
    """Also for rows without rules; with preemption, chunked prefill and several ranks."""
    prompts, params = requests()
    with make(**ENGINES[name]) as llm:
        free = llm.num_free_blocks
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.num_free_blocks == free
        if name == "tight":
            assert any(seq.num_preemptions and seq.extras and seq.extras.rules for seq in llm.sequences)
    for index, (output, expected) in enumerate(zip(outputs, alone, strict=True)):
        assert output.outputs[0].token_ids == expected, index
        constraint, pattern = KINDS[index % len(KINDS)]
        [completion] = output.outputs
        if "structured_outputs" not in constraint or completion.finish_reason == "stop":
            assert re.fullmatch(pattern, completion.text), (index, completion.text)
        if "min_tokens" in constraint:
            assert 20 < len(expected) <= 24 and completion.finish_reason == "stop"
    structured = [
        output.outputs[0] for output, each in zip(outputs, params, strict=True) if each.structured_outputs
    ]
    assert sum(completion.finish_reason == "stop" for completion in structured) >= 6


@pytest.mark.parametrize("name", ["ahead", "tight"])
def test_the_schedule_is_that_without_constraints(name: str) -> None:
    """Rows with a constraint neither wait nor make others wait."""
    prompts = [f"Question {index}:" for index in range(12)]
    plans = []
    for constraint in (None, StructuredOutputsParams(regex="[a-z]{400}")):
        params = [
            SamplingParams(max_tokens=9 + index, ignore_eos=True, structured_outputs=form)
            for index, form in enumerate([None, constraint] * 6)
        ]
        with make(**ENGINES[name]) as llm:
            llm.generate(prompts, params, use_tqdm=False)
            plans.append([(batch.kind, batch.seq_ids, batch.query_lens.tolist()) for batch in llm.batches])
    assert plans[0] == plans[1]


@pytest.fixture(scope="module")
def llm() -> Iterator[CheckedLLM]:
    with make(max_model_len=512, max_num_seqs=128) as llm:
        yield llm


def test_a_thousand_schemas(llm: LLM) -> None:
    """Every output is valid unless it reached max_tokens."""
    schemas = [random_schema(seed) for seed in range(1000)]
    params = [
        SamplingParams(
            structured_outputs=StructuredOutputsParams(json=schema),
            max_tokens=60,
            seed=seed,
        )
        for seed, schema in enumerate(schemas)
    ]
    outputs = llm.generate(["As JSON:"] * len(schemas), params, use_tqdm=False)
    checker, num_complete = jsonschema.Draft202012Validator.FORMAT_CHECKER, 0
    for schema, output in zip(schemas, outputs, strict=True):
        if output.outputs[0].finish_reason == "stop":
            num_complete += 1
            jsonschema.validate(json.loads(output.outputs[0].text), schema, format_checker=checker)
        else:
            assert output.outputs[0].finish_reason == "length"
    assert num_complete > 700


def test_samples_of_one_request(llm: LLM) -> None:
    choices = ["red", "green", "blue", "grey"]
    structured = StructuredOutputsParams(choice=choices)
    [output] = llm.generate(
        "Colour:",
        SamplingParams(n=20, temperature=3, max_tokens=12, structured_outputs=structured),
        use_tqdm=False,
    )
    texts = [completion.text for completion in output.outputs]
    assert set(texts) <= set(choices) and len(set(texts)) > 1
    assert {completion.finish_reason for completion in output.outputs} == {"stop"}
    assert {completion.stop_reason for completion in output.outputs} <= {None, 0}


def test_a_stream_of_constraints_and_bad_rows(llm: LLM) -> None:
    """Constraints are compiled as prompts are read; only the request whose rules leave no token ends with an
    error.
    """

    def params() -> Iterator[SamplingParams]:
        for index in range(200):
            if index % 10 == 3:
                yield SamplingParams(allowed_token_ids=[70], bad_words=["d"], max_tokens=8)
            else:
                structured = StructuredOutputsParams(regex=f"{index}-[ab]")
                yield SamplingParams(structured_outputs=structured, max_tokens=20)

    outputs: dict[int, RequestOutput] = {
        output.index: output for output in llm.stream((f"n {index}" for index in range(200)), params())
    }
    assert sorted(outputs) == list(range(200))
    for index, output in outputs.items():
        if index % 10 == 3:
            assert (
                output.error is not None
                and "no token was left by allowed_token_ids, bad_words" in output.error
            )
        else:
            assert re.fullmatch(f"{index}-[ab]", output.outputs[0].text)


def test_a_constraint_that_no_text_satisfies_is_named(llm: LLM) -> None:
    """Where that shows only at a late token; the logits are not blamed."""
    bad = StructuredOutputsParams(grammar="start: /[a-z]{40}/ /[^\\s\\S]/" + " " * 60 + '"c"')
    params = [SamplingParams(structured_outputs=bad, n=2, seed=1), SamplingParams(max_tokens=3)]
    answer, other = llm.generate(["a", "b"], params, use_tqdm=False)
    assert [each.finish_reason for each in answer.outputs] == ["error"] * 2 and other.error is None
    place, named = len(answer.outputs[0].token_ids), f"grammar {show(bad.grammar)}"
    assert answer.error == (
        f"structured_outputs: {named} allows no token at place {place} of the output; no text that begins "
        "like this output satisfies it"
    )


def test_a_wrong_constraint_is_found_before_anything_runs(llm: CheckedLLM) -> None:
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(a"))
    num_batches = len(llm.batches)
    with pytest.raises(ValueError, match=r"prompts\[1\]: structured_outputs: regex: .*"):
        llm.generate(["a", "b"], [SamplingParams(), bad], use_tqdm=False)
    assert len(llm.batches) == num_batches and llm.is_finished()
    compiled = []
    compiler = inside.grammars(llm)
    constraint = compiler.constraint
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "constraint", lambda params: compiled.append(1) or constraint(params))
        answers = llm.generate(["a"] * 20, bad, use_tqdm=False, on_error="return")
    assert len(compiled) == 1, "once for all prompts of a call"
    for index, answer in enumerate(answers):
        assert str(answer.error).startswith(f"prompts[{index}]: structured_outputs: regex: ")
    outputs = llm.stream(iter(["a", "b"]), iter([SamplingParams(max_tokens=2), bad]))
    with pytest.raises(ValueError, match=r"regex"):
        list(islice(outputs, 5))
    assert llm.is_finished()


def test_choices_that_max_tokens_cuts_are_named_before_they_run(
    llm: CheckedLLM, caplog: pytest.LogCaptureFixture
) -> None:
    """Once. The first tokens of a choice may be all that is asked for, so it is no error."""
    form = StructuredOutputsParams(choice=["no", "never again"])
    most = len(llm.get_tokenizer().encode("never again", add_special_tokens=False))
    for max_tokens in (most, most - 1, most - 1):
        params = SamplingParams(structured_outputs=form, max_tokens=max_tokens)
        llm.generate(["a", "b"], params, use_tqdm=False)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == [
        f"structured_outputs, choice: max_tokens={most - 1} cuts 'never again', which has {most} tokens; "
        "allow as many"
    ]
