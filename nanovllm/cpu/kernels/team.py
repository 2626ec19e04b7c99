"""A team of threads that runs launches: the programs of a launch are claimed one by one, by whoever is free.

A launch ends when its programs have ended, not when all threads have arrived: a thread that the system put
aside holds up nothing but its own program. A thread that finds no work for some microseconds sleeps.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

from nanovllm.cpu.kernels.native import function_address, jit

# Threads of launches; 0: as many as torch uses, which are the physical cores that the process may use.
num_threads: ContextVar[int] = ContextVar("num_threads", default=0)

LAUNCH = struct.Struct("qqq")  # function, argument block, programs
LINE = 64  # bytes of a cache line; what threads write has one of its own
SYNC_BYTES = 2 * LINE  # of a launch: programs claimed, and programs ended
_RING = 64  # runs that a helper may lag behind
_SLOTS = 2 * _RING  # of arguments: one is written before its run waits for helpers
_SLOT_BYTES = SYNC_BYTES + LINE + 512
_SPINS = 3000  # looks for work before a helper sleeps, about 50 us
_PATIENCE = 2000  # looks for the end of a launch before a thread offers its core to others
# The control block, in lines: the number of runs; helpers asleep; mutex; condition; for each helper the runs
# that it finished; the ring of runs.
_ASLEEP, _MUTEX, _CONDITION, _FINISHED = 1, 2, 3, 5
_Function = Callable[..., Any]


def _tools() -> dict[str, Any]:
    """Atomic operations, calls of addresses and of the system, for the functions below."""
    from llvmlite import ir
    from numba.core import cgutils

    from nanovllm.cpu.kernels.emitting import call, emitted, i64, void

    word, status = ir.IntType(64), ir.IntType(32)
    pointer = ir.IntType(8).as_pointer()

    @emitted(i64, i64, i64)
    def fetch_add(b: Any, address: Any, value: Any) -> Any:
        return b.atomic_rmw("add", b.inttoptr(address, word.as_pointer()), value, "seq_cst")

    @emitted(i64, i64)
    def read(b: Any, address: Any) -> Any:
        return b.load_atomic(b.inttoptr(address, word.as_pointer()), "seq_cst", 8)

    @emitted(void, i64, i64)
    def write(b: Any, address: Any, value: Any) -> None:
        b.store_atomic(value, b.inttoptr(address, word.as_pointer()), "seq_cst", 8)

    @emitted(void, i64)
    def pause(b: Any, _: Any) -> None:
        if "x86_64" in str(b.module.triple):
            call(b, "llvm.x86.sse2.pause", ir.VoidType())

    @emitted(void, i64)
    def offer_core(b: Any, _: Any) -> None:
        call(b, "sched_yield", status)

    @emitted(void, i64, i64, i64, i64)
    def call_program(b: Any, function: Any, block: Any, program: Any, thread: Any) -> None:
        kind = ir.FunctionType(status, [pointer, pointer, word, word, word])
        unused = b.bitcast(cgutils.alloca_once(b, word), pointer)  # a kernel returns nothing, raises nothing
        b.call(b.inttoptr(function, kind.as_pointer()), [unused, unused, block, program, thread])

    def system(name: str, arguments: int) -> Any:
        def emit(b: Any, *addresses: Any) -> None:
            call(b, name, status, *(b.inttoptr(each, pointer) for each in addresses))

        emit.__name__ = name
        return emitted(void, *[i64] * arguments)(emit)

    return {
        **{each.__name__: each for each in (fetch_add, read, write, pause, offer_core, call_program)},
        **{name: system(f"pthread_{name}", 1) for name in ("mutex_lock", "mutex_unlock", "cond_broadcast")},
        "cond_wait": system("pthread_cond_wait", 2),
    }


def _make_work() -> _Function:
    """(launches, count, sync, thread): run `count` launches in order, with the other threads."""
    tools = _tools()
    fetch_add, read, pause = tools["fetch_add"], tools["read"], tools["pause"]
    offer_core, call_program = tools["offer_core"], tools["call_program"]
    patience, line, size, both = _PATIENCE, LINE, LAUNCH.size, SYNC_BYTES

    def work(launches: int, count: int, sync: int, thread: int) -> None:
        for index in range(count):
            launch, claimed = launches + size * index, sync + both * index
            ended = claimed + line
            programs = read(launch + 16)
            program = fetch_add(claimed, 1)
            if program < programs:
                function, block = read(launch), read(launch + 8)
                while program < programs:
                    call_program(function, block, program, thread)
                    fetch_add(ended, 1)
                    program = fetch_add(claimed, 1)
            looks = 0
            while read(ended) < programs:
                pause(0)
                looks += 1
                if looks > patience:
                    offer_core(0)

    return work


def _make_alone() -> _Function:
    """(function, block, programs): run the programs of one launch in this thread."""
    call_program = _tools()["call_program"]

    def alone(function: int, block: int, programs: int) -> None:
        for program in range(programs):
            call_program(function, block, program, 0)

    return alone


def _make_run() -> _Function:
    """(control, helpers, launches, count, sync, after): publish a run, and work until it ended."""
    tools, work = _tools(), jit(_make_work())
    read, write, pause, offer_core = (tools[each] for each in ("read", "write", "pause", "offer_core"))
    lock, unlock, broadcast = (tools[each] for each in ("mutex_lock", "mutex_unlock", "cond_broadcast"))
    ring, line, both = _RING, LINE, SYNC_BYTES
    asleep, mutex, condition, finished = (LINE * each for each in (_ASLEEP, _MUTEX, _CONDITION, _FINISHED))

    def run(control: int, helpers: int, launches: int, count: int, sync: int, after: int) -> None:
        number = read(control) + 1
        needed = max(after, number - ring)
        for helper in range(helpers):
            while read(control + finished + line * helper) < needed:
                pause(0)
                offer_core(0)
        place = control + finished + line * (helpers + number % ring)
        write(place, launches)
        write(place + 8, count)
        write(place + 16, sync)
        for index in range(count):
            write(sync + both * index, 0)
            write(sync + both * index + line, 0)
        write(control, number)
        if read(control + asleep):
            lock(control + mutex)
            broadcast(control + condition)
            unlock(control + mutex)
        work(launches, count, sync, 0)

    return run


def _make_help() -> _Function:
    """(control, helpers, helper): run what is published, for ever."""
    tools, work = _tools(), jit(_make_work())
    fetch_add, read, write, pause = (tools[each] for each in ("fetch_add", "read", "write", "pause"))
    lock, unlock, wait = (tools[each] for each in ("mutex_lock", "mutex_unlock", "cond_wait"))
    ring, line, spins = _RING, LINE, _SPINS
    asleep, mutex, condition, finished = (LINE * each for each in (_ASLEEP, _MUTEX, _CONDITION, _FINISHED))

    def help_(control: int, helpers: int, helper: int) -> None:
        own = control + finished + line * helper
        done, looks = read(own), 0
        while True:
            if read(control) == done:
                pause(0)
                looks += 1
                if looks > spins:
                    lock(control + mutex)
                    fetch_add(control + asleep, 1)
                    while read(control) == done:
                        wait(control + condition, control + mutex)
                    fetch_add(control + asleep, -1)
                    unlock(control + mutex)
                    looks = 0
                continue
            looks = 0
            done += 1
            place = control + finished + line * (helpers + done % ring)
            work(read(place), read(place + 8), read(place + 16), helper + 1)
            write(own, done)

    return help_


def _native(make: Callable[[], _Function], arguments: int) -> Callable[..., object]:
    """A compiled function without a result, to be called without the interpreter's lock."""
    kinds = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * arguments]
    function = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(function_address(make))
    unused = (ctypes.c_int64 * 2)()
    place = ctypes.addressof(unused)

    def called(*values: int) -> None:
        function(place, place, *values)

    called.keeps = unused  # type: ignore[attr-defined]
    return called


