"""Kernels that compile ahead of an engine: what is found without a GPU, and that no start depends on it."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams, demo_model_path
from nanovllm.config import Config
from nanovllm.device import Device
from nanovllm.errors import ModelLoadError
from nanovllm.layers.stream import Group
from nanovllm.models.registry import load_model_config
from nanovllm.precompile import ahead, runner
from nanovllm.precompile.ahead import GPU, Ahead, Wanted
from nanovllm.runner.model_runner import ModelRunner

H200 = GPU("NVIDIA H200", (9, 0), 232_448, 132, (140 * 2**30, 141 * 2**30))
FEW = ("_silu_and_mul_kernel", "_keep_tokens_kernel", "_take_tokens_kernel")
# In one process, because importing torch takes longer than all else.
FIND = f"""
import json, pickle, sys, torch
torch.backends.cuda.is_built = lambda: True  # with torch for CPUs: kernels are defined as for a GPU
import triton
from nanovllm.kernels import decode_attention, paged, prefill_attention
from nanovllm.precompile import imitation, process

wanted, told, found = pickle.load(sys.stdin.buffer), dict(), []
imitate = imitation.imitate

def noted(gpu, compile):
    def note(source, *more):
        found.append((source, *more))
        if source.fn.__name__ in {FEW}:
            compile(source, *more)
    return imitate(gpu, note)

process.imitate = noted
process._compile_launcher = lambda source, kernel: None  # needs the driver's library
process.compile_all(wanted)
told["names"] = [source.fn.__name__ for source, *_ in found]
told["slow imports"] = [name for name in ("torch._dynamo", "sympy") if name in sys.modules]
told["done"] = wanted.done.exists()

device = imitation.ImitatedDevice(wanted.gpu)
for name, value in (("_BLOCKS", 777), ("_BLOCKS", 1024)):
    setattr(imitation, name, value)
    before = len(found)
    told["parts"] = [part for part in imitation.steps(wanted, device)]
    told[f"more with {{value}} blocks"] = len(found) - before

hits, forks = [], process.Forks(1)
triton.knobs.compilation.listener = lambda cache_hit, **others: hits.append(cache_hit)
few = [each for each in found if each[0].fn.__name__ in {FEW}]
for source, target, options in few:
    forks._compile(source, target=target, options=options)
told["hits"] = hits

process._compile_launcher = lambda source, kernel: 1 / 0
forks.compile(*few[0])
forks.wait(1)
told["failed"] = forks.failed

kernels = [paged.dot, prefill_attention._prefill_kernel, decode_attention._decode_chunk_kernel]
for order in kernels, kernels[::-1]:
    for module in list(sys.modules.values()):
        for value in list(vars(module).values()):
            if isinstance(value, triton.runtime.jit.JITFunction):
                value.hash, value.used_global_vals = None, dict()
    told.setdefault("keys", []).append(dict((each.fn.__name__, each.cache_key) for each in order))
print(json.dumps(told))
"""


def environment(**more: str) -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | more


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What is found and compiled for an H200, here."""
    cache = tmp_path_factory.mktemp("cache")
    config = Config.from_kwargs(demo_model_path(), device="cpu", dtype="bfloat16")
    model_config = load_model_config(demo_model_path())
    wanted = Wanted(config, model_config, demo_model_path(), 512, H200, 2, cache / "nanovllm/done")
    done = subprocess.run(
        [sys.executable, "-c", FIND],
        input=pickle.dumps(wanted),
        env=environment(TRITON_CACHE_DIR=str(cache)),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    parts, _, found = done.stdout.decode().partition("{")
    assert parts == ".."  # a byte for each part
    return dict(json.loads("{" + found))


def test_the_kernels_of_a_start_are_found_without_a_gpu(told: dict[str, Any]) -> None:
    assert 15 < len(told["names"]) < 100
    needed = {"_prefill_kernel", "_decode_chunk_kernel", "_sample_pick_kernel", "_gemv_kernel", *FEW}
    assert needed <= {*told["names"]}
    assert told["parts"] == ["start", "prompts"]
    assert told["slow imports"] == []  # they would take longer than all the steps


def test_no_kernel_depends_on_the_number_of_blocks(told: dict[str, Any]) -> None:
    assert (told["more with 777 blocks"], told["more with 1024 blocks"]) == (0, 0)


def test_a_launch_finds_what_was_compiled(told: dict[str, Any]) -> None:
    assert len(told["hits"]) >= len(FEW) and set(told["hits"]) == {True}
    assert told["done"]


def test_a_fork_that_fails_is_noticed(told: dict[str, Any]) -> None:
    assert told["failed"] == 1


def test_a_kernel_has_one_key_in_any_order(told: dict[str, Any]) -> None:
    """Triton 3.6 forgets constants of functions that were not hashed before."""
    first, second = told["keys"]
    assert first == second


# -- the process --------------------------------------------------------------------------------------------


@pytest.fixture(params=["a fork", "an interpreter"])
def child(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Ahead]]:
    """Starts the process with other code."""
    made: list[Ahead] = []
    monkeypatch.setattr(ahead, "can_fork", lambda: request.param == "a fork")

    def start(code: str) -> Ahead:
        monkeypatch.setattr(ahead, "CHILD", code)
        made.append(Ahead())
        return made[-1]

    yield start
    for each in made:
        each.stop()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pid: int) -> bool:
    for _ in range(400):
        if not is_alive(pid):
            return True
        time.sleep(0.05)
    return False


