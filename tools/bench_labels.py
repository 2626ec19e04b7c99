"""Labels: rows that share an instruction, by the kind of answer, and how busy the device is meanwhile.

    python -m tools.bench labels                             # the 0.6B shape, 4,096 rows, 200 shared tokens
    python -m tools.bench labels --answers choice one --runs 5
    python -m tools.bench labels --model FOLDER --rows 64    # on a CPU there are no shares

Answers: `choice` of three labels (structured outputs), `one` token, `ids` (the logprobs of three tokens), and
`four` tokens. Every run has new ids. Prints the rows a second of each run after a whole one that warms up. On
a GPU one more run has a profiler, which makes gaps longer: the share of time with a kernel between the first
and the last one. The same kernel time over the median call is the share of the whole call. With --idle one
more says what the host does while no kernel runs.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

from nanovllm import LLM, SamplingParams, StructuredOutputsParams, demo_model_path
from nanovllm.cuda_graphs.graphs import CUDAGraphs
from nanovllm.engine.core import Core
from nanovllm.order.feed import Feed
from nanovllm.plan.scheduler import Scheduler
from nanovllm.runner.inputs import PendingOutput
from nanovllm.runner.ranks import OneRank
from tools.benchmark.kernels import busy_time, idle_times, kernels_of
from tools.benchmark.shapes import write_shape
from tools.benchmark.workloads import Workload, label

LABELS = ["positive", "negative", "neutral"]
ANSWERS: dict[str, dict[str, Any]] = {
    "choice": {"structured_outputs": StructuredOutputsParams(choice=LABELS), "max_tokens": 16},
    "one": {"max_tokens": 1},
    "ids": {"max_tokens": 1, "logprob_token_ids": [11, 12, 13]},
    "four": {"max_tokens": 4, "ignore_eos": True},
}


def kernel_seconds(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds with a kernel, and from the first to the last one, of a run on a GPU."""
    kernels = kernels_of(run)
    between = max(each.end for each in kernels) - kernels[0].start
    return busy_time(kernels) / 1e6, between / 1e6


# What the host does in a step and between two, as ranges of a trace.
HOST = {
    "order": (Feed, "__init__"),
    "fill": (Feed, "fill"),
    "plan": (Core, "_plan"),
    "launch": (OneRank, "run"),
    "capture": (CUDAGraphs, "capture"),
    "wait": (PendingOutput, "result"),
    "postprocess": (Scheduler, "postprocess"),
    "masks": (Scheduler, "masks"),
    "answers": (Core, "_answers"),
}


def print_idle(run: Callable[[], object]) -> None:
    """Print the milliseconds without a kernel in a run on a GPU, by what the host does meanwhile."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        for name, (owner, method) in HOST.items():
            stack.enter_context(patch.object(owner, method, _noted(name, getattr(owner, method))))
        with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
            run()
            torch.cuda.synchronize()
        path = Path(folder, "trace.json.gz")
        profiler.export_chrome_trace(str(path))
        idle = idle_times(path)
    for name, microseconds in sorted(idle.items(), key=lambda each: -each[1]):
        print(f"  {name or 'the rest':12} {microseconds / 1e3:8.1f} ms without a kernel", flush=True)


def _noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    return torch.profiler.record_function(name)(method)


def timed(llm: LLM, params: SamplingParams, work: Workload, shifts: Iterator[int]) -> float:
    """Seconds of a run, whose ids are shifted by the next number."""
    work = work.shifted(next(shifts), llm.model_config.vocab_size)
    begin = perf_counter()
    llm.generate(work.prompts, params, use_tqdm=False)
    return perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder, instead of dummy weights of the 0.6B shape")
    parser.add_argument("--answers", nargs="+", choices=ANSWERS, default=[*ANSWERS])
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--shared", type=int, default=200)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--max-num-seqs", type=int, help="default: the engine's")
    parser.add_argument("--idle", action="store_true", help="what the host does while no kernel runs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"tokenizer": demo_model_path(), "load_format": "dummy"}
        model = args.model or str(write_shape("qwen3-0.6b", Path(folder)))
        more = {"max_num_seqs": args.max_num_seqs} if args.max_num_seqs else {}
        llm = LLM(model, **more | ({} if args.model else options))
    shifts, on_gpu = count(17, 17), torch.cuda.is_available()
    for name in args.answers:
        params = SamplingParams(temperature=0.6, detokenize=name == "choice", **ANSWERS[name])
        run = partial(timed, llm, params, label(args.rows, args.shared), shifts)
        run()
        before = llm.stats()
        seconds = [run() for _ in range(args.runs)]
        after = llm.stats()
        steps = (after.num_prefill_steps + after.num_decode_steps) - (
            before.num_prefill_steps + before.num_decode_steps
        )
        rates = ", ".join(f"{args.rows / each:,.0f}" for each in seconds)
        line = (
            f"{name:7} {args.rows / median(seconds):9,.0f} rows/s of {rates}; {steps / args.runs:.1f} steps"
        )
        if on_gpu:
            kernel, between = kernel_seconds(run)
            line += (
                f"; busy {kernel / between:.0%} between kernels, {kernel / median(seconds):.0%} of the call"
            )
        print(line, flush=True)
        if args.idle and on_gpu:
            print_idle(run)
    llm.close()


if __name__ == "__main__":
    main()
