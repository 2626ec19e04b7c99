"""The table of docs/benchmarks.md for one GPU: all its workloads in turn, in one process and at one commit.

    python -m tools.bench table                       # about 8 minutes on an H200
    python -m tools.bench table --only single --only few --runs 9

Dummy weights in bfloat16, the engine's defaults, up to 1,024 sequences at once. Before its timed runs a
workload runs once with short outputs; the first timed run also captures CUDA graphs of smaller sizes. Every
run has new ids. Prints a line of Markdown for each row: the median, its share of the floor, all runs, and
the seconds that steps of prompts and decode steps of the last run took. Ends in a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.batch import StepKind
from nanovllm.models.config import ModelConfig
from nanovllm.models.registry import load_model_config
from tools.benchmark.engines import row_sampling
from tools.benchmark.roofline import cost_of, device_speed, floor_of
from tools.benchmark.shapes import write_shape
from tools.benchmark.workloads import SHARED, SYNTHETIC, Workload
from tools.measure_device import device_name

PLAIN = {"temperature": 0.6}
FILTERS = PLAIN | {"top_p": 0.95, "top_k": 20}
WARM_UP_TOKENS = 32
FP8 = {"quantization": "fp8"}
AWQ = {"hf_overrides": {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}}
_MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.mlp.gate"]}
NVFP4 = {"hf_overrides": {"quantization_config": _MODELOPT}}


@dataclass(frozen=True)
class Row:
    """A workload, the parameters of a share of its rows, and how often it runs."""

    name: str
    workload: str = "headline"
    sampling: dict[str, Any] = field(default_factory=lambda: PLAIN)
    share: float = 1.0
    runs: int = 3


# Rows that share an engine; its shape and its options.
ENGINES: dict[str, tuple[str, dict[str, Any], tuple[Row, ...]]] = {
    "default": (
        "qwen3-0.6b",
        {},
        (
            Row("headline"),
            Row("top_p", sampling=PLAIN | {"top_p": 0.95}),
            Row("top_p, top_k", sampling=FILTERS),
            Row("min_p", sampling=PLAIN | {"min_p": 0.05}),
            Row("a quarter filtered", sampling=FILTERS, share=0.25),
            Row("chat", "chat"),
            Row("chat, top_p, top_k", "chat", FILTERS),
            Row("samples", "samples"),
            Row("samples, top_p", "samples", PLAIN | {"top_p": 0.95}),
            Row("classify", "classify"),
            Row("few", "few"),
            Row("single", "single", runs=9),
            Row("prefix", "prefix"),
            *(Row(name, name) for name in ("label", "label-240", "label-370", "label-1000", "label-4000")),
            Row("labels", "labels"),
            Row("few-shot", "few-shot"),
            Row("long", "long", runs=2),
            Row("queue", "queue", runs=2),
        ),
    ),
    "fp8": ("qwen3-0.6b", {"kv_cache_dtype": "fp8"}, (Row("FP8 KV cache"),)),
    "deterministic": ("qwen3-0.6b", {"deterministic": True}, (Row("deterministic"),)),
    "8b": ("qwen3-8b", {}, (Row("8B shape"), Row("8B, 16 sequences", "few"))),
    "8b fp8": ("qwen3-8b", FP8, (Row("8B FP8"), Row("8B FP8, 16 sequences", "few"))),
    "8b fp8 cache": ("qwen3-8b", FP8 | {"kv_cache_dtype": "fp8"}, (Row("8B FP8, FP8 KV cache"),)),
    "8b awq": ("qwen3-8b", AWQ, (Row("8B AWQ"), Row("8B AWQ, 16 sequences", "few"))),
    "moe": ("qwen3-30b-a3b", {}, (Row("30B-A3B shape"), Row("30B-A3B, 16 sequences", "few"))),
    "8b nvfp4": ("qwen3-8b", NVFP4, (Row("8B NVFP4"), Row("8B NVFP4, 16 sequences", "few"))),
    "moe nvfp4": ("qwen3-30b-a3b", NVFP4, (Row("30B-A3B NVFP4"), Row("30B-A3B NVFP4, 16 sequences", "few"))),
    "moe awq": ("qwen3-30b-a3b", AWQ, (Row("30B-A3B AWQ"), Row("30B-A3B AWQ, 16 sequences", "few"))),
    "gemma": (
        "gemma3-4b",
        {},
        (Row("Gemma-3-4B shape"), Row("Gemma, long", "long", runs=2), Row("Gemma, few", "few")),
    ),
    "qwen3.5 4b": (
        "qwen3.5-4b",
        {},
        (Row("Qwen3.5-4B"), Row("Qwen3.5-4B, few", "few"), Row("Qwen3.5-4B, label-370", "label-370")),
    ),
    "qwen3.5 35b": (
        "qwen3.5-35b-a3b",
        {},
        (Row("Qwen3.5-35B-A3B"), Row("Qwen3.5-35B-A3B, few", "few")),
    ),
    "qwen3.5 35b fp8": (
        "qwen3.5-35b-a3b",
        FP8,
        (Row("Qwen3.5-35B-A3B FP8"), Row("Qwen3.5-35B-A3B FP8, few", "few")),
    ),
    "qwen3.5 27b": ("qwen3.5-27b", {}, (Row("Qwen3.5-27B"), Row("Qwen3.5-27B, few", "few"))),
    "gemma4 26b": ("gemma4-26b-a4b", {}, (Row("Gemma-4-26B-A4B"), Row("Gemma-4-26B-A4B, few", "few"))),
    "gpt-oss": ("gpt-oss-20b", {}, (Row("gpt-oss-20b"), Row("gpt-oss-20b, 16 sequences", "few"))),
}


def params_of(row: Row, work: Workload) -> list[SamplingParams]:
    sampling = row_sampling(row.sampling, row.share, len(work.prompts))
    return [
        SamplingParams(**each, ignore_eos=True, max_tokens=length)
        for each, length in zip(sampling, work.output_lens, strict=True)
    ]


def speeds_of(
    llm: LLM, row: Row, work: Workload, vocab_size: int, runs: int
) -> tuple[list[float], Counter[StepKind]]:
    """Output tokens/s of each timed run, and the seconds of the last run's steps."""
    speeds = []
    took: Counter[StepKind] = Counter()
    llm.on_step = lambda step: took.update({step.kind: step.seconds})  # type: ignore[dict-item]
    for turn in range(runs + 1):
        took.clear()
        fresh = work.shifted(turn, vocab_size)
        if turn == 0:
            fresh = fresh.beginning(len(work.prompts), WARM_UP_TOKENS)
        params = params_of(row, fresh)
        start = perf_counter()
        outputs = llm.generate(fresh.prompts, params, use_tqdm=False)
        seconds = perf_counter() - start
        assert [len(output["token_ids"]) for output in outputs] == fresh.output_lens
        speeds += [fresh.tokens_out / seconds] * (turn > 0)
    llm.on_step = None
    return speeds, took