def aligned(num_bytes: int) -> tuple[np.ndarray, int]:
    """Zeroed memory, and the address of its first whole cache line, from which it has `num_bytes`."""
    memory = np.zeros(num_bytes + LINE, np.uint8)
    return memory, -(-memory.ctypes.data // LINE) * LINE


OWN = (_make_run, _make_alone, _make_help)  # what a team compiles


class Team:
    """`size` threads: the one that calls, and helpers, which live as long as the process. Runs follow one
    another; a thread that calls while another thread's run is on waits for it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.RLock()
        self._helpers = size - 1
        self._memory, self._control = aligned(LINE * (_FINISHED + self._helpers + _RING))
        self._slots, self._first_slot = aligned(_SLOTS * _SLOT_BYTES)
        self.arguments = self._first_slot, _SLOTS * _SLOT_BYTES  # address and bytes of all argument blocks
        libc = ctypes.CDLL(None)
        libc.pthread_mutex_init(ctypes.c_void_p(self._control + LINE * _MUTEX), None)
        libc.pthread_cond_init(ctypes.c_void_p(self._control + LINE * _CONDITION), None)
        for memory in (self._memory, self._slots):  # helpers read it as long as the process lives
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
        self._bytes = self._slots.data
        self._ended: list[tuple[int, object]] = []  # of runs that helpers may still look at
        self._runs = ctypes.c_int64.from_address(self._control)
        self._run = _native(_make_run, 6)
        self._alone = _native(_make_alone, 3)
        help_ = _native(_make_help, 3)
        for helper in range(self._helpers):
            name, place = f"nanovllm-cpu-{helper + 1}", (self._control, self._helpers, helper)
            threading.Thread(target=help_, args=place, name=name, daemon=True).start()

    def run(self, launches: int, count: int, sync: int, after: int = 0) -> int:
        """Run `count` launches, an array of LAUNCH at this address, and wait for their end; return the number
        of this run.

        sync: the address of SYNC_BYTES for each launch. after: the run that used this memory last. The memory
        must live until it is given to `free`.
        """
        with self.lock:
            after = min(after, self._runs.value)  # a caller that was interrupted may name one that never was
            self._run(self._control, self._helpers, launches, count, sync, after)
            return self._runs.value

    @property
    def next_run(self) -> int:
        """The number of the next run; ask for it within `lock`."""
        return self._runs.value + 1

    def free(self, memory: object, run: int) -> None:
        """Keep the memory of launches until no helper can look at this run any more."""
        with self.lock:
            done = min((self._done(helper) for helper in range(self._helpers)), default=run)
            self._ended = [each for each in (*self._ended, (run, memory)) if each[0] > done]

    def lose_helpers(self) -> None:
        """In a forked child, which has only the thread that forked. Another one may have held the lock."""
        self._helpers, self.lock = 0, threading.RLock()

    def _done(self, helper: int) -> int:
        return ctypes.c_int64.from_address(self._control + LINE * (_FINISHED + helper)).value

    def run_one(self, function: int, programs: int, pack: struct.Struct, arguments: tuple[Any, ...]) -> None:
        """Run the programs of one launch and wait for their end."""
        with self.lock:
            start = self._first_slot + (self._runs.value + 1) % _SLOTS * _SLOT_BYTES
            offset, block = start - self._slots.ctypes.data, start + SYNC_BYTES + LINE
            pack.pack_into(self._bytes, offset + SYNC_BYTES + LINE, *arguments)
            if programs == 1 or not self._helpers:
                self._alone(function, block, programs)
                return
            LAUNCH.pack_into(self._bytes, offset + SYNC_BYTES, function, block, programs)
            self._run(self._control, self._helpers, start + SYNC_BYTES, 1, start, 0)


_teams: dict[int, Team] = {}  # by size; threads belong to the process, as torch's do
_making = threading.Lock()


def _forget() -> None:
    """In a forked child: new teams have helpers of its own, and torch has one thread, as it would wait for
    those of the parent."""
    global _making
    torch.set_num_threads(1)
    for each in _teams.values():
        each.lose_helpers()
    _teams.clear()
    _making = threading.Lock()


os.register_at_fork(after_in_child=_forget)


def team_size() -> int:
    """The number of threads of this context's team."""
    return num_threads.get() or torch.get_num_threads()


def team() -> Team:
    """The team of this context's number of threads."""
    size = team_size()
    found = _teams.get(size)
    if found is None:
        with _making:
            found = _teams.get(size) or _teams.setdefault(size, Team(size))
    return found
