"""Replicas give the answers of a single engine."""

from __future__ import annotations

import copy
import os
import pickle
import signal
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import inside
import pytest
from checked_llm import Bar
from rank_functions import asleep
from replica_answers import ENDLESS, GREEDY, LONG, MIXED, OPTIONS, PROMPTS, answer_all, logprobs, pids, same
from threads import aborted_during

from nanovllm import (
    LLM,
    BeamSearchParams,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from nanovllm.batch import StepKind
from nanovllm.config import Config
from nanovllm.engine.stats import StepStats
from nanovllm.parallel.replicas.replica import Call, Replica, Report, pack_request
from nanovllm.report import make_report
from nanovllm.text.prompts import Request, parse_prompt


def test_answers_are_those_of_one_engine(one: LLM, two: LLM) -> None:
    outputs = same(one, two, lambda llm: llm.generate(PROMPTS, MIXED, use_tqdm=False))
    assert [output.index for output in outputs] == list(range(24))
    assert [output.prompt for output in outputs] == PROMPTS
    again = same(one, two, lambda llm: llm.generate(PROMPTS, MIXED, use_tqdm=False))
    assert [each["token_ids"] for each in again[1::5]] != [each["token_ids"] for each in outputs[1::5]]
    for output in outputs:
        asked = output.index % 5 == 4
        assert (len(logprobs(output)) > 0) == asked
        moments = output.metrics
        assert moments is not None and moments.time_in_queue is not None and moments.time_in_queue >= 0
        assert moments.arrival_time <= (moments.first_token_time or 0) <= (moments.finished_time or 0)
    assert two.get_default_sampling_params() == one.get_default_sampling_params()
    messages = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[:5]]
    same(one, two, lambda llm: llm.chat(messages, GREEDY, use_tqdm=False))


def test_other_calls_are_those_of_one_engine(one: LLM, two: LLM) -> None:
    scores = [llm.score_pairs([(each, " is 7.") for each in PROMPTS], False) for llm in (one, two)]
    sums = [[each.logprob for each in each_engine] for each_engine in scores]
    assert sums[0] == pytest.approx(sums[1], abs=1e-3)
    states = [llm.embed(PROMPTS, False, pooling="mean") for llm in (one, two)]
    for own, other in zip(*states, strict=True):
        assert own.outputs is not None and other.outputs is not None and own.prompt == other.prompt
        assert own.outputs.embedding == pytest.approx(other.outputs.embedding, abs=1e-5)
    choice = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    outputs = same(one, two, lambda llm: llm.generate(PROMPTS, choice, use_tqdm=False))
    assert {output["text"] for output in outputs} <= {"yes", "no"}
    beams = [llm.beam_search(PROMPTS[:2], BeamSearchParams(2, 4)) for llm in (one, two)]
    assert [[s.tokens for s in each.sequences] for each in beams[0]] == [
        [s.tokens for s in each.sequences] for each in beams[1]
    ]
    with pytest.raises(
        ValueError, match=r"logits_processors are functions .* data_parallel_size=1, not 1 and 2"
    ):
        two.generate(PROMPTS, SamplingParams(logits_processors=[lambda ids, logits: logits]))
    with pytest.raises(ValueError, match=r"logits_processors are functions .* data_parallel_size=1"):
        list(two.stream(PROMPTS, SamplingParams(logits_processors=[lambda ids, logits: logits])))


def test_a_stream_gives_each_index_once_and_reads_no_further_than_it_says(one: LLM, two: LLM) -> None:
    num_read = 0

    def prompts() -> Iterator[str]:
        nonlocal num_read
        for number in range(60):
            num_read += 1
            yield PROMPTS[number % 24]

    expected = one.generate([PROMPTS[number % 24] for number in range(60)], GREEDY, use_tqdm=False)
    found: dict[int, RequestOutput] = {}
    for output in two.stream(prompts(), GREEDY):
        assert output.index not in found
        found[output.index] = output
        assert num_read <= len(found) + 2 * 2 * OPTIONS["max_num_seqs"]
    assert [found[index]["text"] for index in range(60)] == [output["text"] for output in expected]
    stream = two.stream(prompts(), LONG)
    next(stream)
    with pytest.raises(RuntimeError, match="a stream of this engine is open"):
        two.generate("Hello")
    assert not two.reset_prefix_cache()
    stream.close()
    assert two.is_finished()


