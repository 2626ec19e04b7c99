"""Throughput of offline generation, and its share of what the machine's memory bus allows.

    python bench.py                           # on a GPU: 256 sequences on the Qwen3-0.6B shape
                                              # on a CPU: problems for the demo model
    python bench.py --workload queue          # or another workload, see --help; or a file, prompts.jsonl
    python bench.py --sampling top_p=0.95,top_k=20 --sampling-share 0.25      # for every 4th row
    python bench.py --engine transformers     # the same workload with another engine: transformers or vllm
    python bench.py --data-parallel-size 2    # replicas, each on its own GPU
    python bench.py --profile FOLDER          # also a table of the costliest kernels and a Chrome trace

Every run computes all of its prompts: the prefix cache is off. For workloads that share prefixes (`prefix`,
`prefixes`, `samples`, `label`, `labels`, `few-shot`) it is on, and every run has new ids, so that each run
computes shared prefixes once. Weights are
random without --model, because speed does not depend on them. Every output has its full length.

The last line of output is JSON with every figure.
"""

from __future__ import annotations

import time

IMPORTS_BEGIN = time.perf_counter()

import argparse
import importlib
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nanovllm import demo_model_path
from nanovllm.models.config import ModelConfig
from nanovllm.models.registry import load_model_config
from tools.benchmark.engines import ENGINES, LEAST_MODEL_LEN, Engine
from tools.benchmark.kernels import PROFILE_TOKENS, profile
from tools.benchmark.options import device_name, parse_args
from tools.benchmark.report import report
from tools.benchmark.roofline import Cost, Floor, Speed, broken_floor, cost_of, device_speed, floor_of
from tools.benchmark.shapes import write_shape
from tools.benchmark.steps import Step, host_exposed, phases, step_times
from tools.benchmark.workloads import Workload, make_workload

IMPORT_SECONDS = time.perf_counter() - IMPORTS_BEGIN


def started(args: argparse.Namespace, work: Workload, model: Path) -> tuple[Engine, dict[str, Any]]:
    """Start the engine up to its first token; return it, its options and the times of the start."""
    start = time.perf_counter()
    importlib.import_module(args.engine)
    imported = time.perf_counter()
    options = args.options | {"enable_prefix_caching": args.prefix_caching}
    if args.engine == "vllm":
        options.setdefault("max_model_len", max(LEAST_MODEL_LEN, work.longest))
    engine = ENGINES[args.engine](args, model, args.dummy, options)
    engine.prepare(work.beginning(1, 1))()
    return engine, {
        "options": options,
        "import_s": IMPORT_SECONDS + imported - start,
        "startup_s": time.perf_counter() - imported,
    }


def timed(
    engine: Engine, fresh: Callable[[int], Workload], repeat: int
) -> tuple[list[float], list[list[Step]]]:
    """The seconds and the steps of a warm-up run and of `repeat` more runs."""
    seconds, runs = [], []
    engine.take_steps()  # drop the steps of the start
    for turn in range(repeat + 1):
        run = engine.prepare(fresh(turn + 1))
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
        runs.append(engine.take_steps())
    return seconds, runs


def least(args: argparse.Namespace, config: ModelConfig) -> tuple[Cost, Speed]:
    """The costs of the model and the speed of the devices."""
    device = torch.device("cuda" if args.on_gpu else "cpu")
    speed = device_speed(device, args.num_devices, args.torch_dtype)
    return cost_of(config, args.torch_dtype.itemsize, args.options), speed


def profiled(args: argparse.Namespace, engine: Engine, work: Workload, steps: list[Step]) -> dict[str, Any]:
    """Figures of a short profiled run of `work`, compared with the same steps of a timed run."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        found = profile(engine.prepare(work), Path(args.profile or folder), args.on_gpu)
    if "replays" in found:
        figures["host"] = host_exposed(steps, found["replays"])
    if args.profile:
        figures["kernels"] = found["kernels"]
    return figures


def measure(args: argparse.Namespace, folder: str) -> tuple[dict[str, Any], Floor]:
    """Load, warm up, time and profile; return every figure. folder: for the config of a dummy shape."""
    if args.dummy:
        model = write_shape(args.shape, Path(folder), args.max_model_len or 0)
    else:
        model = Path(args.model or demo_model_path())
    config = load_model_config(model, quantization=args.options.get("quantization"))
    capability = torch.cuda.get_device_capability() if args.on_gpu else (0, 0)
    config = replace(config, quant=config.quant.on(capability))
    try:
        work = make_workload(args.workload, args.num_seqs, model, config, args.dummy)
    except (OSError, ValueError) as error:
        sys.exit(f"bench.py: {error}")
    engine, start = started(args, work, model)

    def fresh(turn: int) -> Workload:
        return work.shifted(turn, config.vocab_size) if args.prefix_caching else work

    seconds, runs = timed(engine, fresh, args.repeat)
    median = statistics.median(seconds[1:])
    cost, speed = least(args, config)
    sharing = work.sharing() if args.prefix_caching else None
    floor = floor_of(cost, work, speed, sharing)
    result: dict[str, Any] = {
        "engine": args.engine,
        "workload": args.workload,
        "model": args.shape if args.dummy else model.name,
        "sampling": args.sampling,
        "sampling_share": args.sampling_share,
        "device": device_name(args),
        "round_robin": args.round_robin,
        "torch": torch.__version__,
        "num_seqs": len(work.prompts),
        "tokens_in": work.tokens_in,
        "tokens_out": work.tokens_out,
        "tokens_shared": 0 if sharing is None else int(sharing.tokens.sum()),
        "seconds": seconds,
        "median_s": median,
        "output_tokens_per_s": work.tokens_out / median,
        "floor_output_tokens_per_s": work.tokens_out / floor.total,
        "share_of_floor": floor.total / median,
        **start,
    }
    if args.engine == "nanovllm" and args.num_replicas == 1:
        turn = seconds.index(statistics.median_low(seconds[1:]), 1)
        result["phases"] = phases(runs[turn], cost, speed, floor, sharing)
        result["other_s"] = seconds[turn] - sum(step.seconds for step in runs[turn])
        result["steps"] = step_times(runs[turn])
        if args.profile or args.on_gpu:
            short = fresh(args.repeat + 2).beginning(args.max_num_seqs, PROFILE_TOKENS)
            result |= profiled(args, engine, short, runs[turn])
    result["floor_broken"] = bool(broken_floor(result))
    return result, floor


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv, __doc__)
    with tempfile.TemporaryDirectory() as folder:
        result, floor = measure(args, folder)
    report(result, floor)


if __name__ == "__main__":
    try:
        main()
        if sys.stdout is not None:  # closed
            sys.stdout.flush()
    except (
        BrokenPipeError
    ):  # the reader, such as `head`, ended first; Python's own flush at exit is then silent
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(141)
