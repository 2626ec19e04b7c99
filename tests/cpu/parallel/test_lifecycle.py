"""Every end of an engine's process, several threads, forks and copies."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import endings
import inside
import pytest
from checked_llm import make_tiny, run
from threads import in_threads
from tiny_models import VOCAB_SIZE, transformers_greedy

from nanovllm import EngineClosedError, RequestOutput, SamplingParams
from nanovllm.lifecycle import Lifecycle
from nanovllm.parallel.owned import finalize

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(2, VOCAB_SIZE) for _ in range(1 + 5 * n)] for n in range(6)]


@pytest.fixture(scope="module")
def expected(model: Path, prompts: list) -> list[list[int]]:
    return [transformers_greedy(model, prompt, GREEDY.max_tokens) for prompt in prompts]


# -- the end of the process --------------------------------------------------------------------------------


CASES = [(name, 2) for name in endings.ENDINGS] + [
    (name, 1) for name in ("between_steps", "within_a_stream", "forked", "in_a_cycle")
]


@pytest.mark.parametrize(("ending", "size"), CASES)
def test_a_process_may_end_without_close(model: Path, ending: str, size: int) -> None:
    endings.check(ending, model, device="cpu", size=size, max_model_len=64)


# -- threads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_threads_take_turns_in_generate(model: Path, prompts: list, expected: list, size: int) -> None:
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=12) for i in range(len(prompts))]
    with make_tiny(model, tensor_parallel_size=size) as llm:
        seeded = [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]

        def work(index: int) -> list[list[list[int]]]:
            turn = [prompts[(index + i) % 6] for i in range(6)]
            turned = [params[(index + i) % 6] for i in range(6)]
            calls = [llm.generate(turn, p, use_tqdm=False) for _ in range(3) for p in (GREEDY, turned)]
            return [[output["token_ids"] for output in outputs] for outputs in calls]

        for index, calls in enumerate(in_threads(4, work)):
            for i in range(6):
                assert [call[i] for call in calls] == [expected[(index + i) % 6], seeded[(index + i) % 6]] * 3
        assert llm.is_finished()


def test_threads_share_add_request_and_step(model: Path, prompts: list, expected: list) -> None:
    with make_tiny(model) as llm:

        def work(index: int) -> tuple[list[int], list[RequestOutput]]:
            ids, outputs = [], []
            for prompt in prompts:
                ids.append(llm.add_request(prompt, GREEDY))
                outputs += llm.step()
            return ids, outputs + run(llm)

        results = in_threads(4, work)
        found = {output.request_id: output["token_ids"] for _, outputs in results for output in outputs}
        for ids, _ in results:
            assert [found[request] for request in ids] == expected
        assert len(found) == 4 * len(prompts) == sum(len(outputs) for _, outputs in results)


def test_a_waiting_thread_is_told_when_the_engine_closes(model: Path, prompts: list) -> None:
    """Both end: the thread that generates and the thread that waits. `close` returns after them."""
    llm = make_tiny(model)
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    running = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                running.set()
                llm.generate(prompts, long, use_tqdm=False)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    running.wait(60)
    llm.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert [type(error) for error in errors] == [EngineClosedError] * 2
    assert not hasattr(inside.runner(llm), "model"), "its memory is gone"


def test_a_call_within_a_call_is_refused(model: Path, prompts: list, expected: list) -> None:
    with make_tiny(model) as llm:
        launch, errors = inside.runner(llm).launch, []

        def calls_back(batch: Any) -> Any:
            for call in (
                lambda: llm.generate(prompts),
                llm.step,
                lambda: llm.add_request([5]),
                lambda: llm.abort(0),
            ):
                with pytest.raises(RuntimeError, match="already in a call of this engine") as caught:
                    call()
                errors.append(caught.value)
            return launch(batch)

        inside.runner(llm).launch = calls_back
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert errors and [output["token_ids"] for output in outputs] == expected


def test_a_callback_may_close_the_engine(model: Path, prompts: list) -> None:
    llm = make_tiny(model)
    launch = inside.runner(llm).launch

    def closes(batch: Any) -> Any:
        llm.close()
        assert hasattr(inside.runner(llm), "model"), "the step that it is called from goes on"
        return launch(batch)

    inside.runner(llm).launch = closes
    with pytest.raises(EngineClosedError):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert not hasattr(inside.runner(llm), "model")


def test_step_of_an_idle_engine_returns_nothing(model: Path, prompts: list) -> None:
    for run_ahead in (True, False):
        with make_tiny(model, async_scheduling=run_ahead) as llm:
            assert llm.step() == []
            llm.generate(prompts, GREEDY, use_tqdm=False)
            assert llm.step() == [] == llm.step()
            request = llm.add_request(prompts[0], GREEDY)
            llm.step()
            llm.abort(request)
            assert llm.step() == [] == llm.step()


# -- forks and copies --------------------------------------------------------------------------------------


FORK = """
import gc, os, sys
from nanovllm import LLM, EngineClosedError, SamplingParams
greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
llm = LLM({model!r}, device="cpu", skip_tokenizer_init=True, max_model_len=64, tensor_parallel_size={size})
answer = lambda: [o["token_ids"] for o in llm.generate({prompts}, greedy, use_tqdm=False)]
first = answer()
pids = {pids}
for turn in range(3):
    child = os.fork()
    if child == 0:
        for call in (answer, llm.step, llm.is_finished, lambda: llm.add_request([5]), lambda: llm.chat([])):
            try:
                call()
            except EngineClosedError as error:
                assert str(os.getppid()) in str(error) and "forked" in str(error), error
            else:
                os._exit(98)
        if turn == 0:
            llm.close()
        if turn == 1:
            del llm, answer, call
            gc.collect()
        sys.exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, (turn, code)
    assert all(os.path.exists(f"/proc/{{pid}}") for pid in pids)
    assert answer() == first
