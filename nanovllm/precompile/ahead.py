"""Ahead: the process that compiles an engine's Triton kernels while its weights load, as the engine sees it.

Whatever happens to that process, the engine starts: it compiles what it does not find. Compiles nothing here.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from multiprocessing.connection import wait
from pathlib import Path
from platform import python_version
from typing import Any, NamedTuple

import torch

from nanovllm.config import Config
from nanovllm.device import Device
from nanovllm.kernels.compat import HAS_TRITON, INTERPRET, multiprocessors, shared_memory, triton
from nanovllm.models.config import ModelConfig
from nanovllm.precompile.fork import Fork, can_fork
from nanovllm.precompile.keys import hash_functions_first

hash_functions_first()  # in this process and in the one that compiles: both must find the same kernels
logger = logging.getLogger("nanovllm")

VARIABLE = "NANOVLLM_COMPILE_PROCESSES"
MOST_SECONDS = 180.0  # that an engine waits for each part
_MOST_PROCESSES = 24
# Modules come from where this process has them, not from the current folder.
CHILD = (
    "import sys; sys.path[:] = filter(None, sys.path); from nanovllm.precompile.process import main; main()"
)
# The options that decide which kernels a start compiles; others change few of them.
_OPTIONS = (
    *("dtype", "kv_cache_dtype", "attention_backend", "deterministic", "kvcache_block_size", "max_num_seqs"),
    *("enforce_eager", "enable_prefix_caching", "return_routed_experts"),
)


class GPU(NamedTuple):
    """What kernels depend on, of a device."""

    name: str
    capability: tuple[int, int]
    shared_memory: int  # bytes that one program may use
    multiprocessors: int
    memory: tuple[int, int]  # free and total bytes

    @staticmethod
    def of(device: Device) -> GPU:
        sizes = shared_memory(device.torch), multiprocessors(device.torch)
        return GPU(device.name, device.capability, sizes[0], sizes[1], device.memory())


class Wanted(NamedTuple):
    """What the process gets: the engine whose kernels it compiles."""

    config: Config
    model_config: ModelConfig
    model_path: Path
    max_model_len: int
    gpu: GPU
    processes: int
    done: Path  # the file that says that all is compiled


class Ahead:
    """The process, from its start to its end."""

    def __init__(self) -> None:
        """Start it: it imports what it needs, and waits for `send`."""
        quiet = not logger.isEnabledFor(logging.DEBUG)
        self._process = Fork(CHILD, quiet) if can_fork() else self._interpreter(quiet)

    @staticmethod
    def _interpreter(quiet: bool) -> subprocess.Popen[bytes]:
        # It shall not take a GPU's memory, and what it imports is what this process has.
        path = os.pathsep.join(map(os.path.abspath, sys.path))
        return subprocess.Popen(
            [sys.executable, "-c", CHILD, str(os.getpid())],
            env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            start_new_session=True,  # Ctrl-C ends it with the start
        )

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def send(self, wanted: bytes) -> None:
        """Say what to compile: a pickled `Wanted`."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(wanted)

    def wait(self) -> bool:
        """Wait until the next part is compiled; return whether one was. False: the process has ended."""
        pipe = self._process.stdout
        if pipe is None or pipe.closed:
            return False
        if not wait([pipe.fileno()], MOST_SECONDS):
            logger.warning(
                "kernels were not compiled within %d s; each compiles on its first use", MOST_SECONDS
            )
            self.stop()
            return False
        return bool(os.read(pipe.fileno(), 1))

    def stop(self) -> None:
        """End the process, and all that it has started. A second call does nothing."""
        if self._process.returncode is None:
            for kill in (os.killpg, os.kill):  # a fork may not have its group yet
                with suppress(ProcessLookupError, PermissionError):
                    kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


_early: ContextVar[Ahead | None] = ContextVar("early", default=None)  # started before its model is known


@contextmanager
def started_early(options: Mapping[str, Any]) -> Iterator[None]:
    """In the block an engine with these options is made. Where nothing was compiled yet, the process imports
    what it needs while the engine reads its files."""
    one = all(options.get(f"{kind}_parallel_size", 1) == 1 for kind in ("tensor", "data"))
    wanted = one and options.get("device") != "cpu" and most_processes() and len(Device.all()) > 1
    early = _started() if wanted and not _has_compiled() else None
    token = _early.set(early)
    try:
        yield
    finally:
        if (left := _early.get()) is not None:
            left.stop()
        _early.reset(token)


def begin(
    config: Config,
    model_config: ModelConfig,
    model_path: Path,
    device: Device,
    ranks: int,
    max_model_len: int,
) -> Ahead | None:
    """Compile what an engine of so many ranks will launch. The arguments are those of a `ModelRunner`.

    None: all is compiled, or nothing can be. Then kernels compile on their first use.
    """
    ahead, processes = _early.get(), most_processes()
    _early.set(None)
    if device.is_cuda and ranks == 1 and processes:
        gpu = GPU.of(device)
        with suppress(
            pickle.PicklingError, AttributeError, TypeError
        ):  # a model that is made of users' objects
            done = notes_folder() / f"{version_digits()}-{_digest(config, model_config, gpu)}"
            wanted = Wanted(config, model_config, model_path, max_model_len, gpu, processes, done)
            content = pickle.dumps(wanted)
            if not done.exists() and (ahead := ahead or _started()) is not None:
                ahead.send(content)
                return ahead
    if ahead is not None:
        ahead.stop()
    return None


def _started() -> Ahead | None:
    """The process; None if there can be none."""
    try:
        return Ahead()
    except OSError as error:
        logger.info("no process compiles kernels ahead (%s); each compiles on its first use", error)
        return None


def most_processes() -> int:
    """How many processes compile at once; 0: none. ValueError for a wrong environment variable."""
    asked = os.environ.get(VARIABLE, "")
    if asked and not asked.isdecimal():
        raise ValueError(f"{VARIABLE}={asked} must be a number of processes; 0: kernels compile on first use")
    if not HAS_TRITON or INTERPRET:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return int(asked) if asked else min(cores - 1, _MOST_PROCESSES)


def notes_folder() -> Path:
    """Where it is noted what was compiled: beside the kernels, to be deleted with them."""
    return Path(triton.knobs.cache.dir, "nanovllm")


def _has_compiled() -> bool:
    """Whether anything was compiled here by these versions."""
    return any(notes_folder().glob(f"{version_digits()}-*"))


@lru_cache
def version_digits() -> str:
    """The versions of all that a compiled kernel depends on besides its model and its GPU, as 16 digits."""
    package = Path(__file__).parent.parent
    files = sorted(path for path in package.rglob("*.py") if "kernels" in path.parts)
    sources = [(str(path.relative_to(package)), path.stat().st_mtime_ns) for path in files]
    versions = torch.__version__, triton.__version__, python_version()
    return _digits(repr((versions, sources)).encode())


def _digest(config: Config, model_config: ModelConfig, gpu: GPU) -> str:
    options = {name: getattr(config, name) for name in _OPTIONS}
    return _digits(pickle.dumps((options, model_config, gpu[:-1])))


def _digits(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
