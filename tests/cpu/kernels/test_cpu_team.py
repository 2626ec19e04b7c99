"""The team of threads: each program runs once, from any thread and after a fork, and idle threads sleep."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cpu_kernel_cases import count, finish, start, threads

from nanovllm.cpu.kernels.team import team

LAUNCHES = 2000


def counted(launches: int, number: int, programs: int = 7) -> bool:
    counts = torch.zeros(programs, dtype=torch.int64)
    with threads(number):
        for _ in range(launches):
            count(counts)
    return counts.tolist() == [launches] * programs


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_each_program_runs_once(number: int) -> None:
    for programs in (1, 2, 3, 100):
        assert counted(200, number, programs)


def test_two_threads_launch_at_once() -> None:
    """With one team, and with two."""
    with ThreadPoolExecutor(4) as pool:
        done = [pool.submit(counted, LAUNCHES, number) for number in (2, 2, 3, 4)]
        assert all(each.result() for each in done)


def test_the_number_of_threads_follows_torch() -> None:
    before = torch.get_num_threads()
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            assert team().size == number
            with threads(2) as own:
                assert own.size == 2
    finally:
        torch.set_num_threads(before)


def test_idle_threads_sleep() -> None:
    assert counted(10, 4)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.25, "three threads that spin take 0.5 s or more"


FORKS = """
import os, signal, sys, threading
import torch
from test_cpu_team import counted
busy, stop = sys.argv[1:] == ["busy"], threading.Event()
assert counted(100, 2)

def work():
    while not stop.is_set():
        assert counted(50, 2)

thread = threading.Thread(target=work)
if busy:
    thread.start()
for number in range(20):
    child = os.fork()
    if not child:
        signal.alarm(60)
        os._exit(0 if counted(50, 2) and counted(50, 3) else 1)
    assert os.waitpid(child, 0)[1] == 0, number
stop.set()
if busy:
    thread.join()
assert counted(100, 2)
print("done")
"""


@pytest.mark.parametrize("kind", ["idle", "busy"])
def test_a_forked_child_computes(kind: str) -> None:
    here = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {here!r}); sys.argv[1:] = [{kind!r}]\n{FORKS}"
    assert finish(start(code))[0] == ["done"]


FORKED_ENGINE = """
import os, signal
import torch
from nanovllm import LLM, SamplingParams, demo_model_path

def answer():
    params = SamplingParams(max_tokens=8, temperature=0)
    with LLM(demo_model_path(), device="cpu", dtype="float32") as llm:
        torch.zeros(2**22)  # so large that torch uses its threads
        return llm.generate("Question:", params, use_tqdm=False)[0]["token_ids"]

torch.set_num_threads(2)
expected = answer()
child = os.fork()
if not child:
    signal.alarm(60)
    os._exit(0 if answer() == expected else 1)
assert os.waitpid(child, 0)[1] == 0
assert answer() == expected
print("done")
"""


def test_a_forked_child_makes_an_engine_of_its_own() -> None:
    """torch would wait for threads that only its parent has."""
    assert finish(start(FORKED_ENGINE))[0] == ["done"]


INTERRUPTS = """
import os, signal, threading, time
import torch
from cpu_kernel_cases import count, threads
from nanovllm.cpu.kernels.recording import Arena, Recording
armed, caught = False, 0

def interrupt(*_):
    global armed, caught
    if armed:
        armed, caught = False, caught + 1
        raise KeyboardInterrupt

def send():
    for _ in range(300):
        time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, interrupt)
counts, recorded = torch.zeros(9, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)
with threads(3):
    def step():
        for _ in range(4):
            count(recorded)
    recording = Recording.record(step, Arena())
    sender = threading.Thread(target=send)
    sender.start()
    while sender.is_alive():
        try:
            armed = True
            for _ in range(200):
                count(counts)
                recording.replay()
            armed = False
        except KeyboardInterrupt:
            pass
    armed = False
    assert caught > 50, caught
    for each, more in ((counts, 1), (recorded, 4)):
        assert len(set(each.tolist())) == 1, each
    before = counts.tolist()[0], recorded.tolist()[0]
    count(counts)
    recording.replay()
    assert (counts.tolist()[0], recorded.tolist()[0]) == (before[0] + 1, before[1] + 4)
print("done")
"""


def test_ctrl_c_leaves_a_team_that_can_be_used() -> None:
    """No launch is done in part, and none is lost."""
    assert finish(start(INTERRUPTS))[0] == ["done"]


def test_a_process_ends_while_its_threads_look_for_work() -> None:
    code = "from cpu_kernel_cases import *\nwith threads(4): count(torch.zeros(9, dtype=torch.int64))"
    for _ in range(5):
        assert finish(start(code)) == ([], "")
