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
from nanovllm.tune.trial import MAX_REASON, REPLY


class Timed:
    """Makes the engine of a job, and notes when it was loaded, when it ended and what it did."""

    def __init__(self) -> None:
        self.loaded = self.ended = 0.0
        self.read = self.written = 0

    def make(self, *args: Any, **options: Any) -> Any:
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
    timed = Timed()
    try:
        code = run(argparse.Namespace(**job), timed.make)
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