llm.close()
print(first)
"""


@pytest.mark.parametrize("size", [1, 2])
def test_a_forked_process_leaves_the_engine_alone(
    model: Path, prompts: list, expected: list, size: int
) -> None:
    code = FORK.format(model=str(model), prompts=prompts, size=size, pids=inside.worker_pids())
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0 and result.stderr == "", result
    assert json.loads(result.stdout) == expected


def test_copies_are_refused(model: Path, prompts: list, expected: list) -> None:
    with make_tiny(model) as llm:
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"cannot be copied or pickled.* make another LLM"):
                duplicate(llm)
        assert [o["token_ids"] for o in llm.generate(prompts, GREEDY, use_tqdm=False)] == expected


# -- the parts ---------------------------------------------------------------------------------------------


class Owner:
    pass


def test_what_is_owned_is_freed_once() -> None:
    freed: list[str] = []
    owner = Owner()
    lifecycle = Lifecycle(owner, lambda: freed.append("once"))
    with lifecycle.calling():
        lifecycle.close()
        assert freed == []
        with pytest.raises(EngineClosedError):
            lifecycle.check_open()
    assert freed == ["once"]
    lifecycle.close()
    del owner
    assert freed == ["once"]


def test_an_error_of_the_call_comes_before_one_of_its_end() -> None:
    def fails() -> None:
        raise RuntimeError("the device is broken")

    lifecycle = Lifecycle(Owner, fails)

    def work() -> None:
        with lifecycle.calling():
            lifecycle.close()
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        work()


def test_a_collected_owner_frees_and_a_forked_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    owner = Owner()
    finalize(owner, freed.append, 1)
    del owner
    assert freed == [1]
    owner = Owner()
    finalize(owner, freed.append, 2)
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    del owner
    assert freed == [1]


def test_a_worker_whose_rank_0_was_killed_removes_the_folder_where_they_meet(tmp_path: Path) -> None:
    """Also one that learns it from a broken pipe, before the thread that watches rank 0 has looked."""
    folder = tmp_path / "nanovllm-1"
    folder.mkdir()
    code = """
import os, sys, threading
from multiprocessing import Pipe
from types import SimpleNamespace
from nanovllm.parallel.worker import Member, worker_main
threading.Thread.start = lambda self: None  # has not looked yet
receiver, sender = Pipe(duplex=False)
receiver.close()
setup = SimpleNamespace(rank=1, size=2, device="cpu", config=SimpleNamespace(num_threads=1))
worker_main(Member(setup, sys.argv[1]), None, sender, parent=os.getpid())
"""
    ended = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True)
    assert ended.returncode == 1 and not folder.exists(), ended.stderr
