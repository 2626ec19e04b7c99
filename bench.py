"""Throughput of offline generation, beside what the machine's memory bus allows.

    python bench.py                           # on a GPU: 256 sequences on the Qwen3-0.6B shape
                                              # on a CPU: problems for the demo model
    python bench.py --workload queue          # or another of --help, or a file of rows, prompts.jsonl
    python bench.py --sampling top_p=0.95,top_k=20 --sampling-share 0.25      # of every 4th row
    python bench.py --engine transformers     # the same lists through a peer: transformers or vllm
    python bench.py --profile FOLDER          # also a table of the costliest kernels and a Chrome trace

Every run computes all of its prompts: the prefix cache is off, except for `--workload prefix` and `samples`,
where it is on and every run brings new ids, so that what prompts share is computed once in each. Weights are
random where there is no --model: speed does not depend on them. Outputs do not end before their length.

Ends in one line of JSON with every figure.
"""

from __future__ import annotations

import time

IMPORTS_BEGIN = time.perf_counter()

import argparse
import contextlib
import importlib
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from nanovllm import SamplingParams, demo_model_path
from nanovllm.batch import StepKind
from nanovllm.models.config import ModelConfig
from nanovllm.models.loader import load_model_config

sys.path.insert(0, str(Path(__file__).parent / "tools"))
from bench_engines import ENGINES, LEAST_MODEL_LEN, TEMPERATURE, Engine, Run, parse_sampling
from bench_roofline import Cost, Floor, Speed, broken_floor, device_speed, floor_of
from bench_steps import PROFILE_TOKENS, Step, kernel_table, phases, profile, recorded_steps, step_times
from bench_workloads import QWEN3, SHARED, SYNTHETIC, Workload, demo, from_jsonl, write_shape

IMPORT_SECONDS = time.perf_counter() - IMPORTS_BEGIN

# -- what was asked for --------------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    """The options; what depends on others is None until `parse_args` settles it."""
    sizes = ", ".join(f"{size} ({name})" for name, (size, _) in SYNTHETIC.items() if name != "single")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=ENGINES, default="nanovllm")
    parser.add_argument(
        "--workload",
        help=f"{', '.join(SYNTHETIC)}, demo, or a .jsonl file whose rows have `prompt` (a text, as it is) or "
        "`prompt_token_ids`, and `max_tokens` (default 64); default: headline on a GPU, demo on a CPU",
    )
    parser.add_argument("--shape", choices=QWEN3, help="of dummy weights; default: qwen3-0.6b")
    parser.add_argument("--model", help="a model folder to use instead of a dummy shape")
    parser.add_argument("--num-seqs", type=int, help=f"default: {sizes}, 64 (demo) or all rows")
    parser.add_argument("--max-num-seqs", type=int, default=512, help="the most that run at once")
    parser.add_argument(
        "--sampling",
        default="",
        metavar="NAME=VALUE,...",
        help=f"fields of SamplingParams, such as top_p=0.95,top_k=20; default: temperature={TEMPERATURE}",
    )
    parser.add_argument(
        "--sampling-share",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="of the rows that --sampling is for: 0.25 is every 4th; the others are greedy and plain in turn",
    )
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="default: the engine's")
    parser.add_argument("--kv-cache-dtype", help="auto or fp8")
    parser.add_argument("--tensor-parallel-size", type=int, metavar="N")
    parser.add_argument("--deterministic", action="store_true", default=None)
    parser.add_argument(
        "--prefix-caching",
        action=argparse.BooleanOptionalAction,
        help=f"default: for --workload {' and '.join(SHARED)} alone; every run then brings new ids",
    )
    parser.add_argument("--repeat", type=int, default=3, help="timed runs; the median counts")
    parser.add_argument("--progress", action="store_true")
    parser.add_argument("--profile", nargs="?", const="bench_profile", metavar="FOLDER")
    return parser


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options and settle what depends on others; a contradiction ends the program."""
    parser = make_parser()
    args = parser.parse_args(argv)
    args.on_gpu = args.device != "cpu" and torch.cuda.is_available()
    args.workload = args.workload or ("headline" if args.on_gpu else "demo")
    is_file = args.workload.endswith(".jsonl")
    if not (is_file or args.workload == "demo" or args.workload in SYNTHETIC):
        parser.error(f"--workload {args.workload} is none of {', '.join(SYNTHETIC)}, demo, or a file *.jsonl")
    if args.shape and args.model:
        parser.error("--shape is for dummy weights; leave it out with --model")
    if args.shape and args.workload == "demo":
        parser.error("--shape has dummy weights and --workload demo needs a tokenizer; leave one of them out")
    if args.num_seqs is not None and (args.workload == "single" or args.num_seqs < 1):
        parser.error("--num-seqs must be at least 1, and --workload single is one sequence; leave it out")
    if args.repeat < 1:
        parser.error("--repeat must be at least 1")
    if args.profile and args.engine != "nanovllm":
        parser.error("--profile knows the kernels of --engine nanovllm only")
    if not 0 < args.sampling_share <= 1 or (args.sampling_share < 1 and not args.sampling):
        parser.error("--sampling-share must be above 0 and at most 1, and needs --sampling")
    if args.sampling_share < 1 and args.engine == "transformers":
        parser.error("--engine transformers samples all rows alike; leave --sampling-share out")
    try:
        args.sampling = parse_sampling(args.sampling, args.engine)
    except (TypeError, ValueError) as error:
        parser.error(f"--sampling: {error}")
    if args.prefix_caching is None:
        args.prefix_caching = args.workload in SHARED
    args.dummy = args.model is None and (args.workload in SYNTHETIC or args.shape is not None)
    args.shape = args.shape or "qwen3-0.6b"
    args.options = {  # passed on only if given: the engine says itself what it does not know
        name: getattr(args, name)
        for name in ("max_model_len", "kv_cache_dtype", "tensor_parallel_size", "deterministic")
        if getattr(args, name) is not None
    }
    if args.engine == "transformers" and args.options:
        parser.error(f"--engine transformers has no {', '.join(args.options)}")
    args.num_devices = args.options.get("tensor_parallel_size", 1)
    return args


def device_name(args: argparse.Namespace) -> str:
    """The GPU or the CPU's threads, and how many of them share the model."""
    name = torch.cuda.get_device_name() if args.on_gpu else f"cpu, {torch.get_num_threads()} threads"
    return f"{args.num_devices} x {name}" if args.num_devices > 1 else name


