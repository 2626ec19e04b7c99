"""The process of a trial: it runs a job that standard input describes, and prints what it took.

Measures from the loaded model to the end of the job; chooses nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from nanovllm.jobs.errors import JobRefusedError
from nanovllm.jobs.run import run
from nanovllm.llm import LLM
from nanovllm.params import SamplingParams
from nanovllm.tune.trial import MAX_REASON, REPLY


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


def main() -> None:
    """Run the job that standard input describes; print what it took."""
    job = json.load(sys.stdin)
    job["output"] = Path(job["output"])
    _forget(job["output"])
    timed, arguments = Timed(), argparse.Namespace()
    vars(arguments).update(job)
    try:
        code = run(arguments, timed.engine())
    except JobRefusedError as error:
        print(REPLY + json.dumps({"error": str(error)[:MAX_REASON]}), flush=True)
        return
    lines = [json.loads(line) for line in job["output"].read_text().splitlines()]
    errors = [line["error"] for line in lines if line["error"] is not None]
    rows = len(lines) - len(errors)
    if code > 1 or not rows:
        why = errors[0] if errors else f"the job ended with code {code}"
        reply: dict[str, Any] = {"error": str(why)[:MAX_REASON]}
    else:
        reply = {
            "rows": len(lines),
            "seconds": timed.ended - timed.loaded,
            "read": timed.read,
            "written": timed.written,
        }
    print(REPLY + json.dumps(reply), flush=True)


def _forget(output: Path) -> None:
    """Remove the files of an earlier trial."""
    for path in (output, output.with_name(output.name + ".job.json")):
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