FORKS = (
    "import os, sys, time; pid = os.fork() or time.sleep(99); os.write(1, b'.'); print(pid); time.sleep(99)"
)


def test_parts_are_waited_for_in_order(child: Callable[[str], Ahead]) -> None:
    process = child("import os, sys; n = len(sys.stdin.buffer.read()); os.write(1, b'.' * n)")
    process.send(b"ab")
    assert [process.wait() for _ in range(4)] == [True, True, False, False]
    process.stop()
    process.stop()
    assert not process.wait()


def test_a_process_that_dies_is_not_waited_for(child: Callable[[str], Ahead]) -> None:
    process = child("raise SystemExit(3)")
    process.send(bytes(2**20))  # more than a pipe holds: the process has closed it
    assert not process.wait()


def test_a_process_that_hangs_is_ended(
    child: Callable[[str], Ahead], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "MOST_SECONDS", 0.1)
    process = child("import time; time.sleep(99)")
    assert not process.wait()
    assert not process.wait()


def test_the_end_is_that_of_all_its_processes(tmp_path: Path, child: Callable[[str], Ahead]) -> None:
    file = tmp_path / "pid"
    process = child(FORKS.replace("print(pid)", f"open({str(file)!r}, 'w').write(str(pid))"))
    assert process.wait()
    while not file.exists() or not file.read_text():
        time.sleep(0.01)
    pid, parent = int(file.read_text()), Path(f"/proc/{process.pid}")
    assert is_alive(pid) and parent.exists()
    process.stop()
    assert gone(pid)
    assert not parent.exists()  # nor is it a zombie


