"""Failing replicas: the others continue, those that die or hang are started again, and no process is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from socket import SO_SNDTIMEO, SOL_SOCKET, socket
from struct import pack
from typing import Any

import endings
import inside
import pytest
from replica_answers import GREEDY, LONG, MIXED, PROMPTS, answer_all, pids, same
from threads import in_threads
from tiny_models import VOCAB_SIZE

from nanovllm import (
    LLM,
    EngineClosedError,
    KVCacheMemoryError,
    RequestOutput,
    SamplingParams,
    WorkerError,
)
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.stats import StepStats
from nanovllm.parallel.replicas import pool
from nanovllm.parallel.replicas.replica import Replica

TINY: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 64}


# -- faults --------------------------------------------------------------------------------------------------


def signalled(one: LLM, two: LLM, number: signal.Signals) -> None:
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


def test_a_replica_that_is_killed_is_started_again(one: LLM, two: LLM) -> None:
    """Its requests run again and the other replica continues; the answers are the same."""
    before = pids(two)
    signalled(one, two, signal.SIGKILL)
    assert len(inside.replicas(two).call(Replica.get_room)) == 2, "it is back"
    after = pids(two)
    assert len(after) == 2 and after[1] == before[1] and after[0] != before[0]
    same(one, two, answer_all)


def test_a_stream_that_is_left_waits_for_no_step(one: LLM, two: LLM) -> None:
    """A slow replica lives on, and what its step computed counts nowhere."""
    before = pids(two)
    stream = two.stream(PROMPTS, LONG)
    next(stream)
    os.kill(before[1], signal.SIGSTOP)
    stream.close()
    assert two.is_finished() and two.stats().num_running == 0
    os.kill(before[1], signal.SIGCONT)
    inside.replicas(two).call(Replica.get_room)
    assert not inside.arrivals(two)
    same(one, two, answer_all)
    assert pids(two) == before


def test_a_replica_that_reads_nothing_is_killed(two: LLM) -> None:
    """A replica that does not read its pipe cannot block the caller for ever, even if the pipe is full."""
    member = inside.members(two)[0]
    with socket(fileno=os.dup(member.pipe.fileno())) as end:
        end.setsockopt(SOL_SOCKET, SO_SNDTIMEO, pack("ll", 1, 0))
    before = pids(two)
    os.kill(before[0], signal.SIGSTOP)
    member.send(bytes(2**22))
    assert len(two.generate(PROMPTS, GREEDY, use_tqdm=False)) == 24
    assert len(inside.replicas(two).call(Replica.get_room)) == 2 and pids(two)[0] != before[0]


def test_a_request_that_no_replica_survives_is_given_up(two: LLM) -> None:
    """It runs alone the last time, so all other requests are answered."""
    poison = inside.next_id(two) + 5
    company: list[set[int]] = []

    def kill(stats: StepStats) -> None:
        for member in inside.members(two):
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
    two: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "MAX_RUNS", 1)
    [output] = two.generate("Hello", Unreadable(max_tokens=3), use_tqdm=False)
    assert output["finish_reason"] == "error" and "invalid literal for int()" in (output.error or "")
    assert two.generate("Hello", GREEDY, use_tqdm=False)[0].error is None


def test_replicas_must_have_as_much_room_as_at_first(two: LLM) -> None:
    with pytest.raises(
        KVCacheMemoryError, match=r"replica 0: the KV cache has room for .* max_model_len=\d+$"
    ):
        inside.replicas(two).set(Replica.limit, 10**6)
    assert inside.replica_settings(two)[Replica.limit] < 10**6


def test_when_all_replicas_stay_down(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MAX_FAILURES", 1)
    llm = LLM(model, data_parallel_size=2, **TINY)
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


def test_what_a_replica_finds_wrong_at_its_start_is_raised(model: Path, two: LLM) -> None:
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


def test_an_engine_that_runs_one_model_cannot_be_replicated(model: Path) -> None:
    class Own(LLMEngine):
        pass

    for kind in (Own, LLMEngine):
        with pytest.raises(ValueError, match=f"data_parallel_size=2 needs LLM itself, not {kind.__name__}"):
            kind(model, data_parallel_size=2, **TINY)


def test_a_subclass_of_llm_may_be_replicated(model: Path) -> None:
    class Own(LLM):
        pass

    with Own(model, data_parallel_size=2, **TINY) as llm:
        assert len(llm.generate([[5], [6]], GREEDY, use_tqdm=False)) == 2


def test_ctrl_c_leaves_the_engine_usable(one: LLM, two: LLM) -> None:
    before, stepped = pids(two), threading.Event()

    def interrupt() -> None:
        assert stepped.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    two.on_step = lambda stats: stepped.set()
    try:
        with pytest.raises(KeyboardInterrupt):
            two.generate(PROMPTS * 100, LONG, use_tqdm=False)
    finally:
        two.on_step = None
        thread.join()
    assert two.is_finished() and pids(two) == before
    same(one, two, answer_all)


def test_other_threads_wait(two: LLM) -> None:
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