def test_bad_prompts(one: LLM, two: LLM) -> None:
    bad: list[Any] = ["Hello", "", [5] * 10_000, [10**6], "Hello"]
    outputs = same(one, two, lambda llm: llm.generate(bad, GREEDY, use_tqdm=False, on_error="return"))
    assert [output.error is None for output in outputs] == [True, False, False, False, True]
    with pytest.raises(ValueError, match=r"prompts\[1\] is empty"):
        two.generate(bad, GREEDY)
    assert two.is_finished()


def test_add_request_step_and_abort(two: LLM) -> None:
    params = [ENDLESS, *[LONG] * 9, *[ENDLESS] * 13, LONG]
    ids = [two.add_request(*each) for each in zip(PROMPTS, params, strict=True)]
    outputs = two.step()
    waiting = two.abort(ids[-1])
    assert waiting is not None and (waiting["finish_reason"], waiting["token_ids"]) == ("abort", [])
    assert waiting.prompt == PROMPTS[-1]
    assert any(int(ids[0]) in each.requests for each in inside.members(two)), "it runs"
    aborted = two.abort(ids[0])
    assert aborted is not None and aborted["finish_reason"] == "abort"
    assert aborted.prompt == PROMPTS[0] and aborted.prompt_token_ids
    assert two.abort(ids[-1]) is None and two.abort(10**6) is None and two.abort("none") is None
    with pytest.raises(RuntimeError, match=r"request\(s\) of add_request are unfinished"):
        two.generate("Hello")
    for request in ids[10:-1]:
        two.abort(request)
    while not two.is_finished():
        outputs += two.step()
    assert sorted(each.request_id for each in outputs) == sorted(ids[1:10])
    assert two.step() == []


@pytest.mark.parametrize(("name", "index"), [("generate", 11), ("stream", 0)], ids=["waiting", "running"])
def test_another_thread_aborts_during_a_call(two: LLM, name: str, index: int) -> None:
    """The call goes on without the request and returns its output too; the others are whole."""
    prompts, params = PROMPTS[:12], [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)] * 12
    if name == "stream":
        params[index] = ENDLESS

    def answer() -> list[RequestOutput]:
        if name == "generate":
            return two.generate(prompts, params, use_tqdm=False)
        return sorted(two.stream(prompts, params), key=lambda output: output.index)

    outputs, aborted = aborted_during(two, inside.next_id(two) + index, answer)
    assert aborted == outputs[index] and aborted["finish_reason"] == "abort"
    assert len(aborted["token_ids"]) < (ENDLESS.max_tokens if name == "stream" else 1)
    others = [output for output in outputs if output is not outputs[index]]
    assert [len(output["token_ids"]) for output in others] == [40] * 11
    assert two.is_finished() and two.abort(aborted.request_id) is None


@pytest.mark.parametrize("replicas", [False, True], ids=["one", "two"])
def test_another_thread_aborts_scores_and_embeddings(one: LLM, two: LLM, replicas: bool) -> None:
    """`score` raises, for its result has no place for a missing score; `embed` returns an error."""
    llm: LLM = two if replicas else one
    prompts = [f"{prompt} And {number}." for number, prompt in enumerate(PROMPTS)]
    pairs = [(prompt, " is 7.") for prompt in prompts]
    with pytest.raises(RuntimeError, match="pair 23 was aborted"):
        aborted_during(llm, inside.next_id(llm) + 23, lambda: llm.score_pairs(pairs, False))
    assert llm.is_finished()
    embed = partial(llm.embed, prompts, False)
    found, aborted = aborted_during(llm, inside.next_id(llm) + 23, embed)
    assert aborted is not None and aborted["finish_reason"] == "abort"
    assert [each.error is None for each in found] == [True] * 23 + [False]
    assert found[23].outputs.embedding == [] and "aborted" in str(found[23].error)
    assert llm.is_finished() and all(each.error is None for each in embed())