@pytest.mark.parametrize("forks", [True, False])
def test_it_ends_with_a_parent_that_is_killed(tmp_path: Path, forks: bool) -> None:
    """And so do the forks that compile."""
    file = tmp_path / "pids"
    inner = (
        "import os, sys, time; from nanovllm.precompile import process; process._end_with(int(sys.argv[1]))\n"
        "parent = os.getpid()\n"
        "if child := os.fork():\n"
        f"    open({str(file)!r}, 'w').write(f'{{parent}} {{child}}\\\\n'); time.sleep(99)\n"
        "process._end_with(parent); time.sleep(99)"
    )
    code = (
        "from nanovllm.precompile import ahead\n"
        f"assert ahead.can_fork()\nahead.can_fork = lambda: {forks}\n"
        f"ahead.CHILD = '''{inner}'''; started = ahead.Ahead(); input()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, env=environment())
    try:
        while not file.exists() or not file.read_text().endswith("\n"):
            assert parent.poll() is None
            time.sleep(0.02)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        with suppress(AttributeError):
            parent.stdin.close()  # type: ignore[union-attr]
    assert all(gone(int(pid)) for pid in file.read_text().split())


# -- the engine ---------------------------------------------------------------------------------------------


class Told:
    """In place of a process: what it was asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def send(self, content: bytes) -> None:
        self.calls.append("send")

    def wait(self) -> bool:
        self.calls.append("wait")
        return True

    def stop(self) -> None:
        self.calls.append("stop")


def test_a_start_waits_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    monkeypatch.setattr(runner, "begin", lambda *arguments: told)
    order = told.calls

    def warmup_model(self: ModelRunner) -> int:
        order.append("first step")
        return 0

    monkeypatch.setattr(ModelRunner, "warmup_model", warmup_model)
    with LLM(demo_model_path(), device="cpu") as llm:
        assert order == ["wait", "first step", "wait", "stop"]
        assert llm.generate(["12 + 3 ="], SamplingParams(max_tokens=1), use_tqdm=False)
        llm.sleep()
        llm.wake_up()
    assert order == ["wait", "first step", "wait", "stop"]


@pytest.mark.parametrize("call", ["load_weights", "calibrate_kv_cache", "warmup_model", "capture_cudagraph"])
def test_a_start_that_fails_leaves_nothing(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    monkeypatch.setattr(runner, "begin", lambda *arguments: told)

    def fail(*arguments: object) -> None:
        raise ModelLoadError("broken") if call == "load_weights" else KeyboardInterrupt

    fail.__name__ = call
    monkeypatch.setattr(ModelRunner, call, fail)
    with pytest.raises((ModelLoadError, KeyboardInterrupt)):
        LLM(demo_model_path(), device="cpu")
    assert told.calls[-1] == "stop" and told.calls.count("stop") == 1


def test_a_cpu_has_nothing_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "Ahead", pytest.fail)
    monkeypatch.setattr(ahead, "most_processes", lambda: 4)
    with LLM(demo_model_path(), device="cpu"):
        pass


class FakeGPU(Device):
    def __init__(self) -> None:
        self.torch = torch.device("meta")

    is_cuda = property(lambda self: True)  # type: ignore[assignment]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Told]:
    """A machine with a GPU, four processes and an empty cache; the processes that it starts."""
    made: list[Told] = []
    monkeypatch.setattr(ahead, "Ahead", lambda: made.append(Told()) or made[-1])
    monkeypatch.setattr(ahead, "most_processes", lambda: 4)
    monkeypatch.setattr(ahead, "notes_folder", lambda: tmp_path)
    monkeypatch.setattr(ahead, "version_digits", lambda: "version")
    monkeypatch.setattr(ahead.GPU, "of", staticmethod(lambda device: H200))
    monkeypatch.setattr(ahead.Device, "all", lambda: [None, FakeGPU()])
    return made


def begun(**options: Any) -> Any:
    model = demo_model_path()
    config = Config.from_kwargs(model, device="cpu", **options)
    return ahead.begin(config, load_model_config(model), model, FakeGPU(), Group().size, 512)


def test_it_starts_early_where_nothing_was_compiled(gpu: list[Told], tmp_path: Path) -> None:
    with ahead.started_early({}):
        assert len(gpu) == 1
        assert begun() is gpu[0]
    assert gpu[0].calls == ["send"]  # the engine ends it
    with ahead.started_early({}):  # an engine that is not made
        pass
    assert gpu[1].calls == ["stop"]
    (tmp_path / "version-other").touch()
    with ahead.started_early({}):
        assert len(gpu) == 2
        assert begun() is gpu[2]
    (tmp_path / "version-other").unlink()
    for options in ({"device": "cpu"}, {"tensor_parallel_size": 2}, {"data_parallel_size": 2}):
        with ahead.started_early(options):
            assert len(gpu) == 3


def test_what_is_compiled_is_not_compiled_again(gpu: list[Told], tmp_path: Path) -> None:
    contents: list[bytes] = []
    gpu_told = begun()
    assert gpu_told is gpu[0]
    gpu_told.send = contents.append
    with ahead.started_early({}):
        gpu[1].send = contents.append  # type: ignore[method-assign]
        begun()
    done = pickle.loads(contents[0]).done
    assert done.parent == tmp_path
    done.touch()
    assert begun() is None and len(gpu) == 2
    assert begun(gpu_memory_utilization=0.5, seed=3) is None  # no kernel depends on these
    assert begun(max_num_seqs=7) is gpu[2]


def test_a_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "HAS_TRITON", True)
    monkeypatch.setattr(ahead, "INTERPRET", False)
    monkeypatch.setattr(ahead.os, "sched_getaffinity", lambda pid: set(range(8)))
    assert ahead.most_processes() == 7
    monkeypatch.setattr(ahead.os, "sched_getaffinity", lambda pid: {0})
    assert ahead.most_processes() == 0  # one core: the engine's
    monkeypatch.setenv(ahead.VARIABLE, "3")
    assert ahead.most_processes() == 3
    monkeypatch.setenv(ahead.VARIABLE, "many")
    with pytest.raises(ValueError, match="NANOVLLM_COMPILE_PROCESSES=many must be a number"):
        ahead.most_processes()
