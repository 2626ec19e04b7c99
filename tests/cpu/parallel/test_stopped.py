"""A rank or replica that is stopped (SIGSTOP) in any phase: every wait for it ends, and names it; so does
`close`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import inside
import pytest
from checked_llm import CheckedSetup, make_tiny
from leftovers import wait_until_nothing_is_left
from replica_answers import GREEDY, PROMPTS, pids
from safetensors.torch import load_file

from nanovllm import LLM, EngineClosedError, SamplingParams, WorkerError
from nanovllm.config import Config
from nanovllm.engine import core
from nanovllm.engine.core import Core
from nanovllm.engine.startup import open_model
from nanovllm.layers.weights import weight_slots
from nanovllm.parallel import ranks, watch
from nanovllm.parallel.group import TPGroup
from nanovllm.parallel.replicas import pool
from nanovllm.parallel.replicas.replica import Replica
from nanovllm.parallel.watch import Watch, is_stopped
from nanovllm.parallel.worker import Member
from nanovllm.residency.runner import ResidentModelRunner
from nanovllm.runner.model_runner import ModelRunner

LIMIT = 0.3  # seconds, once a process is stopped
HANG = 120  # a test that takes longer than this hangs
TINY: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 64}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Short waits, and nothing is left behind."""
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(ranks, "EXIT_SECONDS", 0.3)
    yield
    if "two" not in request.fixturenames:
        assert wait_until_nothing_is_left() == []


def stop(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)


