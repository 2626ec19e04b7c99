"""stream(deltas=True) with replicas: parts of answers arrive in order, and none is yielded twice."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from typing import Any

import inside
import pytest
from replica_answers import LONG, MIXED, PROMPTS, logprobs
from test_deltas import put_together

from nanovllm import LLM, RequestOutput, SamplingParams

SEEDED = [params.clone() for params in MIXED]
for number, each in enumerate(SEEDED):
    each.seed = number


def answers(llm: LLM, params: list[SamplingParams] | SamplingParams) -> list[RequestOutput]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert all(output.finished and output.error is None for output in outputs)
    return outputs


def texts_and_tokens(completions: list[Any]) -> list[tuple[str, list[int], str | None]]:
    return [(each.text, each.token_ids, each.finish_reason) for each in completions]


def test_put_together_they_are_the_whole(two: LLM) -> None:
    expected = answers(two, SEEDED)
    parts = list(two.stream(PROMPTS, SEEDED, deltas=True))
    assert len(parts) > 5 * len(PROMPTS)
    whole = put_together(parts)
    for output in expected:
        assert texts_and_tokens(whole[output.index]) == texts_and_tokens(output.outputs)
        mine = [part for part in parts if part.index == output.index]
        assert all(part.prompt == output.prompt for part in mine)
        values = [value for part in (mine[-1], *mine[:-1]) for value in logprobs(part)]
        assert sorted(values) == pytest.approx(sorted(logprobs(output)), abs=1e-4)
    assert len(answers(two, SEEDED)) == len(PROMPTS), "whole again"


def test_an_aborted_answer(two: LLM) -> None:
    """What has arrived, but was not yielded yet, comes before the end."""
    parts, aborted = [], None
    with closing(two.stream(PROMPTS, LONG, deltas=True)) as stream:
        for part in stream:
            parts.append(part)
            if aborted is None and part.index == 1:
                for _ in range(8):
                    inside.receive(two)
                aborted = two.abort(part.request_id)
                assert aborted is not None and two.abort(part.request_id) is None
    assert aborted is not None and aborted.prompt == PROMPTS[1]
    whole = put_together(parts)
    assert texts_and_tokens(whole[1]) == texts_and_tokens(aborted.outputs)
    reasons = [whole[index][0].finish_reason for index in range(24)]
    assert reasons == ["length", "abort"] + ["length"] * 22


def test_a_replica_that_dies_ends_the_answers_that_it_began(two: LLM) -> None:
    """All others run again. The parts of its answers are more than a pipe holds, so it has not ended them,
    however late the kill comes."""
    expected = answers(two, LONG)
    members, large = inside.members(two), LONG.clone()
    large.logprobs = 20
    with closing(two.stream(PROMPTS, large, deltas=True)) as stream:
        parts = [next(stream)]
        [process] = [each.process for each in members if int(parts[0].request_id) in each.begun]
        assert process is not None
        os.kill(process.pid or 0, signal.SIGKILL)
        parts += stream
    errors = {part.index: part.error for part in parts if part.error is not None}
    assert 1 <= len(errors) < 8
    for error in errors.values():
        assert "its replica ended after a part of the answer was yielded: replica" in error
    whole = put_together(parts)
    for output in expected:
        [answer], tokens = whole[output.index], output["token_ids"]
        assert answer.finish_reason == ("error" if output.index in errors else "length")
        assert answer.token_ids == tokens[: len(answer.token_ids) if output.index in errors else 100]
    assert not any(member.begun for member in members) and answers(two, LONG)
