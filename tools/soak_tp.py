"""Cause faults in tensor-parallel engines at random moments; count hangs, leaks and wrong results.

    python tools/soak_tp.py                      # every fault 20 times, on the CPU
    python tools/soak_tp.py --times 3 kill_idle  # one of them

Exits with status 1 unless all counts are zero. Each engine splits the bundled model over two processes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from leftovers import GONE_SECONDS, SHARED_MEMORY, shared_memory, wait_until_nothing_is_left

import nanovllm
from nanovllm import LLM, SamplingParams, WorkerError
from nanovllm.parallel import ranks
from nanovllm.parallel.watch import Watch
from nanovllm.runner.model_runner import ModelRunner, RankSetup

PROMPTS = [
    "What is 687087 + 67?",
    "Reverse the word NOTEBOOK.",
    "Write DONE 3 times.",
    "Count down from 9.",
]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
START_SECONDS = 3.0  # about the duration of a start; faults during a start are spread over it
HANG_SECONDS = 90.0  # how long a job may print nothing


def make_llm(device: str = "cpu", size: int = 2) -> LLM:
    return LLM(nanovllm.demo_model_path(), tensor_parallel_size=size, device=device, num_kvcache_blocks=64)


def answer(llm: LLM) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def generate_forever(llm: LLM) -> None:
    while True:
        answer(llm)


def start_and_use(device: str) -> None:
    with make_llm(device) as llm:
        generate_forever(llm)


@dataclass
class FaultTime:
    """When the latest fault occurred, and how many seconds later the caller noticed it."""

    at: float = 0.0
    noticed: float = 0.0

    def record(self, fault: Callable[[], object]) -> None:
        self.at = time.perf_counter()
        fault()


fault_time = FaultTime()


def kill(pid: int) -> None:
    fault_time.record(lambda: os.kill(pid, signal.SIGKILL))


def interrupt() -> None:
    fault_time.record(lambda: os.kill(os.getpid(), signal.SIGINT))


@contextmanager
def later(seconds: float, action: Callable[[], Any]) -> Iterator[None]:
    timer = threading.Timer(seconds, action)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def expect(error: type[BaseException], words: str, action: Callable[[], Any]) -> None:
    """Run `action`, which must raise `error` with `words` in its message."""
    try:
        action()
    except error as raised:
        fault_time.noticed = time.perf_counter() - fault_time.at
        message = str(raised)
    else:
        raise AssertionError(f"no {error.__name__} was raised")
    assert words in message, f"{words!r} is not in {message!r}"


# -- the faults: each takes a random generator and a device, and checks what the caller sees ----------------


def raise_in_step(rng: random.Random, device: str) -> None:
    """At a random step a worker raises, because its batch is no batch; rank 0 waits for it."""
    with make_llm(device) as llm:
        channel = llm._executor.ranks._channel
        assert channel is not None
        send, steps = channel.send, rng.randrange(20)

        def send_nonsense(call: Any, *args: object, check_alive: Callable[[], None] | None = None) -> None:
            nonlocal steps
            steps -= call is ModelRunner.launch
            if steps == -1 and call is ModelRunner.launch:
                fault_time.at = time.perf_counter()
            send(call, *(("nonsense",) if steps == -1 else args), check_alive=check_alive)

        channel.send = send_nonsense  # type: ignore[method-assign]
        expect(WorkerError, "rank 1 failed:\nTraceback", lambda: generate_forever(llm))
        expect(nanovllm.EngineClosedError, "closed", lambda: answer(llm))


def raise_in_loading(rng: random.Random, device: str) -> None:
    """A worker finds no weights."""

    def lost(setup: RankSetup, **changes: Any) -> RankSetup:
        setup = replace(setup, **changes)
        return replace(setup, model_path=Path("/nowhere")) if setup.rank else setup

    error, failures = Watch.error, []

    def recorded(self: Watch) -> WorkerError:
        failures.append(self.failure)
        return error(self)

    with (
        mock.patch.object(ranks, "replace", lost),
        mock.patch.object(Watch, "error", recorded),
    ):
        expect(WorkerError, "ModelLoadError", lambda: make_llm(device))
    fault_time.noticed = time.monotonic() - failures[0].time  # since the worker raised


def kill_idle(rng: random.Random, device: str) -> None:
    """A worker is killed between two calls of generate."""
    with make_llm(device) as llm:
        answer(llm)
        kill(llm._executor.ranks.watch.processes[0].pid or 0)
        time.sleep(wait := rng.choice((0.0, 0.0, rng.random())))
        fault_time.at += wait
        expect(WorkerError, "rank 1 was killed by SIGKILL", lambda: answer(llm))


def kill_while_loading(rng: random.Random, device: str) -> None:
    """A worker is killed at a random moment of the start."""

    def kill_children() -> None:
        children: set[Any] = multiprocessing.process._children  # type: ignore[attr-defined]
        deadline = time.monotonic() + 10 * START_SECONDS
        while not children and time.monotonic() < deadline:  # a slow start has no child process yet
            time.sleep(0.01)
        for process in list(children):
            kill(process.pid)

    with later(rng.uniform(0.2, START_SECONDS), kill_children):  # the start may be over by then
        expect(WorkerError, "rank 1 was killed by SIGKILL", lambda: start_and_use(device))


def kill_in_step(rng: random.Random, device: str) -> None:
    """A worker is killed at a random moment of generate."""
    with make_llm(device) as llm:
        pid = llm._executor.ranks.watch.processes[0].pid or 0
        with later(rng.uniform(0, 0.5), lambda: kill(pid)):
            expect(WorkerError, "rank 1 was killed by SIGKILL", lambda: generate_forever(llm))


def kill_in_collective(rng: random.Random, device: str) -> None:
    """A worker is killed while it waits for rank 0 inside an all-reduce."""
    with make_llm(device) as llm:
        pid, group, calls = (
            llm._executor.ranks.watch.processes[0].pid or 0,
            llm._executor.runner.tp,
            rng.randrange(100),
        )
        all_reduce = group.all_reduce

        def late(x: Any) -> Any:
            nonlocal calls
            calls -= 1
            if calls == -1:
                time.sleep(0.1)
                kill(pid)
            return all_reduce(x)

        group.all_reduce = late  # type: ignore[method-assign]
        # Replayed graphs do not call all_reduce, so a GPU run kills the worker at a random moment.
        with nullcontext() if device == "cpu" else later(rng.uniform(0, 0.5), lambda: kill(pid)):
            expect(WorkerError, "rank 1 was killed by SIGKILL", lambda: generate_forever(llm))


RANK_0 = """
    import soak_tp
    llm = soak_tp.make_llm({device!r})
    print(llm._executor.ranks.watch.processes[0].pid, llm._executor.ranks._channel._segment.name, flush=True)
    soak_tp.generate_forever(llm)
