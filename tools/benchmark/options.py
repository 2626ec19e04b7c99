"""The options of bench.py: parses and checks them, and fills in defaults that depend on the machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from tools.benchmark.engines import ENGINES, TEMPERATURE, parse_sampling
from tools.benchmark.shapes import GEMMA3, GPT_OSS, MORE, QWEN3, QWEN3_5
from tools.benchmark.workloads import SHARED, SYNTHETIC

PASSED_ON = ("max_model_len", "kv_cache_dtype", "tensor_parallel_size", "data_parallel_size")
PASSED_ON += ("deterministic", "tokenizer", "quantization", "enable_expert_parallel")
PASSED_ON += ("mamba_ssm_cache_dtype",)


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The parser; defaults that depend on other options are None until `parse_args` fills them in."""
    sizes = ", ".join(f"{size} ({name})" for name, (size, _) in SYNTHETIC.items() if name != "single")
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=ENGINES, default="nanovllm")
    parser.add_argument(
        "--workload",
        help=f"{', '.join(SYNTHETIC)}, demo, or a .jsonl file whose rows have `prompt` (a string) or "
        "`prompt_token_ids`, and `max_tokens` (default 64); default: headline on a GPU, demo on a CPU",
    )
    parser.add_argument(
        "--shape",
        choices=(*QWEN3, *QWEN3_5, *GEMMA3, *GPT_OSS, *MORE),
        help="of dummy weights; default: qwen3-0.6b",
    )
    parser.add_argument("--model", help="a model folder to use instead of a dummy shape")
    parser.add_argument("--num-seqs", type=int, help=f"default: {sizes}, 64 (demo) or all rows")
    parser.add_argument("--max-num-seqs", type=int, default=1024, help="maximum sequences that run at once")
    parser.add_argument(
        "--sampling",
        default="",
        metavar="NAME=VALUE,...",
        help="fields of SamplingParams, such as top_p=0.95,top_k=20; values may be JSON; "
        f"default: temperature={TEMPERATURE}",
    )
    parser.add_argument(
        "--sampling-share",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="share of rows with --sampling: 0.25 is every 4th; the rest alternate between greedy and plain",
    )
    parser.add_argument("--tokenizer", metavar="FOLDER", help="for --sampling that needs text")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="default: the engine's")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="to compute in; default: bfloat16 on a GPU, float32 on a CPU",
    )
    parser.add_argument("--kv-cache-dtype", help="auto or fp8")
    parser.add_argument("--mamba-ssm-cache-dtype", help="of states: auto, float32 or bfloat16")
    parser.add_argument("--quantization", help="of weights as they are loaded: fp8, or int8 or int4 on a CPU")
    parser.add_argument("--tensor-parallel-size", type=int, metavar="N")
    parser.add_argument("--data-parallel-size", type=int, metavar="N")
    parser.add_argument(
        "--enable-expert-parallel",
        action="store_true",
        default=None,
        help="each rank holds whole experts; needs --tensor-parallel-size",
    )
    parser.add_argument(
        "--round-robin",
        action="store_true",
        help="feed the replicas in turn, without prefix routing; needs --data-parallel-size",
    )
    parser.add_argument(
        "--share-gpu", action="store_true", help="put all replicas on one GPU, which divides its time"
    )
    parser.add_argument("--deterministic", action="store_true", default=None)
    parser.add_argument(
        "--prefix-caching",
        action=argparse.BooleanOptionalAction,
        help=f"default: only for --workload {', '.join(SHARED)}; every run then has new ids",
    )
    parser.add_argument("--repeat", type=int, default=3, help="timed runs; the result is their median")
    parser.add_argument("--progress", action="store_true")
    parser.add_argument("--profile", nargs="?", const="bench_profile", metavar="FOLDER")
    return parser


def parse_args(argv: Sequence[str] | None, description: str | None = None) -> argparse.Namespace:
    """Parse the options and fill in dependent defaults; a contradiction ends the program."""
    parser = make_parser(description)
    args = parser.parse_args(argv)
    args.on_gpu = args.device != "cpu" and torch.cuda.is_available()
    args.workload = args.workload or ("headline" if args.on_gpu else "demo")
    is_file = args.workload.endswith(".jsonl")
    if not (is_file or args.workload == "demo" or args.workload in SYNTHETIC):
        parser.error(f"--workload {args.workload} is none of {', '.join(SYNTHETIC)}, demo, or a file *.jsonl")
    if args.shape and args.model:
        parser.error("--shape is for dummy weights; leave it out with --model")
    if args.shape and args.workload == "demo":
        parser.error("--shape has dummy weights, but --workload demo needs a tokenizer; pass only one")
    if args.num_seqs is not None and (args.workload == "single" or args.num_seqs < 1):
        parser.error("--num-seqs must be at least 1, and --workload single is one sequence; leave it out")
    if args.repeat < 1:
        parser.error("--repeat must be at least 1")
    if args.profile and args.engine != "nanovllm":
        parser.error("--profile works only with --engine nanovllm")
    if not 0 < args.sampling_share <= 1 or (args.sampling_share < 1 and not args.sampling):
        parser.error("--sampling-share must be above 0 and at most 1, and needs --sampling")
    if args.sampling_share < 1 and args.engine == "transformers":
        parser.error("--engine transformers samples all rows in the same way; leave --sampling-share out")
    try:
        args.sampling = parse_sampling(args.sampling, args.engine)
    except (TypeError, ValueError) as error:
        parser.error(f"--sampling: {error}")
    if args.prefix_caching is None:
        args.prefix_caching = args.workload in SHARED
    args.dummy = args.model is None and (args.workload in SYNTHETIC or args.shape is not None)
    args.shape = args.shape or "qwen3-0.6b"
    args.torch_dtype = getattr(torch, args.dtype or ("bfloat16" if args.on_gpu else "float32"))
    args.options = {  # passed on only if given; the engine itself refuses unknown options
        name: getattr(args, name) for name in PASSED_ON if getattr(args, name) is not None
    }
    if args.engine == "transformers" and args.options:
        parser.error(f"--engine transformers has no {', '.join(args.options)}")
    args.num_replicas = args.options.get("data_parallel_size", 1)
    if args.num_replicas == 1 and (args.round_robin or args.share_gpu):
        name = "--round-robin" if args.round_robin else "--share-gpu"
        parser.error(f"{name} needs --data-parallel-size above 1")
    if args.num_replicas > 1 and args.profile:
        parser.error("--profile covers one process; leave it or --data-parallel-size out")
    if args.share_gpu and (args.engine != "nanovllm" or "tensor_parallel_size" in args.options):
        parser.error("--share-gpu is for --engine nanovllm, without --tensor-parallel-size")
    args.num_devices = (
        1 if args.share_gpu else args.num_replicas * args.options.get("tensor_parallel_size", 1)
    )
    return args


def device_name(args: argparse.Namespace) -> str:
    """The GPU, or the CPU's threads, and the number of devices."""
    name = torch.cuda.get_device_name() if args.on_gpu else f"cpu, {torch.get_num_threads()} threads"
    return f"{args.num_devices} x {name}" if args.num_devices > 1 else name
