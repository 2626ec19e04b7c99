"""The process of a trial: it runs a job, and sends what it took.

Measures from the loaded model to the end of the job; chooses nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from nanovllm.jobs.errors import JobRefusedError
from nanovllm.jobs.run import run
from nanovllm.llm import LLM
from nanovllm.params import SamplingParams

MAX_REASON = 300  # characters
_NUM_THREADS = torch.get_num_threads()  # in a fork, torch has one: its parent might have used more


class Timed:
    """Has the engine of a job, which notes when it was loaded, when it ended and what it did."""

    def __init__(self) -> None:
        self.loaded = self.ended = 0.0
        self.read = self.written = 0

    def engine(self) -> type[LLM]:
        timed = self

        class TimedLLM(LLM):
            def get_default_sampling_params(self) -> SamplingParams:
                """What a job asks first of an engine that is loaded."""
                timed.loaded = timed.loaded or time.perf_counter()
                return super().get_default_sampling_params()

            def close(self) -> None:
                if not timed.ended:
                    timed.ended = time.perf_counter()
                    stats = self.stats()
                    timed.read = stats.num_computed_tokens + stats.num_cached_tokens
                    timed.written = stats.num_output_tokens
                super().close()

        return TimedLLM


def run_trial(job: dict[str, Any], said: str, sender: Connection) -> None:
    """Run a job, and send what it took, or its "error".

    job: arguments of `nanovllm run`, as JSON. said: the file that gets what the job prints.
    """
    torch.set_num_threads(_NUM_THREADS)
    os.setsid()  # Ctrl-C reaches the command alone, which ends this process with its workers
    try:
        output = os.open(said, os.O_WRONLY)
    except FileNotFoundError:  # the command ended while this process was made
        return
    os.dup2(output, 1)
    os.dup2(output, 2)
    sender.send(_measured(job))


def _measured(job: dict[str, Any]) -> dict[str, Any]:
    """What a job took."""
    job = {**job, "output": Path(job["output"])}
    _forget(job["output"])
    timed, arguments = Timed(), argparse.Namespace()
    vars(arguments).update(job)
    try:
        code = run(arguments, timed.engine())
    except JobRefusedError as error:
        return {"error": str(error)[:MAX_REASON]}
    lines = [json.loads(line) for line in job["output"].read_text().splitlines()]
    errors = [line["error"] for line in lines if line["error"] is not None]
    rows = len(lines) - len(errors)
    if code > 1 or not rows:
        why = errors[0] if errors else f"the job ended with code {code}"
        return {"error": str(why)[:MAX_REASON]}
    return {
        "rows": len(lines),
        "seconds": timed.ended - timed.loaded,
        "read": timed.read,
        "written": timed.written,
    }


def _forget(output: Path) -> None:
    """Remove the files of an earlier trial."""
    for path in (output, output.with_name(output.name + ".job.json")):
        path.unlink(missing_ok=True)