@contextmanager
def no_hang(pid: int | None = None) -> Iterator[None]:
    """Fail, by resuming the stopped process, if the block takes too long."""
    timer = threading.Timer(HANG, os.kill, (pid or os.getpid(), signal.SIGCONT if pid else signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# -- ranks ---------------------------------------------------------------------------------------------------


class StopsBeforeJoining(Member):
    def join_group(self, *args: Any) -> TPGroup:
        if self.setup.rank == 1:
            stop(os.getpid())
        return super().join_group(*args)


class StopsWhileLoading(CheckedSetup):
    def load(self, device: Any, group: TPGroup, check: Callable[[], None] = lambda: None) -> ModelRunner:
        return super().load(device, group, self._stops if self.rank == 1 else check)

    @staticmethod
    def _stops() -> None:
        stop(os.getpid())


@pytest.mark.parametrize(
    ("module", "name", "kind"),
    [(ranks, "Member", StopsBeforeJoining), (core, "RankSetup", StopsWhileLoading)],
    ids=["StopsBeforeJoining", "StopsWhileLoading"],
)
def test_a_rank_that_is_stopped_while_it_loads(
    model: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, kind: type
) -> None:
    start = Watch.start

    def start_and_look(self: Watch) -> None:
        start(self)

        def lower() -> None:
            while not is_stopped(self.processes[0]):
                time.sleep(0.02)
            self.limit = LIMIT

        threading.Thread(target=lower, daemon=True).start()

    monkeypatch.setattr(Watch, "start", start_and_look)
    monkeypatch.setattr(module, name, kind)
    with (
        no_hang(),
        pytest.raises(WorkerError, match=r"rank 1 made no progress for 0.3 s during load .* SIGSTOP"),
    ):
        LLM(str(model), tensor_parallel_size=2, **TINY)


def new_weights(llm: LLM) -> list[Any]:
    return [("model.norm.weight", inside.model(llm).model.norm.weight.clone())]


def test_a_rank_that_is_stopped_in_any_later_phase(model: Path) -> None:
    calls: dict[str, Callable[[LLM], Any]] = {
        "a step": lambda llm: llm.generate([[5, 6]], GREEDY, use_tqdm=False),
        "update_weights": lambda llm: llm.update_weights(new_weights(llm)),
        "sleep": lambda llm: llm.sleep(),
    }
    for phase, call in calls.items():
        with no_hang(), make_tiny(model, tensor_parallel_size=2) as llm:
            inside.workers(llm).watch.limit = LIMIT
            stop(inside.workers(llm).watch.processes[0].pid)
            with pytest.raises(WorkerError, match=rf"rank 1 made no progress for 0.3 s during {phase} "):
                call(llm)
            with pytest.raises(EngineClosedError):
                llm.is_finished()


def test_close_kills_a_rank_that_is_stopped(model: Path) -> None:
    """Although the channel has no room for the last message."""
    with no_hang():
        llm = make_tiny(model, tensor_parallel_size=2)
        pid, channel = inside.workers(llm).watch.processes[0].pid, inside.channel(llm)
        assert channel is not None
        stop(pid)
        for _ in range(inside.num_slots(channel)):
            channel.send(ResidentModelRunner.wake_up_need, ["weights"])
        llm.close()
        assert not Path("/proc", str(pid)).exists()


def test_progress_of_any_rank_prolongs_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load may take any time while tensors arrive; a suspended host and idle workers count as nothing."""
    heard: list[str] = []
    seen = Watch(1, limit=1.0, on_progress=lambda: heard.append("progress"))
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.6)
    seen.processes.append(ranks.get_context("spawn").Process())
    assert inside.stalled(seen, 100.0) is None, "no one waits"
    with seen.waiting("load"):
        for _ in range(5):
            assert inside.stalled(seen, 100.0) is None, "at most LOOK_SECONDS count"
            seen.progress()
        assert heard == ["progress"] * 5
        assert inside.stalled(seen, 0.6) is None
        failure = inside.stalled(seen, 0.6)
        assert failure is not None and failure.rank == 1
        assert failure.what.startswith(
            "made no progress for 1 s during load and was killed (if it is only slow, r"
        )


def test_a_call_of_one_rank_is_progress(model: Path) -> None:
    heard: list[str] = []
    config = Config.from_kwargs(str(model), **TINY)
    with closing(Core(open_model(config), lambda: heard.append("call"))) as core:
        heard.clear()
        core.ranks.call(ModelRunner.try_kv_cache, 9)
        assert heard == ["call"]


# -- replicas ------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_replicas_that_are_stopped_at_their_start_or_close(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "EXIT_SECONDS", 0.3)
    with no_hang():
        llm = LLM(model, data_parallel_size=2, tensor_parallel_size=2, **TINY)
        children = [int(child) for pid in pids(llm) for child in children_of(pid)]
        for pid in [*children, *pids(llm)]:
            stop(pid)
        llm.close()
        deadline = time.monotonic() + HANG
        while any(Path("/proc", str(pid)).exists() for pid in children) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not [pid for pid in children if Path("/proc", str(pid)).exists()]
    processes = pool.ReplicaProcess.start

    def stopped(self: pool.ReplicaProcess, settings: dict[str, object]) -> None:
        processes(self, settings)
        assert self.process is not None
        stop(self.process.pid)

    monkeypatch.setattr(pool.ReplicaProcess, "start", stopped)
    with (
        no_hang(),
        pytest.raises(
            WorkerError, match=r"replica 0: it made no progress for 1 s during the start .* SIGSTOP"
        ),
    ):
        LLM(model, data_parallel_size=2, distributed_timeout_seconds=1, **TINY)


def children_of(pid: int) -> list[str]:
    lists = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [child for each in lists for child in each]


def test_a_replica_tells_of_each_tensor_that_it_loads(model: Path) -> None:
    sent: list[object] = []

    class Recorder:
        def send(self, message: object) -> None:
            sent.append(type(message).__name__)

    config = Config.from_kwargs(str(model), **TINY)
    with closing(Replica(0, config, Recorder())) as core:  # type: ignore[arg-type]
        tensors = len(weight_slots(core.runner.model))
        assert sent.count("Progress") > tensors
        sent.clear()
        core.sleep(2)
        core.wake_up(core.asleep)
        assert sent.count("Progress") > tensors, "it reads the checkpoint again"


FEW_FILES = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
import nanovllm
for options in ({{"tensor_parallel_size": 2}}, {{"data_parallel_size": 2}}):
    try:
        nanovllm.LLM({model!r}, **options, device="cpu", skip_tokenizer_init=True)
    except nanovllm.WorkerError as error:
        print(error)
"""


def test_too_few_open_files_are_told_before_anything_starts(model: Path) -> None:
    code = FEW_FILES.format(model=str(model))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    first, second = result.stdout.splitlines()
    assert (
        "tensor_parallel_size above 1 needs 24 more open files here, and the limit of open files is 24"
        in first
    )
    assert "data_parallel_size above 1 needs 32 more open files" in second and "`ulimit -n 1024`" in second


def test_the_limit_is_an_option(model: Path) -> None:
    for wrong, error in ((0, ValueError), ("600", TypeError)):
        with pytest.raises(error, match="distributed_timeout_seconds must be"):
            LLM(model, distributed_timeout_seconds=wrong, **TINY)
    with make_tiny(model, tensor_parallel_size=2, distributed_timeout_seconds=77) as llm:
        assert inside.workers(llm).watch.limit == 77
        assert llm.generate([[5]], SamplingParams(max_tokens=1), use_tqdm=False)


def test_a_replica_that_is_stopped_in_any_phase(
    two: LLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It restarts, the call succeeds, and answers are the same; a load that is stopped is limited too."""
    expected = [each["token_ids"] for each in two.generate(PROMPTS, GREEDY, use_tqdm=False)]
    replicas, norm = inside.replicas(two), "model.norm.weight"
    patience = replicas.limit

    class Impatient:
        """The limit is short while a replica is stopped, and not while one only starts."""

        def __get__(self, replicas: Any, owner: type) -> float:
            stopped = [each for each in replicas.processes if is_stopped(each)]
            return LIMIT if stopped else patience

    monkeypatch.setattr(pool, "MAX_FAILURES", 100)
    monkeypatch.delattr(replicas, "limit")
    monkeypatch.setattr(type(replicas), "limit", Impatient(), raising=False)
    calls: dict[str, Callable[[], Any]] = {
        "a step": lambda: two.generate(PROMPTS, GREEDY, use_tqdm=False),
        "update_weights": lambda: inside.residency(two).update([(norm, weights[norm])]),
        "sleep": lambda: inside.residency(two).sleep(1),
        "the start": lambda: two.reset_prefix_cache(),
    }
    weights = load_file(Path(two.config.model, "model.safetensors"))
    for phase, call in calls.items():
        with no_hang():
            inside.replicas(two).call(Replica.get_room)  # it is back
            if phase == "the start":
                os.kill(pids(two)[1], signal.SIGKILL)
                while inside.members(two)[1].is_ready:
                    inside.receive(two)
            stop(pids(two)[1])
            call()
        assert f"replica 1: it made no progress for 0.3 s during {phase} and was killed" in caplog.text
    two.wake_up()
    assert [each["token_ids"] for each in two.generate(PROMPTS, GREEDY, use_tqdm=False)] == expected
