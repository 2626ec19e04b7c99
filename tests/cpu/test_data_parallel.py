"""Replicas give the answers of a single engine, and continue when one of them dies."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from socket import SO_SNDTIMEO, SOL_SOCKET, socket
from struct import pack
from typing import Any
from xml.etree import ElementTree

import endings
import pytest
from checked_llm import Bar
from threads import in_threads
from tiny_models import VOCAB_SIZE

from nanovllm import (
    LLM,
    BeamSearchParams,
    EngineClosedError,
    KVCacheMemoryError,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
    WorkerError,
    demo_model_path,
)
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.stats import StepStats
from nanovllm.llm import ReplicatedLLM
from nanovllm.replicas import pool
from nanovllm.report import make_report

OPTIONS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4, "num_kvcache_blocks": 200}
TINY: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 64}
PROMPTS = [f"Add {3 * number} and {7 * number}." for number in range(24)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    with LLM(demo_model_path(), **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def two() -> Iterator[ReplicatedLLM]:
    with LLM(demo_model_path(), data_parallel_size=2, **OPTIONS) as llm:
        assert isinstance(llm, ReplicatedLLM)
        yield llm
        assert llm.is_finished()


def same(one: LLM, two: LLM, answer: Callable[[LLM], Any]) -> list[RequestOutput]:
    """Whether both engines gave the same answers. Cached tokens and the last bits of logprobs may differ."""
    one._requests.next_id = two._requests.next_id  # seeds follow from request numbers
    expected, outputs = answer(one), answer(two)
    for own, other in zip(expected, outputs, strict=True):
        assert without_logprobs(own) == without_logprobs(other)
        assert logprobs(own) == pytest.approx(logprobs(other), abs=1e-4)
    return outputs


def without_logprobs(output: RequestOutput) -> RequestOutput:
    completions = [replace(each, logprobs=None, cumulative_logprob=None) for each in output.outputs]
    no_others: dict[str, Any] = {"num_cached_tokens": 0, "metrics": None, "prompt_logprobs": None}
    return replace(output, outputs=completions, **no_others)


def logprobs(output: RequestOutput) -> list[float]:
    """The logprobs of all tokens, in order."""
    lists = [output.prompt_logprobs, *(each.logprobs for each in output.outputs)]
    tokens = [token for each in lists for token in each or () if token is not None]
    return [next(iter(token.values())).logprob for token in tokens]


def pids(llm: ReplicatedLLM) -> list[int]:
    return [process.pid or 0 for process in llm._replicas.processes]


# -- the same answers ----------------------------------------------------------------------------------------


MIXED = [
    GREEDY,
    SamplingParams(temperature=1.0, max_tokens=12),
    SamplingParams(temperature=1.0, seed=5, top_p=0.9, max_tokens=12),
    SamplingParams(temperature=0.8, n=3, max_tokens=8),
    SamplingParams(temperature=0.8, stop=["1", "\n"], max_tokens=20, logprobs=3, prompt_logprobs=2),
] * 5
MIXED.pop()  # one for each prompt


def test_answers_are_those_of_one_engine(one: LLM, two: ReplicatedLLM) -> None:
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


def test_other_calls_are_those_of_one_engine(one: LLM, two: ReplicatedLLM) -> None:
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


def test_a_stream_gives_each_index_once_and_reads_no_further_than_it_says(
    one: LLM, two: ReplicatedLLM
) -> None:
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


def test_bad_prompts(one: LLM, two: ReplicatedLLM) -> None:
    bad: list[Any] = ["Hello", "", [5] * 10_000, [10**6], "Hello"]
    outputs = same(one, two, lambda llm: llm.generate(bad, GREEDY, use_tqdm=False, on_error="return"))
    assert [output.error is None for output in outputs] == [True, False, False, False, True]
    with pytest.raises(ValueError, match=r"prompts\[1\] is empty"):
        two.generate(bad, GREEDY)
    assert two.is_finished()


def test_add_request_step_and_abort(two: ReplicatedLLM) -> None:
    ids = [two.add_request(prompt, LONG) for prompt in PROMPTS]
    outputs = two.step()
    running = next(str(request) for each in two._replicas._members for request in each.requests)
    aborted = two.abort(running)
    assert aborted is not None and aborted["finish_reason"] == "abort"
    assert aborted.prompt == PROMPTS[ids.index(running)] and aborted.prompt_token_ids
    waiting = two.abort(ids[-1])
    assert waiting is not None and (waiting["finish_reason"], waiting["token_ids"]) == ("abort", [])
    assert waiting.prompt == PROMPTS[-1]
    assert two.abort(ids[-1]) is None and two.abort(10**6) is None and two.abort("none") is None
    with pytest.raises(RuntimeError, match=r"request\(s\) of add_request are unfinished"):
        two.generate("Hello")
    for request in ids[10:-1]:
        two.abort(request)
    while not two.is_finished():
        outputs += two.step()
    assert sorted(each.request_id for each in outputs) == sorted(set(ids[:10]) - {running})
    assert two.step() == []


def test_the_prefix_cache_can_be_reset(two: ReplicatedLLM) -> None:
    prompts = [[5 + number] * 70 for number in range(8)]
    two.generate(prompts, GREEDY, use_tqdm=False)
    assert all(each.num_cached_tokens > 0 for each in two.generate(prompts, GREEDY, use_tqdm=False))
    router = two._replicas.router
    for empty in (two.reset_prefix_cache, two.sleep):
        assert any(router._held)
        empty()
        assert not any(router._held), "nothing is expected in an empty cache"
        two.wake_up()
        assert all(each.num_cached_tokens == 0 for each in two.generate(prompts, GREEDY, use_tqdm=False))


def test_a_new_tokenizer_decodes_the_outputs(one: LLM, two: ReplicatedLLM) -> None:
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


def test_replicas_sleep_and_wake_up(one: LLM, two: ReplicatedLLM) -> None:
    """A replica that dies while all sleep is asleep again after its restart."""
    answers = same(one, two, answer_all)
    two.sleep()
    with pytest.raises(RuntimeError, match=r"this engine sleeps \(weights and kv_cache\)"):
        two.generate(PROMPTS)
    os.kill(pids(two)[1], signal.SIGKILL)
    two.wake_up(["weights"])
    assert two.is_sleeping() and two._replicas.call("is_sleeping") == [True, True]
    two.wake_up()
    assert not two.is_sleeping() and two._replicas.call("is_sleeping") == [False, False]
    assert len(same(one, two, answer_all)) == len(answers)


def test_calls_that_need_one_engine(two: ReplicatedLLM) -> None:
    assert two.is_finished()


def test_every_replica_leaves_a_trace(two: ReplicatedLLM, tmp_path: Path) -> None:
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


def test_progress_and_statistics(two: ReplicatedLLM) -> None:
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


def test_a_report_of_all_replicas(two: ReplicatedLLM) -> None:
    two.generate(PROMPTS[:8], GREEDY, use_tqdm=False)
    page = ElementTree.fromstring(make_report(two).encode())
    cells = {row[0].text: row[1].text for row in page.iter("tr")}
    stats = two.stats()
    assert cells["Devices"] == "2 x cpu" and cells["Requests"] == str(stats.num_requests)
    assert cells["Output tokens"] == f"{stats.num_output_tokens:,}" and stats.num_output_tokens >= 8 * 12
    points = stats.timeline()
    assert sum(point.num_context_tokens for point in points) > stats.num_decoded_tokens
    assert OPTIONS["max_num_seqs"] < max(point.num_running for point in points), "those of both are counted"


def test_any_thread_may_ask_for_statistics_while_a_replica_reports(two: ReplicatedLLM) -> None:
    class Told:
        """The last report of a replica. Reading it adds another report."""

        num_running, num_waiting, kv_cache_usage = 1, 0, 0.5

        def __getattribute__(self, name: str) -> Any:
            told[len(told)] = self
            return object.__getattribute__(self, name)

    told: dict[int, Any] = {}
    told[0] = Told()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two, "_last_stats", told)
        assert two.stats().num_running == 1


def test_prompts_with_a_common_prefix_go_to_one_replica(two: ReplicatedLLM) -> None:
    """Each replica computes half of the prefixes; only their first prompts find nothing in a cache."""
    two.reset_prefix_cache()
    begin = [[20 + group] * 100 for group in range(6)]
    prompts = [begin[number % 6] + [60 + number] * 5 for number in range(60)]
    outputs = two.generate(prompts, GREEDY, use_tqdm=False)
    assert sum(each.num_cached_tokens == 0 for each in outputs) <= 9


# -- faults --------------------------------------------------------------------------------------------------


def signalled(one: LLM, two: ReplicatedLLM, number: signal.Signals) -> None:
    """Send a signal to the first replica after the first answer; check that `two` answers as `one`."""

    def answer(llm: LLM) -> list[RequestOutput]:
        stream = llm.stream(PROMPTS, MIXED)
        outputs = [next(stream)]
        if llm is two:
            os.kill(pids(two)[0], number)
        outputs += stream
        assert len(outputs) == 24
        return sorted(outputs, key=lambda output: output.index)

    same(one, two, answer)


def test_a_replica_that_is_killed_is_started_again(one: LLM, two: ReplicatedLLM) -> None:
    """Its requests run again and the other replica continues; the answers are the same."""
    before = pids(two)
    signalled(one, two, signal.SIGKILL)
    assert len(two._replicas.call("ready")) == 2, "it is back"
    after = pids(two)
    assert len(after) == 2 and after[1] == before[1] and after[0] != before[0]
    same(one, two, answer_all)


def answer_all(llm: LLM) -> list[RequestOutput]:
    return llm.generate(PROMPTS, MIXED, use_tqdm=False)


def test_a_replica_that_hangs_is_started_again(
    one: LLM, two: ReplicatedLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool, "HANG_SECONDS", 3.0)
    before = pids(two)
    signalled(one, two, signal.SIGSTOP)
    assert "replica 0: it hung, without a word for 3 s, and was killed; it is started again" in caplog.text
    assert len(two._replicas.call("ready")) == 2 and pids(two)[0] != before[0]


def test_a_stream_that_is_left_waits_for_no_step(one: LLM, two: ReplicatedLLM) -> None:
    """A slow replica lives on, and what its step computed counts nowhere."""
    before = pids(two)
    stream = two.stream(PROMPTS, LONG)
    next(stream)
    os.kill(before[1], signal.SIGSTOP)
    stream.close()
    assert two.is_finished() and two.stats().num_running == 0
    os.kill(before[1], signal.SIGCONT)
    two._replicas.call("ready")
    assert not two._replicas._arrivals
    same(one, two, answer_all)
    assert pids(two) == before


def test_a_replica_that_hangs_while_idle_is_started_again(
    one: LLM, two: ReplicatedLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool, "HANG_SECONDS", 2.0)
    before = pids(two)
    os.kill(before[1], signal.SIGSTOP)
    assert two.reset_prefix_cache()
    assert "replica 1: it hung, without a word for 2 s, and was killed; it is started again" in caplog.text
    assert pids(two)[0] == before[0] and pids(two)[1] != before[1]
    same(one, two, answer_all)


def test_a_replica_that_reads_nothing_is_killed(two: ReplicatedLLM) -> None:
    """A replica that does not read its pipe cannot block the caller for ever, even if the pipe is full."""
    member = two._replicas._members[0]
    with socket(fileno=os.dup(member.pipe.fileno())) as end:
        end.setsockopt(SOL_SOCKET, SO_SNDTIMEO, pack("ll", 1, 0))
    before = pids(two)
    os.kill(before[0], signal.SIGSTOP)
    member.send(bytes(2**22))
    assert len(two.generate(PROMPTS, GREEDY, use_tqdm=False)) == 24
    assert len(two._replicas.call("ready")) == 2 and pids(two)[0] != before[0]


def test_a_request_that_no_replica_survives_is_given_up(two: ReplicatedLLM) -> None:
    """It runs alone the last time, so all other requests are answered."""
    poison = two._requests.next_id + 5
    company: list[set[int]] = []

    def kill(stats: StepStats) -> None:
        for member in two._replicas._members:
            if poison in member.requests and member.is_ready:
                company.append(set(member.requests))
                member.is_ready = False  # counts as dead
                os.kill(member.process.pid or 0, signal.SIGKILL)  # type: ignore[union-attr]

    two.on_step = kill
    try:
        outputs = two.generate(PROMPTS[:12], LONG, use_tqdm=False)
    finally:
        two.on_step = None
    assert [output.index for output in outputs] == list(range(12))
    bad = outputs.pop(5)
    assert bad["finish_reason"] == "error" and bad.prompt == PROMPTS[5]
    assert "3 replicas ended while it ran, the last time alone" in (bad.error or "")
    assert "was killed by SIGKILL" in (bad.error or "")
    assert all(output.error is None and len(output["token_ids"]) == 100 for output in outputs)
    assert len(company) == 3 and company[-1] == {poison}


class Unreadable(SamplingParams):
    """Fails when it is unpickled."""

    def __reduce__(self) -> Any:
        return int, ("none",)


def test_a_request_that_a_replica_cannot_unpickle_gives_an_output(
    two: ReplicatedLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "MAX_RUNS", 1)
    [output] = two.generate("Hello", Unreadable(max_tokens=3), use_tqdm=False)
    assert output["finish_reason"] == "error" and "invalid literal for int()" in (output.error or "")
    assert two.generate("Hello", GREEDY, use_tqdm=False)[0].error is None


def test_replicas_must_have_as_much_room_as_at_first(two: ReplicatedLLM) -> None:
    with pytest.raises(
        KVCacheMemoryError, match=r"replica 0: the KV cache has room for .* max_model_len=\d+$"
    ):
        two._replicas.set("limit_model_len", 10**6)
    assert two._replicas._settings["limit_model_len"] < 10**6


def test_when_all_replicas_stay_down(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MAX_FAILURES", 1)
    llm = LLM(model, data_parallel_size=2, **TINY)
    assert isinstance(llm, ReplicatedLLM)
    started, prompts = pids(llm), [[5 + number] for number in range(20)]
    expected = llm.generate(prompts, GREEDY, use_tqdm=False)
    os.kill(pids(llm)[0], signal.SIGKILL)
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [each["token_ids"] for each in outputs] == [each["token_ids"] for each in expected]
    assert len(pids(llm)) == 1
    os.kill(pids(llm)[0], signal.SIGKILL)
    with pytest.raises(
        WorkerError, match=r"no replica is left: replica 0 was killed by SIGKILL.*; replica 1"
    ):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    with pytest.raises(EngineClosedError):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert not [pid for pid in started if Path("/proc", str(pid)).exists()]


def test_what_a_replica_finds_wrong_at_its_start_is_raised(model: Path, two: ReplicatedLLM) -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(KVCacheMemoryError, match=r"^replica \d: no room for the KV cache"):
        LLM(model, data_parallel_size=2, **TINY, num_kvcache_blocks=10**9)
    assert set(multiprocessing.active_children()) == before


def stat_lines() -> list[str]:
    """/proc/PID/stat of every process."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            lines.append(path.read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return lines


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"data_parallel_size": 0}, ValueError, "data_parallel_size must be at least 1, not 0"),
        ({"data_parallel_size": "2"}, TypeError, "data_parallel_size must be an integer, not '2'"),
        ({"data_parallel_size": True}, TypeError, "data_parallel_size must be an integer, not True"),
        ({"data_parallel_size": 2, "max_num_seqs": 0}, ValueError, "max_num_seqs must be at least 1"),
    ],
)
def test_wrong_options_start_nothing(
    model: Path, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        LLM(model, **options)


def test_a_subclass_of_llm_cannot_be_replicated(model: Path) -> None:
    class Own(LLM):
        pass

    for kind in (Own, LLMEngine):
        with pytest.raises(ValueError, match=f"derive {kind.__name__} from ReplicatedLLM"):
            kind(model, data_parallel_size=2, **TINY)


def test_ctrl_c_leaves_the_engine_usable(one: LLM, two: ReplicatedLLM) -> None:
    before = pids(two)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        two.generate(PROMPTS * 100, LONG, use_tqdm=False)
    assert two.is_finished() and pids(two) == before
    same(one, two, answer_all)


def test_other_threads_wait(two: ReplicatedLLM) -> None:
    results = in_threads(3, lambda _: two.generate(PROMPTS[:8], GREEDY, use_tqdm=False))
    tokens = [[each["token_ids"] for each in outputs] for outputs in results]
    assert tokens[0] == tokens[1] == tokens[2] and len(tokens[0]) == 8


# -- the end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["between_steps", "forked"])
def test_a_process_may_end_without_close(model: Path, ending: str) -> None:
    endings.check(ending, model, device="cpu", size=1, max_model_len=64, data_parallel_size=2)


KILLED = """
from nanovllm import LLM, SamplingParams
llm = LLM({model!r}, data_parallel_size=2, tensor_parallel_size=2, **{options!r})
prompts = [[5 + number] for number in range({vocab} - 5)]
stream = llm.stream(prompts * 1000, SamplingParams(max_tokens=20))
print(len(next(stream)["token_ids"]), flush=True)
[None for _ in stream]
"""


def test_replicas_of_several_ranks_end_with_a_caller_that_is_killed(model: Path) -> None:
    script = KILLED.format(model=str(model), options=TINY, vocab=VOCAB_SIZE)
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", script], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None

    def session() -> list[str]:
        """The processes of the script's session: the script and all that it started."""
        fields = [line.rpartition(")")[2].split() for line in stat_lines()]
        return [each[1] for each in fields if each[3] == str(process.pid) and each[0] != "Z"]

    try:
        assert int(process.stdout.readline()) > 0
        assert len(session()) >= 5, "the caller, two replicas and two workers"
        process.kill()
        process.wait()
        deadline = time.monotonic() + 60
        while session() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not session()
    finally:
        if session():
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
