"""The sample of a job's rows: a file of rows that a hash of their numbers chooses, the same in every search.

Reads the input once, and keeps the sample alone.
"""

from __future__ import annotations

import argparse
import copy
import json
from heapq import heappush, heappushpop
from pathlib import Path
from typing import Any

import xxhash

from nanovllm.jobs.errors import JobRefusedError
from nanovllm.jobs.job import find_files, open_job
from nanovllm.jobs.output import to_text

MOST_ROWS = 8192


def write_sample(args: argparse.Namespace, path: Path) -> tuple[int, int]:
    """Write at most MOST_ROWS rows to `path` as JSON Lines; return their number and that of the input's rows.

    args: of the command line. The rows stand in the order of their hashes, so the first ones are a sample,
    too. Rows that cannot be read are passed over. JobRefusedError if no row can be read, and as a job.
    """
    source, _ = open_job(args, find_files(args.inputs))
    kept: list[tuple[int, int, str]] = []  # a heap: minus the hash, the row, its line
    num_rows = 0
    for row in source.rows():
        num_rows += 1
        order = xxhash.xxh3_64_intdigest(str(row.index).encode())
        if len(kept) == MOST_ROWS and -order < kept[0][0]:
            continue
        try:
            line = to_text({name: _plain(value) for name, value in row.values().items()})
        except ValueError:
            continue
        (heappush if len(kept) < MOST_ROWS else heappushpop)(kept, (-order, row.index, line))
    if not kept:
        raise JobRefusedError(f"{', '.join(args.inputs)}: no row can be read, so there is nothing to try")
    path.write_text("".join(f"{line}\n" for _, _, line in sorted(kept, reverse=True)))
    return len(kept), num_rows


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    return None if isinstance(value, bytes) else value


def job_arguments(args: argparse.Namespace, sample: Path, output: Path) -> dict[str, Any]:
    """The arguments of `nanovllm run` for the sample, as JSON; options of `LLM` among them."""
    job = copy.copy(vars(args))
    for name in ("minutes", "change_answers", "command", "given"):
        job.pop(name, None)
    more = {"max_errors": None, "retry_errors": False, "extend": False, "ordered": False, "report": None}
    job |= more | {"inputs": [str(sample)], "output": str(output), "format": "jsonl", "shard": None}
    job |= {"quoting": None, "delimiter": None, "csv_safe": False, "echo": None}
    found: dict[str, Any] = json.loads(json.dumps(job))
    return found
