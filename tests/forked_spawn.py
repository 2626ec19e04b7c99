"""Processes that multiprocessing spawns are forked from a server that has imported torch and the package.

Each import of torch takes a second or more, and a test of ranks starts several processes. What a process sees
is that of a spawned one: its parent, its open files, its signals, its arguments and its end. A process whose
environment or limits differ from the server's is spawned, because imports may depend on them.

`python -c "import forked_spawn; forked_spawn.serve(N)"` is the server; file N is its socket.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import util
from pathlib import Path
from threading import RLock
from typing import Any

# What processes of tests import: a module that is missing here is left out.
PRELOAD = [
    "nanovllm.parallel.replicas.replica",
    "nanovllm.integrations",
    "llvmlite.binding",
    "checked_llm",
    "tiny_models",
]
_SERVE = "import forked_spawn; forked_spawn.serve({}) # as spawn_main("
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_MOST_BYTES, _MOST_FILES = 2**16, 64


def _surroundings() -> dict[str, Any]:
    """What a spawned process inherits, and an import may read."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    ignored = [int(each) for each in signal.valid_signals() if signal.getsignal(each) is signal.SIG_IGN]
    return {
        "environment": environment,
        "limits": [resource.getrlimit(each) for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS)],
        "ignored": ignored,
        "cores": sorted(os.sched_getaffinity(0)),
    }


class Server:
    """The server, as a child of this process."""

    def __init__(self) -> None:
        self.owner, self.surroundings, self.lock = os.getpid(), _surroundings(), RLock()
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        code = _SERVE.format(theirs.fileno())
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, *flags, "-c", code, "--multiprocessing-fork"],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def can_fork(self) -> bool:
        return self.owner == os.getpid() and self.surroundings == _surroundings()

    def fork(self, arguments: list[bytes], files: list[int]) -> int:
        """Start a process that has these files at these numbers; return its id."""
        code = os.fsdecode(arguments[arguments.index(b"-c") + 1])
        files = sorted({0, 1, 2, *files})
        mask = [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
        request = [code, files, os.getpid(), os.getcwd(), mask]
        with self.lock, _adopts_orphans():
            socket.send_fds(self.socket, [json.dumps(request).encode()], files)
            return int(self.socket.recv(64))


@contextmanager
def _adopts_orphans() -> Iterator[None]:
    """During the block this process becomes the parent of its children's children that lose theirs."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_SUBREAPER, 0, 0, 0, 0)


_servers: list[Server] = []


@contextmanager
def forked_spawn() -> Iterator[None]:
    """During the block multiprocessing forks what it would spawn. The first one starts the server."""
    spawn = util.spawnv_passfds

    def start(path: bytes, arguments: list[bytes], files: list[int]) -> int:
        if not _servers or _servers[0].process.poll() is not None:
            _servers[:] = [Server()]
        if not _servers[0].can_fork():
            return spawn(path, arguments, files)
        return _servers[0].fork([os.fsencode(each) for each in arguments], [*files])

    util.spawnv_passfds = start
    try:
        yield
    finally:
        util.spawnv_passfds = spawn


def serve(descriptor: int) -> None:
    """Fork a process for each request, until the other end is closed."""
    for name in PRELOAD:
        with suppress(ImportError):
            import_module(name)
    gc.collect()
    gc.freeze()
    connection = socket.socket(fileno=descriptor)
    while True:
        message, files, _, _ = socket.recv_fds(connection, _MOST_BYTES, _MOST_FILES)
        if not message:
            os._exit(0)
        request = json.loads(message)
        reader, writer = os.pipe()
        if os.fork() == 0:
            if (child := os.fork()) == 0:
                _become(request, files)
                exec(request[0], {"__name__": "__main__"})  # raises SystemExit
            os.write(writer, str(child).encode())
            os._exit(0)
        os.wait()
        connection.send(os.read(reader, 64))
        for each in (reader, writer, *files):
            os.close(each)


def _become(request: list[Any], files: list[int]) -> None:
    """Take the files, the folder and the signals of the process that asked, once that is the parent."""
    _, numbers, parent, folder, mask = request
    while os.getppid() != parent:
        time.sleep(0.0005)
    high = [fcntl.fcntl(each, fcntl.F_DUPFD, max(numbers) + 1) for each in files]
    for number, file in zip(numbers, high, strict=True):
        os.dup2(file, number)
    for each in [int(name.name) for name in Path("/proc/self/fd").iterdir()]:
        if each not in numbers:
            with suppress(OSError):
                os.close(each)
    os.chdir(folder)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    sys.argv[:] = ["-c", "--multiprocessing-fork"]