"""


def kill_rank_0(rng: random.Random, device: str) -> None:
    """The caller's process is killed; its worker ends and its shared memory segment disappears."""
    code, folder = textwrap.dedent(RANK_0).format(device=device), Path(__file__).parent
    caller = subprocess.Popen([sys.executable, "-c", code], cwd=folder, stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None
    pid, segment = caller.stdout.readline().split()
    time.sleep(rng.uniform(0, 0.3))
    fault_time.record(caller.kill)
    caller.wait()
    deadline = time.monotonic() + GONE_SECONDS
    while time.monotonic() < deadline:
        if not Path("/proc", pid).exists() and not (SHARED_MEMORY / segment).exists():
            fault_time.noticed = time.perf_counter() - fault_time.at
            return
        time.sleep(0.02)
    raise AssertionError(f"worker {pid} or segment {segment} outlived rank 0 by {GONE_SECONDS} s")


_llm: LLM | None = None
_expected: list[list[int]] = []


def ctrl_c_in_generate(rng: random.Random, device: str) -> None:
    """Ctrl-C at a random moment of generate; then the same engine gives the same answers."""
    global _llm, _expected
    if _llm is None:
        _llm = make_llm(device)
        _expected = answer(_llm)
    with later(rng.uniform(0, 0.3), interrupt):
        expect(KeyboardInterrupt, "", lambda: generate_forever(_llm))
    assert _llm.is_finished(), "requests are left"
    assert answer(_llm) == _expected, "wrong result"


def ctrl_c_while_starting(rng: random.Random, device: str) -> None:
    """Ctrl-C at a random moment of the start."""
    with later(rng.uniform(0, START_SECONDS), interrupt):
        expect(KeyboardInterrupt, "", lambda: start_and_use(device))


FAULTS: dict[str, Callable[[random.Random, str], None]] = {
    function.__name__: function
    for function in (
        raise_in_step,
        raise_in_loading,
        kill_idle,
        kill_while_loading,
        kill_in_step,
        kill_in_collective,
        kill_rank_0,
        ctrl_c_in_generate,
        ctrl_c_while_starting,
    )
}


# -- repetition --------------------------------------------------------------------------------------------


def run_job(name: str, times: int, seed: int, device: str) -> None:
    """Repeat one fault; print one line of JSON each time."""
    global _llm
    rng = random.Random(f"{name} {seed}")
    for number in range(times):
        problem = None
        try:
            FAULTS[name](rng, device)
        except AssertionError as error:
            problem = str(error)
        if _llm is not None and number == times - 1:
            _llm.close()
            _llm = None
        left = [] if _llm is not None else wait_until_nothing_is_left()
        line = {"problem": problem, "left": left, "noticed": fault_time.noticed}
        print(json.dumps(line), flush=True)


def soak(name: str, times: int, seed: int, device: str, report: dict[str, list[Any]]) -> None:
    """Run a job in its own process. A job that prints nothing counts as hanging and is started again."""
    while len(report[name]) < times:
        count = times - len(report[name])
        command = [sys.executable, __file__, "--job", name, "--times", str(count), "--device", device]
        with subprocess.Popen([*command, "--seed", str(seed)], stdout=subprocess.PIPE, text=True) as job:
            assert job.stdout is not None
            for _ in range(count):
                watchdog = threading.Timer(HANG_SECONDS, job.kill)
                watchdog.start()
                line = job.stdout.readline()
                watchdog.cancel()
                if not line:
                    report[name].append({"problem": "hang or crash", "left": [], "noticed": HANG_SECONDS})
                    job.kill()
                    break
                report[name].append(json.loads(line))
        seed += 1000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("faults", nargs="*", default=[], metavar="FAULT", help=", ".join(FAULTS))
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many engines at once")
    parser.add_argument("--job", choices=FAULTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        run_job(args.job, args.times, args.seed, args.device)
        return
    names = args.faults or list(FAULTS)
    unknown = set(names) - set(FAULTS)
    if unknown:
        parser.error(f"unknown faults {sorted(unknown)}; there are {', '.join(FAULTS)}")
    before = shared_memory()
    start = time.perf_counter()
    report: dict[str, list[Any]] = {name: [] for name in names}
    slots = threading.Semaphore(max(1, args.jobs))

    def run(name: str) -> None:
        with slots:
            soak(name, args.times, args.seed, args.device, report)

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    time.sleep(1)  # the resource trackers of killed processes need a moment
    segments = shared_memory() - before
    print(f"{'fault':24}{'times':>6}{'wrong or hung':>15}{'leaks':>7}{'noticed, s':>12}")
    bad = len(segments)
    for name, rows in report.items():
        problems = [row["problem"] for row in rows if row["problem"]]
        leaks = [left for row in rows for left in row["left"]]
        worst = max(row["noticed"] for row in rows)
        print(f"{name:24}{len(rows):6}{len(problems):15}{len(leaks):7}{worst:12.2f}")
        for detail in problems + leaks:
            print("   ", detail)
        bad += len(problems) + len(leaks)
    print(f"segments and semaphores left in {SHARED_MEMORY}: {sorted(segments)}")
    print("noticed: the longest time from a fault until rank 0 knew of it")
    print(f"{time.perf_counter() - start:.0f} s, {args.jobs} jobs")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