def test_the_prefix_cache_can_be_reset(two: LLM) -> None:
    prompts = [[5 + number] * 70 for number in range(8)]
    two.generate(prompts, GREEDY, use_tqdm=False)
    assert all(each.num_cached_tokens > 0 for each in two.generate(prompts, GREEDY, use_tqdm=False))
    router = inside.replicas(two).router
    for empty in (two.reset_prefix_cache, two.sleep):
        assert any(inside.held_prefixes(router))
        empty()
        assert not any(inside.held_prefixes(router)), "nothing is expected in an empty cache"
        two.wake_up()
        assert all(each.num_cached_tokens == 0 for each in two.generate(prompts, GREEDY, use_tqdm=False))


def test_a_new_tokenizer_decodes_the_outputs(one: LLM, two: LLM) -> None:
    before = two.get_tokenizer()
    other = copy.deepcopy(before)
    other.add_special_tokens({"additional_special_tokens": ["+"]})
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.copy(two)
    try:
        one.tokenizer = two.tokenizer = other
        texts = [each["text"] for each in same(one, two, lambda llm: llm.generate(PROMPTS, GREEDY, False))]
    finally:
        one.tokenizer = two.tokenizer = before
    assert not any("+" in text for text in texts)
    assert any("+" in each["text"] for each in two.generate(PROMPTS, GREEDY, use_tqdm=False))


def test_replicas_sleep_and_wake_up(one: LLM, two: LLM) -> None:
    """A replica that dies while all sleep is asleep again after its restart."""
    answers = same(one, two, answer_all)
    two.sleep()
    with pytest.raises(RuntimeError, match=r"this engine sleeps \(weights and kv_cache\)"):
        two.generate(PROMPTS)
    os.kill(pids(two)[1], signal.SIGKILL)
    two.wake_up(["weights"])
    assert two.is_sleeping() and inside.replicas(two).call(asleep) == [frozenset({"kv_cache"})] * 2
    two.wake_up()
    assert not two.is_sleeping() and inside.replicas(two).call(asleep) == [frozenset()] * 2
    assert len(same(one, two, answer_all)) == len(answers)


def test_calls_that_need_one_engine(two: LLM) -> None:
    assert two.is_finished()


def test_every_replica_leaves_a_trace(two: LLM, tmp_path: Path) -> None:
    """Also one that restarts meanwhile."""
    with pytest.raises(RuntimeError, match=r"no profile is on; call start_profile\(\) first"):
        two.stop_profile()
    two.start_profile(tmp_path / "new")
    with pytest.raises(RuntimeError, match=r"a profile is already on; call stop_profile\(\) first"):
        two.start_profile(tmp_path)
    os.kill(pids(two)[1], signal.SIGKILL)
    two.generate(PROMPTS, GREEDY, use_tqdm=False)
    traces = two.stop_profile()
    assert [path.name.split(".")[:2] for path in traces] == [["rank0", "replica0"], ["rank0", "replica1"]]
    assert sorted(traces) == sorted((tmp_path / "new").iterdir())
    with pytest.raises(RuntimeError, match="no profile is on"):
        two.stop_profile()


def test_progress_and_statistics(two: LLM) -> None:
    bar, steps = Bar(), list[StepStats]()
    before = two.stats()
    two.on_step = steps.append
    try:
        two.generate(PROMPTS, GREEDY, bar)
    finally:
        two.on_step = None
    assert (bar.total, bar.done, bar.closed) == (24, 24, True)
    assert sum(step.num_finished for step in steps) == 24
    stats = two.stats()
    assert stats.num_finished_requests - before.num_finished_requests == 24
    assert stats.num_output_tokens - before.num_output_tokens == 24 * 12
    assert stats.num_unfinished_requests == stats.num_running == stats.num_waiting == 0
    assert 0 < stats.peak_kv_cache_usage <= 1
    assert sum(step.num_drawn_tokens for step in steps) == 24 * 12
    assert max(step.num_seqs for step in steps) <= OPTIONS["max_num_seqs"]


