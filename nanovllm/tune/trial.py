"""Trials: each is a job on the sample in a process of its own, so that its memory is free when it ends.

Starts and ends the process, which runs `tune/process.py`. Decides nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from nanovllm.jobs.window import WINDOW_ROWS
from nanovllm.tune.halving import Failed, Measured, Outcome
from nanovllm.tune.settings import Setting

REPLY = "nanovllm trial: "  # before the JSON of a trial, on its standard output
MAX_REASON = 300  # characters
_NOISE = ("Traceback", " ", "nanovllm: loading")  # beginnings of lines that are no reason


class Trials:
    """Runs settings on the first rows of a sample."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        """job: arguments of `nanovllm run`, as JSON."""
        self._job = job

    def measure(self, setting: Setting, rows: int, limit: float) -> Outcome:
        """Run `rows` rows with a setting; a trial that takes longer than `limit` seconds is ended."""
        start = time.monotonic()
        job = {**self._job, **dict(setting), "limit": rows, "window": WINDOW_ROWS}
        command = [sys.executable, "-m", "nanovllm.tune.process"]
        pipe = subprocess.PIPE
        # A group of its own: Ctrl-C reaches this process alone, which ends the trial with its workers.
        with subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
        ) as process:
            try:
                out, err = process.communicate(json.dumps(job), timeout=limit)
            except subprocess.TimeoutExpired:
                _end(process)
                return Failed(f"not done after {time.monotonic() - start:,.0f} s", is_late=True)
            except BaseException:
                _end(process)
                raise
        seconds = time.monotonic() - start
        for line in out.splitlines():
            if line.startswith(REPLY):
                reply = json.loads(line.removeprefix(REPLY))
                if "error" in reply:
                    return Failed(reply["error"])
                took = reply["seconds"]
                return Measured(reply["rows"], took, seconds - took, reply["read"], reply["written"])
        return Failed(_reason(err, process.returncode))


def _end(process: subprocess.Popen[str]) -> None:
    """End a trial and the processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _reason(err: str, code: int) -> str:
    """Why a trial failed, from what it wrote on standard error."""
    lines = [line.strip() for line in err.splitlines() if line.strip() and not line.startswith(_NOISE)]
    if code == -signal.SIGKILL:
        return "it was killed, most likely because the memory of this machine was full"
    return lines[-1][:MAX_REASON] if lines else f"it ended with code {code}"