def make_workload(args: argparse.Namespace, model: Path, config: ModelConfig) -> Workload:
    """The workload that was asked for. ValueError: what is wrong in a file, or too long for the model."""
    if args.workload in SYNTHETIC:
        default, draw = SYNTHETIC[args.workload]
        work = draw(args.num_seqs or default)
    elif args.workload == "demo":
        work = demo(args.num_seqs or 64, model)
    else:
        tokenize = None
        if not args.dummy:
            tokenizer = AutoTokenizer.from_pretrained(model)
            tokenize = lambda texts: tokenizer(texts)["input_ids"]  # noqa: E731
        default_max_tokens = SamplingParams().max_tokens
        work = from_jsonl(Path(args.workload), tokenize, config.vocab_size, default_max_tokens, args.num_seqs)
    if work.longest > config.longest:
        raise ValueError(
            f"the longest sequence has {work.longest} tokens and the model reads at most "
            f"{config.longest}; take shorter prompts or a smaller max_tokens"
        )
    return work


# -- measuring and printing ----------------------------------------------------------------------------------


def host_exposed(steps: list[Step], replays: dict[str, float]) -> dict[str, float]:
    """For how long of a decode step no kernel runs: of the timed run, and of the same steps profiled.

    The profiler makes kernels a little longer, which hides some in the first figure, and the gaps between
    them much longer, which shows too much in the second: the truth is between the two.
    """
    first = [step for step in steps if step.kind is StepKind.DECODE][1 : PROFILE_TOKENS - 1]
    wall = statistics.median(step.seconds for step in first) * 1e6
    kernels, profiled = replays["kernel_us"], replays["step_us"]
    return {
        "batch": len(first[0].query_lens),
        "step_us": wall,
        "kernel_us": kernels,
        "exposed_us": wall - kernels,
        "exposed_share": 1 - kernels / wall,
        "profiled_step_us": profiled,
        "profiled_exposed_share": 1 - kernels / profiled,
        "replay_gap_us": replays["gap_us"],
    }


