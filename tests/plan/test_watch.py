"""The watch over workers, with small processes instead of models: which failure it reports, and what it
releases.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import pytest

from nanovllm.errors import WorkerError
from nanovllm.workers import watch as watch_module
from nanovllm.workers.watch import Failure, Watch

CONTEXT = multiprocessing.get_context("spawn")


def answer(all_sent: Barrier, pipe: Connection, rank: int) -> None:
    """No worker ends while another still sends: its end would end the wait for both."""
    for value in range(1000):
        pipe.send((rank, value))
    all_sent.wait(60)


def sleep_on(pipe: Connection, rank: int) -> None:
    pipe.send("up")
    time.sleep(600)


def fail_together(all_here: Barrier, pipe: Connection, rank: int) -> None:
    """All fail at once; rank 2 reports the earliest time."""
    all_here.wait(60)
    pipe.send(Failure(rank, f"failed: {rank}", False, 5.0 if rank == 2 else 6.0 + rank))


def fail_then_the_other_is_killed(pipe: Connection, rank: int) -> None:
    pipe.send("up")
    if rank == 1:
        pipe.send(Failure(rank, "failed: the other is gone", False, 0.0))
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def leave(pipe: Connection, rank: int) -> None:
    os._exit(7)


@pytest.fixture
def start() -> Iterator[Callable[[Callable[[Connection, int], None], int], Watch]]:
    watches = []

    def start_watch(target: Callable[[Connection, int], None], count: int = 2) -> Watch:
        watch = Watch(count)
        watches.append(watch)
        for rank in range(1, count + 1):
            receiver, sender = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(target=target, args=(sender, rank), daemon=True)
            watch.add(process, receiver)
            process.start()
            sender.close()
        watch.start()
        return watch

    yield start_watch
    for watch in watches:
        watch.kill()
        watch.join(60)
        assert not any(process.is_alive() for process in watch.processes)


def test_answers_come_in_order_from_each_worker_and_an_end_after_them_loses_none(start: Callable) -> None:
    all_sent = CONTEXT.Barrier(2)  # lives as long as this name
    watch = start(partial(answer, all_sent))
    for value in range(1000):
        assert [watch.wait_for_reply(index) for index in range(2)] == [(1, value), (2, value)]
    with pytest.raises(WorkerError, match=r"rank [12] ended by itself with exit code 0"):
        watch.wait_for_reply(0)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch looks at the ends of all workers, however slowly they come, before it names the cause."""
    monkeypatch.setattr(watch_module, "CAUSE_SECONDS", 600.0)


@pytest.mark.usefixtures("patient")
def test_the_first_error_counts(start: Callable) -> None:
    all_here = CONTEXT.Barrier(3)  # lives as long as this name
    watch = start(partial(fail_together, all_here), 3)
    with pytest.raises(WorkerError, match="rank 2 failed: 2"):
        watch.wait_for_reply(0)


@pytest.mark.usefixtures("patient")
def test_a_signal_takes_precedence_over_an_error(start: Callable) -> None:
    watch = start(fail_then_the_other_is_killed)
    assert [watch.wait_for_reply(index) for index in range(2)] == ["up", "up"]
    with pytest.raises(WorkerError, match="rank 2 was killed by SIGKILL, perhaps because the host ran out"):
        watch.wait_for_reply(0)


def test_an_exit_code_is_told(start: Callable) -> None:
    watch = start(leave, 1)
    with pytest.raises(WorkerError, match="rank 1 ended by itself with exit code 7"):
        watch.wait_for_reply(0)
    with pytest.raises(WorkerError, match="exit code 7"):
        watch.check()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_waiting_calls_are_released_and_other_workers_killed(start: Callable, sent: signal.Signals) -> None:
    watch = start(sleep_on, 3)
    for index in range(3):
        assert watch.wait_for_reply(index) == "up"
    waiting = threading.Event()
    watch.on_failure(waiting.set)
    watch.check()
    victim = random.Random(sent).randrange(3)
    os.kill(watch.processes[victim].pid, sent)
    assert waiting.wait(30)
    with pytest.raises(WorkerError, match=f"rank {victim + 1} was killed by {sent.name}"):
        watch.check()
    watch.join(60)


def test_killed_workers_are_no_failure(start: Callable) -> None:
    watch = start(sleep_on)
    released = []
    watch.on_failure(lambda: released.append("on time"))
    watch.kill()
    watch.kill()
    watch.on_failure(lambda: released.append("late"))
    watch.join(60)
    assert watch.failure is None and released == ["on time", "late"]
    with pytest.raises(WorkerError, match="ended by an earlier error"):
        watch.check()


def test_workers_that_do_not_exit_in_time_are_killed(start: Callable) -> None:
    watch = start(sleep_on)
    assert watch.wait_for_reply(0) == "up"
    watch.stopping = True
    watch.join(0.1)
    assert [process.exitcode for process in watch.processes] == [-signal.SIGKILL] * 2