def test_a_report_of_all_replicas(two: LLM) -> None:
    two.generate(PROMPTS, LONG, use_tqdm=False)
    page = ElementTree.fromstring(make_report(two).encode())
    cells = {row[0].text: row[1].text for row in page.iter("tr")}
    stats = two.stats()
    assert cells["Devices"] == "2 x cpu" and cells["Requests"] == str(stats.num_requests)
    assert cells["Output tokens"] == f"{stats.num_output_tokens:,}" and stats.num_output_tokens >= 24 * 100
    points = stats.timeline()
    assert sum(point.num_context_tokens for point in points) > stats.num_decoded_tokens
    assert OPTIONS["max_num_seqs"] < max(point.num_running for point in points), "those of both are counted"


def test_any_thread_may_ask_for_statistics_while_a_replica_reports(two: LLM) -> None:
    class Told:
        """The last report of a replica. Reading it adds another report."""

        num_running, num_waiting, kv_cache_usage = 1, 0, 0.5

        def __getattribute__(self, name: str) -> Any:
            told[len(told)] = self
            return object.__getattribute__(self, name)

    told: dict[int, Any] = {}
    told[0] = Told()
    with pytest.MonkeyPatch.context() as patch:
        inside.set_last_stats(patch, two, told)
        assert two.stats().num_running == 1


def test_prompts_with_a_common_prefix_go_to_one_replica(two: LLM) -> None:
    """Each replica computes half of the prefixes; only their first prompts find nothing in a cache."""
    two.reset_prefix_cache()
    begin = [[20 + group] * 100 for group in range(6)]
    prompts = [begin[number % 6] + [60 + number] * 5 for number in range(60)]
    outputs = two.generate(prompts, GREEDY, use_tqdm=False)
    assert sum(each.num_cached_tokens == 0 for each in outputs) <= 9


def test_a_step_is_told_in_few_bytes(model: Path) -> None:
    """Of 64 rows with 63 blocks each: numbers, and nothing for each row or block."""
    rows, block = 64, 8
    sent: list[Any] = []

    class Recorder:
        def send(self, message: object) -> None:
            sent.append(message)

    class Ended:
        """An inbox with requests, whose end comes after some steps."""

        def __init__(self, requests: list[Request]) -> None:
            self.messages = [Call(Replica.add, (requests, False), has_reply=False)]

        def has_message(self) -> bool:
            return bool(self.messages) or len(sent) > 4

        def receive(self) -> Call | None:
            return self.messages.pop() if self.messages else None

        send = Recorder.send

    options = {"device": "cpu", "skip_tokenizer_init": True, "max_num_seqs": rows, "max_model_len": 512}
    config = Config.from_kwargs(str(model), **options, kvcache_block_size=block)
    prompt, params = parse_prompt([5] * 500, "it"), SamplingParams(max_tokens=8, ignore_eos=True)
    with closing(Replica(0, config, Recorder())) as replica:  # type: ignore[arg-type]
        sent.clear()
        make = replica.requests.processor.make_requests
        made = make([prompt] * rows, [params] * rows, 0)
        requests = [pack_request(each) for each in made if isinstance(each, Request)]
        replica.serve(Ended(requests))  # type: ignore[arg-type]
    steps = [each for each in sent if isinstance(each, Report) and each.stats.num_seqs == rows]
    assert len(steps) > 1 and steps[-1].stats.kind is StepKind.DECODE
    for each in steps:
        assert len(pickle.dumps(each.stats)) <= 512
        assert len(ForkingPickler.dumps(each)) <= 16 * rows
