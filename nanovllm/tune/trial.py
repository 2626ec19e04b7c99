"""A trial: a job on the sample in a process of its own, so that its memory is free when it ends.

`Trials` starts the process, and `main` is what it runs. Decides nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanovllm.jobs.runner import WINDOW_ROWS
from nanovllm.tune.halving import Failed, Measured, Outcome
from nanovllm.tune.settings import Setting

_REPLY = "nanovllm trial: "  # before the JSON of a trial, on its standard output
_MAX_REASON = 300  # characters
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
        command = [sys.executable, "-m", "nanovllm.tune.trial"]
        pipe = subprocess.PIPE
        # A group of its own: Ctrl-C reaches this process alone, which ends the trial with its workers.
        with subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
        ) as process:
            try:
                out, err = process.communicate(json.dumps(job), timeout=limit)
            except subprocess.TimeoutExpired:
                _end(process)
                seconds = time.monotonic() - start
                return Failed(f"not done after {seconds:,.0f} s, so it is slower than others", seconds)
            except BaseException:
                _end(process)
                raise
        seconds = time.monotonic() - start
        for line in out.splitlines():
            if line.startswith(_REPLY):
                reply = json.loads(line.removeprefix(_REPLY))
                if "error" in reply:
                    return Failed(reply["error"], seconds)
                return Measured(**reply, loading=seconds - reply["seconds"])
        return Failed(_reason(err, process.returncode), seconds)


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
    return lines[-1][:_MAX_REASON] if lines else f"it ended with code {code}"


class Timed:
    """Makes the engine of a job, and notes when it was loaded, when it ended and what it did."""

    def __init__(self) -> None:
        self.loaded = self.ended = 0.0
        self.read = self.written = 0

    def make(self, *args: Any, **options: Any) -> Any:
        from nanovllm.llm import LLM

        timed = self

        class TimedLLM(LLM):
            def close(self) -> None:
                if not timed.ended:
                    timed.ended = time.perf_counter()
                    stats = self.stats()
                    timed.read = stats.num_computed_tokens + stats.num_cached_tokens
                    timed.written = stats.num_output_tokens
                super().close()

        llm = TimedLLM(*args, **options)
        self.loaded = time.perf_counter()
        return llm


def main() -> None:
    """Run the job that standard input describes; print what it took."""
    job = json.load(sys.stdin)
    job["output"] = Path(job["output"])
    _forget(job["output"])
    from nanovllm.jobs.run import run

    timed = Timed()
    code = run(argparse.Namespace(**job), timed.make)
    lines = [json.loads(line) for line in job["output"].read_text().splitlines()]
    errors = [line["error"] for line in lines if line["error"] is not None]
    rows = len(lines) - len(errors)
    if code > 1 or not rows:
        why = errors[0] if errors else f"the job ended with code {code}"
        reply: dict[str, Any] = {"error": str(why)[:_MAX_REASON]}
    else:
        reply = {
            "rows": len(lines),
            "seconds": timed.ended - timed.loaded,
            "read": timed.read,
            "written": timed.written,
        }
    print(_REPLY + json.dumps(reply), flush=True)


def _forget(output: Path) -> None:
    """Remove the files of an earlier trial."""
    for path in (output, output.with_name(output.name + ".job.json")):
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
