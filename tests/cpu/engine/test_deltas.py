"""`stream(deltas=True)`: the parts of an answer add up to the whole answer."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import inside
import pytest
from checked_llm import CheckedLLM, make_tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from test_texts import KINDS, TOKENIZERS, encode, model_for

from nanovllm import LLM, CompletionOutput, RequestOutput, SamplingParams, demo_model_path
from nanovllm.extras.stop_strings import StopSearch, StopStrings

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[CheckedLLM]:
    with make_tiny(model, max_num_seqs=4, async_scheduling=False) as llm:
        yield llm


def put_together(parts: Iterable[RequestOutput]) -> dict[int, list[CompletionOutput]]:
    """Join parts, after checking them, to whole completions by prompt index."""
    texts: dict[tuple[int, int], str] = defaultdict(str)
    token_ids: dict[tuple[int, int], list[int]] = defaultdict(list)
    whole: dict[int, dict[int, CompletionOutput]] = defaultdict(dict)
    finished: set[int] = set()
    for output in parts:
        assert output.index not in finished and output.outputs
        assert output.finished == (output.metrics is not None or output.error is not None)
        for part in output.outputs:
            key = output.index, part.index
            assert part.index not in whole[output.index], "it had ended"
            assert part.token_ids or part.finished()
            texts[key] += part.text
            token_ids[key] += part.token_ids
            if part.finished():
                ended = None, None, part.finish_reason, part.stop_reason
                whole[output.index][part.index] = CompletionOutput(
                    part.index, texts[key], token_ids[key], *ended
                )
        if output.finished:
            finished.add(output.index)
    assert finished == set(whole)
    return {index: [each[i] for i in sorted(each)] for index, each in whole.items()}


@pytest.mark.parametrize(
    "options",
    [{}, {"async_scheduling": True}, {"async_scheduling": True, "num_kvcache_blocks": 9}],
    ids=["in_step", "ahead", "tight"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_joined_deltas_equal_the_whole_output(kind: str, options: dict[str, int], tmp_path: Path) -> None:
    """With several completions, stop strings split at any place, stop tokens or none, and preemption."""
    rng, count = random.Random(2), 20
    path = model_for(TOKENIZERS[kind], tmp_path)
    prompts = [encode(kind, "Hello the world, 日本" + "x" * index) for index in range(count)]
    params = [SamplingParams(n=1 + i % 3, temperature=3.0, seed=i, max_tokens=24) for i in range(count)]
    with CheckedLLM(path, device="cpu", max_model_len=64, kvcache_block_size=8, **options) as llm:
        full = llm.generate(prompts, params, use_tqdm=False)
        for param, output in zip(params, full, strict=True):
            text = output.outputs[-1].text
            at = rng.randrange(max(1, len(text) - 3))
            param.stop = [text[at : at + rng.randint(1, 3)] or "x", text[at : at + 2] + "???", "???"]
            param.include_stop_str_in_output = rng.random() < 0.3
        params[4].stop = []
        full = llm.generate(prompts, params, use_tqdm=False)
        parts = list(llm.stream(prompts, params, deltas=True))
        assert len(parts) > 3 * count
        whole = put_together(parts)
        for output in full:
            for got, expected in zip(whole[output.index], output.outputs, strict=True):
                assert got == expected
        texts = [each.text for output in full for each in output.outputs]
        assert sum("\ufffd" in text for text in texts) > 5
        reasons = [c.stop_reason for output in full for c in output.outputs]
        assert sum(isinstance(reason, str) for reason in reasons) >= 10
        again = sorted(llm.stream(prompts, params), key=lambda output: output.index)
        assert [output.outputs for output in again] == [output.outputs for output in full]
        assert not inside.stop_searches(llm)


def test_each_step_gives_its_tokens(llm: CheckedLLM) -> None:
    short = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with closing(llm.stream([[5, 6], [7] * 9], [GREEDY, short], deltas=True)) as parts:
        first = next(parts)
        assert (first.finished, first["finish_reason"], len(first["token_ids"])) == (False, None, 1)
        assert not first.outputs[0].finished() and first.metrics is None
        assert (first.prompt_token_ids, first.index) == ([5, 6], 0)
        rest = list(parts)
    assert [output.index for output in rest] == [1, 1, 0, 1, 0, 0, 0, 0]
    assert [len(output["token_ids"]) for output in rest] == [1] * 8
    assert [output.finished for output in rest] == [False] * 3 + [True] + [False] * 3 + [True]
    assert rest[-1].request_id == first.request_id and rest[-1].metrics is not None


def test_a_completion_that_ends_before_its_siblings(llm: CheckedLLM) -> None:
    params = SamplingParams(n=3, temperature=1, seed=3, max_tokens=24, stop_token_ids=range(24))
    [expected] = llm.generate([[5] * 20], params, use_tqdm=False)
    assert len({len(completion.token_ids) for completion in expected.outputs}) > 1
    parts = list(llm.stream([[5] * 20], params, deltas=True))
    assert put_together(parts) == {0: expected.outputs}
    ended = [part for output in parts[:-1] for part in output.outputs if part.finished()]
    assert ended and all(part.finish_reason == "stop" for part in ended)
    assert parts[-1].num_cached_tokens == parts[0].num_cached_tokens


def test_logprobs_come_with_their_tokens(llm: CheckedLLM) -> None:
    params = SamplingParams(n=2, seed=5, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    [expected] = llm.generate([[5] * 9], params, use_tqdm=False)
    parts = list(llm.stream([[5] * 9], params, deltas=True))
    for completion in expected.outputs:
        mine = [part for output in parts for part in output.outputs if part.index == completion.index]
        assert [len(part.logprobs) for part in mine] == [len(part.token_ids) for part in mine]
        assert [each for part in mine for each in part.logprobs] == list(completion.logprobs)
        assert [part.cumulative_logprob for part in mine[:-1]] == [None] * 5
        assert mine[-1].cumulative_logprob == completion.cumulative_logprob
    assert parts[-1].prompt_logprobs == expected.prompt_logprobs and parts[0].prompt_logprobs is None


def test_refused_and_aborted_prompts(llm: CheckedLLM) -> None:
    prompts = [[5], [], [6, 7]]
    parts, aborted = [], None
    for output in llm.stream(prompts, GREEDY, on_error="return", deltas=True):
        parts.append(output)
        if output.index == 2 and aborted is None and sum(each.index == 2 for each in parts) == 2:
            aborted = llm.abort(output.request_id)
            assert aborted.finished and len(aborted["token_ids"]) == 2
    whole = put_together(parts)
    assert whole[2][0].token_ids == aborted["token_ids"] and whole[2][0].finish_reason == "abort"
    assert whole[1][0].finish_reason == "error" and len(whole[0][0].token_ids) == 6
    with pytest.raises(TypeError, match="deltas must be True or False, not 1"):
        llm.stream(prompts, GREEDY, deltas=1)


def test_a_stream_without_deltas_decodes_nothing() -> None:
    with LLM(demo_model_path(), device="cpu", num_kvcache_blocks=64) as llm:
        stream = llm.stream(["What is 2 + 3?"] * 3, [SamplingParams(max_tokens=1), GREEDY, GREEDY])
        next(stream)
        assert not inside.stop_searches(llm)
        list(stream)
        texts = llm.stream(["What is 2 + 3?"], GREEDY, deltas=True)
        silent = GREEDY.clone()
        silent.detokenize = False
        tokens = llm.stream(["What is 2 + 3?"], silent, deltas=True)
        [[text], [ids]] = put_together(texts).values(), put_together(tokens).values()
        assert text[0].text and not ids[0].text and text[0].token_ids == ids[0].token_ids


class Pieces:
    """A stand-in for a text stream: each token is a text."""

    def append(self, token_id: int) -> str:
        return "abc"[token_id % 3] * (1 + token_id // 3)


@settings(max_examples=300, deadline=None)
@given(
    token_ids=st.lists(st.integers(0, 8), max_size=20),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_no_delta_has_text_that_is_cut_later(token_ids: list[int], stops: list[str]) -> None:
    stop, given_, whole = StopStrings(StopSearch(stops), Pieces()), "", ""
    for token_id in token_ids:
        whole += Pieces().append(token_id)
        if stop.append(token_id):
            assert stop.text(include=False).startswith(given_) and stop.text(include=True).startswith(given_)
            return
        given_ += stop.take()
        held = whole.removeprefix(given_)
        assert given_ + held == whole
        assert not held or any(each.startswith(held) for each in stops), "no more than needed is held back"
