"""The process of a trial: it runs a job, and sends what it took.

Measures from the loaded model to the end of the job; chooses nothing. On a GPU the first pass of an engine
loads kernels and captures graphs, so the job runs again and those passes count.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch

from nanovllm.jobs.errors import JobRefusedError
from nanovllm.jobs.run import run
from nanovllm.llm import LLM
from nanovllm.params import SamplingParams

MAX_REASON = 300  # characters
_PASSES, _ENOUGH = 3, 2.0  # after the one that warms up: at most, and the seconds of all that are enough
_NUM_THREADS = torch.get_num_threads()  # in a fork, torch has one: its parent might have used more


class Timed:
    """Has the engine of a job, which notes when a pass of the job began, when it ended and what it did.

    The engine stays when a job closes it, so that the job can run again; `close` closes it.
    """

    def __init__(self) -> None:
        self.llm: LLM | None = None
        self.began = self.ended = 0.0
        self.read = self.written = 0

    def engine(self) -> type[LLM]:
        timed = self

        class TimedLLM(LLM):
            def get_default_sampling_params(self) -> SamplingParams:
                """What a job asks first of an engine that is loaded."""
                timed.llm, timed.began = self, time.perf_counter()
                stats = self.stats()
                timed.read = -stats.num_computed_tokens - stats.num_cached_tokens
                timed.written = -stats.num_output_tokens
                return super().get_default_sampling_params()

            def close(self) -> None:
                if timed.llm is not self:
                    return super().close()
                timed.ended = time.perf_counter()
                stats = self.stats()
                timed.read += stats.num_computed_tokens + stats.num_cached_tokens
                timed.written += stats.num_output_tokens
                return None

        return TimedLLM

    def again(self, model: str, **options: object) -> LLM:
        """The engine that is loaded, with an empty cache of prefixes: for the same job."""
        assert self.llm is not None, "a pass has ended"
        self.llm.reset_prefix_cache()
        return self.llm

    def close(self) -> None:
        llm, self.llm = self.llm, None
        if llm is not None:
            llm.close()


def run_trial(job: dict[str, Any], warm_up: bool, said: str, sender: Connection) -> None:
    """Run a job, and send what it took, or its "error".

    job: arguments of `nanovllm run`, as JSON. warm_up: whether the job runs again in its engine, three times
    or for two seconds; the median of these passes counts. said: the file that gets what the job prints.
    """
    torch.set_num_threads(_NUM_THREADS)
    os.setsid()  # Ctrl-C reaches the command alone, which ends this process with its workers
    try:
        output = os.open(said, os.O_WRONLY)
    except FileNotFoundError:  # the command ended while this process was made
        return
    os.dup2(output, 1)
    os.dup2(output, 2)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # which SIGTERM raises in a job
    sender.send(_measured(job, warm_up))


def _measured(job: dict[str, Any], warm_up: bool) -> dict[str, Any]:
    """What a job took."""
    timed, took = Timed(), list[float]()
    try:
        reply = _passed(job, timed, timed.engine())
        if not warm_up or "error" in reply:
            return reply
        warming = reply["seconds"]
        while len(took) < _PASSES and sum(took) < _ENOUGH and "error" not in reply:
            reply = _passed(job, timed, timed.again)
            took.append(reply.get("seconds", 0.0))
        if "error" in reply:
            return reply
        middle = median(took)
        return reply | {"seconds": middle, "others": warming + sum(took) - middle}
    finally:
        timed.close()


def _passed(job: dict[str, Any], timed: Timed, make_llm: Callable[..., LLM]) -> dict[str, Any]:
    """What a pass of a job took, in the engine of make_llm."""
    job = {**job, "output": Path(job["output"])}
    _forget(job["output"])
    arguments = argparse.Namespace()
    vars(arguments).update(job)
    try:
        code = run(arguments, make_llm)
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
        "seconds": timed.ended - timed.began,
        "others": 0.0,
        "read": timed.read,
        "written": timed.written,
    }


def _forget(output: Path) -> None:
    """Remove the files of an earlier trial."""
    for path in (output, output.with_name(output.name + ".job.json")):
        path.unlink(missing_ok=True)