def rounded(value: Any) -> Any:
    """Floats to five significant digits, all the way down."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def report(result: dict[str, Any], floor: Floor) -> None:
    r = result
    tokens = f"{r['tokens_in']:,} tokens in, {r['tokens_out']:,} out"
    print(f"{r['engine']}, {r['workload']}: {tokens}; {r['device']}")
    print(f"start-up to first token   {r['startup_s']:8.2f} s, after {r['import_s']:.2f} s of imports")
    repeat = len(r["seconds"]) - 1
    print(f"generation                {r['median_s']:8.2f} s (median of {repeat} after one warm-up)")
    print(f"output                    {r['output_tokens_per_s']:8,.0f} tokens/s")
    best = r["floor_output_tokens_per_s"]
    reached = f"reached {r['share_of_floor']:.1%}"
    print(f"floor                     {best:8,.0f} tokens/s ({floor.total:.2f} s); {reached}")
    if r["floor_broken"]:
        shares = "; ".join(broken_floor(r))
        print(f"the floor is broken: {shares}. Measure the device again (python tools/measure_device.py)")
        print("and set its line of KNOWN_DEVICES in tools/bench_roofline.py")
    for name, p in r.get("phases", {}).items():
        rate = f"{p['tb_per_s']:.3g} TB/s" if name == "decode" else f"{p['tflops']:.3g} TFLOP/s"
        print(
            f"{name:8} {p['seconds']:8.3f} s {p['steps']:6,} steps {p['tokens_per_s']:10,.0f} tokens/s"
            f" {rate:>14}; {p['share_of_peak']:.1%} of the device's, {p['share_of_floor']:.1%} of the floor"
        )
    if "other_s" in r:
        print(f"other    {r['other_s']:8.3f} s before, between and after the steps")
    for size, t in r.get("steps", {}).items():
        print(f"decode step, batch {size:>4} {t['ms']:8.3f} ms, mean context {t['mean_context']:,.0f}")
    if "host" in r:
        h = r["host"]
        print(
            f"host time exposed {h['exposed_us']:8.0f} us of a step of {h['step_us']:,.0f} us at batch "
            f"{h['batch']} ({h['exposed_share']:.1%}; {h['profiled_exposed_share']:.1%} while profiled)"
        )
        print(f"gap between replays {h['replay_gap_us']:6.0f} us without a kernel, while profiled")
    for part, rows in r.get("kernels", {}).items():
        print(kernel_table(part, rows))
    print(json.dumps(rounded(r)))


def timed(
    engine: Engine, fresh: Callable[[int], Workload], args: argparse.Namespace
) -> tuple[list[float], list[list[Step]]]:
    """The seconds and the steps of a run that warms up and of `args.repeat` more."""
    seconds: list[float] = []
    runs: list[list[Step]] = []
    recording = recorded_steps if args.engine == "nanovllm" else lambda: contextlib.nullcontext([])
    for turn in range(args.repeat + 1):
        run = engine(fresh(turn + 1))
        with recording() as steps:
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        runs.append(steps)
    return seconds, runs


def profiled(args: argparse.Namespace, run: Run, steps: list[Step], folder: str) -> dict[str, Any]:
    """Figures of a short profiled run beside the same steps of a timed one."""
    figures: dict[str, Any] = {}
    found = profile(run, Path(args.profile or folder), args.on_gpu)
    if "replays" in found:
        figures["host"] = host_exposed(steps, found["replays"])
    if args.profile:
        figures["kernels"] = found["kernels"]
    return figures


def started(args: argparse.Namespace, work: Workload, model: Path) -> tuple[Engine, dict[str, Any]]:
    """The engine, once it has given a first token; its options and what that took."""
    start = time.perf_counter()
    importlib.import_module(args.engine)
    imported = time.perf_counter()
    options = args.options | {"enable_prefix_caching": args.prefix_caching}
    if args.engine == "vllm":
        options.setdefault("max_model_len", max(LEAST_MODEL_LEN, work.longest))
    engine = ENGINES[args.engine](args, model, args.dummy, options)
    engine(work.beginning(1, 1))()
    return engine, {
        "options": options,
        "import_s": IMPORT_SECONDS + imported - start,
        "startup_s": time.perf_counter() - imported,
    }


def least(args: argparse.Namespace, config: ModelConfig) -> tuple[Cost, Speed]:
    """What the model costs and how fast the devices are."""
    speed = device_speed(torch.device("cuda" if args.on_gpu else "cpu"), args.num_devices)
    itemsize = 2 if args.on_gpu else 4
    kv_itemsize = 1 if "fp8" in args.options.get("kv_cache_dtype", "") else itemsize
    return Cost.of(config, itemsize, kv_itemsize), speed


def measure(args: argparse.Namespace, folder: str) -> tuple[dict[str, Any], Floor]:
    """Load, warm up, time and profile; return every figure."""
    model = write_shape(args.shape, Path(folder)) if args.dummy else Path(args.model or demo_model_path())
    config = load_model_config(model)
    try:
        work = make_workload(args, model, config)
    except (OSError, ValueError) as error:
        sys.exit(f"bench.py: {error}")
    engine, start = started(args, work, model)

    def fresh(turn: int) -> Workload:
        return work.shifted(turn, config.vocab_size) if args.prefix_caching else work

    seconds, runs = timed(engine, fresh, args)
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
    if args.engine == "nanovllm":
        turn = seconds.index(statistics.median_low(seconds[1:]), 1)
        result["phases"] = phases(runs[turn], cost, speed, floor, sharing)
        result["other_s"] = seconds[turn] - sum(step.seconds for step in runs[turn])
        result["steps"] = step_times(runs[turn])
        if args.profile or args.on_gpu:
            short = fresh(args.repeat + 2).beginning(args.max_num_seqs, PROFILE_TOKENS)
            result |= profiled(args, engine(short), runs[turn], folder)
    result["floor_broken"] = bool(broken_floor(result))
    return result, floor


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        result, floor = measure(args, folder)
    report(result, floor)


if __name__ == "__main__":
    main()
