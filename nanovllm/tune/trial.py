"""Trials: each is a job on the sample in a process of its own, so that its memory is free when it ends.

All are forked from one process that has imported the package and has used no device, so a trial costs no
imports. Starts and ends the processes, which run `tune/process.py`. Decides nothing.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from typing import Any

from nanovllm.jobs.window import WINDOW_ROWS
from nanovllm.parallel.worker import start_process
from nanovllm.tune.halving import Failed, Measured, Outcome
from nanovllm.tune.process import MAX_REASON, run_trial
from nanovllm.tune.settings import Setting

_FORKS = get_context("forkserver")
# What trials import, and takes long: this package, and what an engine imports of others. None uses a device.
PRELOADED = (run_trial.__module__, "transformers.models.auto.tokenization_auto", "triton")
LEAVE_SECONDS = 60.0  # in which a trial must end after its reply
CLOSE_SECONDS = 10.0  # in which a trial that is asked to end must have closed its engine
WORKER_SECONDS = 5.0  # in which its workers must see that it was killed
_POLL_SECONDS = 0.02
_NOISE = ("Traceback", " ", "nanovllm: loading")  # beginnings of lines that are no reason


class Trials:
    """Runs settings on the first rows of a sample."""

    def __init__(self, job: Mapping[str, Any], warm_up: bool) -> None:
        """job: arguments of `nanovllm run`, as JSON. warm_up: whether a trial runs it again; the median of
        these passes counts."""
        self._job, self._warm_up = job, warm_up
        _FORKS.set_forkserver_preload(list(PRELOADED))

    def measure(self, setting: Setting, rows: int, limit: float) -> Outcome:
        """Run `rows` rows with a setting; a trial that takes longer than `limit` seconds is ended."""
        start = time.monotonic()
        job = {**self._job, **dict(setting), "limit": rows, "window": WINDOW_ROWS}
        receiver, sender = _FORKS.Pipe(duplex=False)
        with receiver, tempfile.NamedTemporaryFile("r", errors="replace") as said:
            with sender:
                process = _started((job, self._warm_up, said.name, sender))
            try:
                reply = None
                if not receiver.poll(max(0.0, limit - (time.monotonic() - start))):
                    return Failed(f"not done after {time.monotonic() - start:,.0f} s", is_late=True)
                with suppress(EOFError):
                    reply = receiver.recv()
                process.join(LEAVE_SECONDS)
            finally:
                _end(process)
            seconds = time.monotonic() - start
            if reply is None:
                return Failed(_reason(said.read(), process.exitcode))
        if "error" in reply:
            return Failed(reply["error"])
        took, others = reply["seconds"], reply["others"]
        loading = seconds - took - others
        return Measured(reply["rows"], took, loading, reply["read"], reply["written"], others)


def _started(arguments: tuple[object, ...]) -> BaseProcess:
    """A trial that runs, with these arguments of `run_trial`: a fork, or a fresh process where no socket can
    be made to ask for one, as in a temporary folder with a long path."""
    process: BaseProcess
    for context in (_FORKS, get_context("spawn")):
        process = context.Process(target=run_trial, args=arguments)
        try:
            start_process(process)
        except BaseException as error:
            _end(process)
            if context is not _FORKS or not isinstance(error, OSError):
                raise
        else:
            break
    return process


def _end(process: BaseProcess) -> None:
    """End a trial, if it runs, and the processes that it started.

    A trial that is asked closes its engine. Of one that does not answer, the workers see that it is gone, and
    remove what it owned. All that is left after that is killed.
    """
    if process.pid is None:
        return
    try:
        process.terminate()
        process.join(CLOSE_SECONDS)
        process.kill()
        process.join()
        until = time.monotonic() + WORKER_SECONDS
        while time.monotonic() < until:
            os.killpg(process.pid, 0)
            time.sleep(_POLL_SECONDS)
    except ProcessLookupError:  # nothing is left
        return
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def _reason(err: str, code: int | None) -> str:
    """Why a trial failed, from what it wrote on standard error."""
    lines = [line.strip() for line in err.splitlines() if line.strip() and not line.startswith(_NOISE)]
    if code == -signal.SIGKILL:
        return "it was killed, most likely because the memory of this machine was full"
    return lines[-1][:MAX_REASON] if lines else f"it ended with code {code}"