def best_speed(config: ModelConfig, work: Workload, options: dict[str, Any]) -> float:
    """Output tokens/s that the device allows."""
    cost = cost_of(config, 2, options)
    sharing = work.sharing() if work.name in SHARED else None
    speed = device_speed(torch.device("cuda"), 1, torch.bfloat16)
    return work.tokens_out / floor_of(cost, work, speed, sharing).total


@contextmanager
def engine(shape: str, options: dict[str, Any]) -> Iterator[tuple[LLM, ModelConfig]]:
    with tempfile.TemporaryDirectory() as folder:
        model = write_shape(shape, Path(folder))
        config = load_model_config(
            model, overrides=options.get("hf_overrides"), quantization=options.get("quantization")
        )
        config = replace(config, quant=config.quant.on(torch.cuda.get_device_capability()))
        with LLM(model, load_format="dummy", skip_tokenizer_init=True, **options) as llm:
            yield llm, config


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [row.name for _, _, rows in ENGINES.values() for row in rows]
    parser.add_argument(
        "--only", action="append", choices=names, metavar="ROW", help=f"of {'; '.join(names)}"
    )
    parser.add_argument("--runs", type=int, help="timed runs of each row; the median counts")
    args = parser.parse_args(argv)
    print(f"{device_name(torch.device('cuda'))}, torch {torch.__version__}", flush=True)
    found: dict[str, list[float]] = {}
    for shape, options, rows in ENGINES.values():
        wanted = [row for row in rows if args.only is None or row.name in args.only]
        if not wanted:
            continue
        with engine(shape, options) as (llm, config):
            for row in wanted:
                size, draw = SYNTHETIC[row.workload]
                work = draw(size)
                speeds, took = speeds_of(llm, row, work, config.vocab_size, args.runs or row.runs)
                found[row.name], median = speeds, statistics.median(speeds)
                share = median / best_speed(config, work, options)
                each = ", ".join(f"{speed:,.0f}" for speed in speeds)
                steps = f"{took[StepKind.PREFILL]:.2f} s; {took[StepKind.DECODE]:.2f} s"
                print(f"| {row.name} | **{median:,.0f}** | {share:.0%} | {each} | {steps} |", flush=True)
    print(json.dumps({"output_tokens_per_s": found}))


if __name__ == "__main__":
    main()
