"""The cost of sampling settings: a workload with a setting in every row, and n=16 against 16 equal prompts.

    python -m tools.bench sampling --tokenizer FOLDER        # on a GPU: bench.py's headline, dummy weights
    python -m tools.bench sampling --cpu                     # the demo model and its problems
    python -m tools.bench sampling --cpu --only logprobs=5 --only json

All settings run in turn in one engine: a warm-up run of each, then --repeat rounds; the results are medians.
Stop strings and schemas need text: without --tokenizer they are left out. `bench.py --sampling` times any
other setting. Ends in a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

from nanovllm import LLM, SamplingParams, StructuredOutputsParams, demo_model_path
from tools.benchmark.engines import TEMPERATURE
from tools.benchmark.shapes import write_shape
from tools.benchmark.workloads import SAMPLES, demo, headline

Run = Callable[[], int]  # returns how many tokens came out

PLAIN = f"temperature={TEMPERATURE}"
EQUAL = f"{SAMPLES} equal prompts"
N = f"n={SAMPLES}"
NEED_TEXTS = ("stop", "json", "json, bounded")


def people(name: dict[str, Any]) -> StructuredOutputsParams:
    """A schema of a list of people, longer than any output. name: the schema of a name."""
    tags = {"type": "array", "items": {"enum": ["a", "b", "c"]}}
    properties = {"name": name, "age": {"type": "integer"}, "tags": tags}
    person = {"type": "object", "properties": properties, "required": list(properties)}
    return StructuredOutputsParams(json={"type": "array", "items": person, "minItems": 5000})


def settings(vocab_size: int, shortest: int) -> dict[str, dict[str, Any]]:
    """The settings by name, for outputs of at least `shortest` tokens."""
    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2}
    bias = dict.fromkeys(range(100, 150), 1.5)
    filters = {"top_k": 20, "top_p": 0.95}
    return {
        PLAIN: {},
        "top_p=0.95": {"top_p": 0.95},
        "top_k=20,top_p=0.95": filters,
        "logprobs=0": {"logprobs": 0},
        "logprobs=5": {"logprobs": 5},
        "logprobs=20": {"logprobs": 20},
        "penalties": penalties,
        "logit_bias": {"logit_bias": bias},
        "allowed_token_ids": {"allowed_token_ids": list(range(100, min(1100, vocab_size)))},
        "min_tokens": {"min_tokens": min(50, shortest), "stop_token_ids": [5]},
        "filters, logprobs, penalties, bias": filters | penalties | {"logprobs": 5, "logit_bias": bias},
        "stop": {"stop": ["\u2603\u2603\u2603", "a text of no output"]},
        "json": {"structured_outputs": people({"type": "string"})},
        "json, bounded": {"structured_outputs": people({"type": "string", "maxLength": 40})},
    }


def generate(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> int:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)


def list_runs(llm: LLM, prompts: list[list[int]], output_lens: list[int]) -> dict[str, Run]:
    """Each setting in every row of a list."""

    def run(setting: dict[str, Any]) -> Run:
        plain = {"temperature": TEMPERATURE, "ignore_eos": True}
        params = [SamplingParams(**plain, max_tokens=length, **setting) for length in output_lens]
        return lambda: generate(llm, prompts, params)

    found = settings(llm.llm_engine.model_config.vocab_size, min(output_lens))
    return {name: run(setting) for name, setting in found.items()}


def sample_runs(llm: LLM, num_prompts: int, tokens_in: tuple[int, int], tokens_out: int) -> dict[str, Run]:
    """SAMPLES samples of each of some prompts, which are new in every run."""
    rng = Random(0)

    def run(copies: int, n: int) -> int:
        params = SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=tokens_out, n=n)
        prompts = [
            [rng.randrange(2, 500) for _ in range(rng.randint(*tokens_in))] for _ in range(num_prompts)
        ]
        rows = [prompt for prompt in prompts for _ in range(copies)]
        return generate(llm, rows, [params] * len(rows))

    return {EQUAL: lambda: run(SAMPLES, 1), N: lambda: run(1, SAMPLES)}


def base_of(name: str) -> str:
    """What a run is compared with."""
    return EQUAL if name in (EQUAL, N) else PLAIN


def timed(llm: LLM, runs: dict[str, Run], repeat: int) -> dict[str, list[float]]:
    """Output tokens/s of each run, round by round, without the warm-up round."""
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeat + 1):
        for name, run in runs.items():
            llm.reset_prefix_cache()
            start = perf_counter()
            tokens = run()
            speeds[name] += [tokens / (perf_counter() - start)] * (turn > 0)
    return speeds


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", metavar="FOLDER", help="for dummy weights; the demo model has its own")
    parser.add_argument("--cpu", action="store_true", help="the demo model on a CPU")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="a setting; may be given several times"
    )
    parser.add_argument("--repeat", type=int, default=3, help="timed runs of each; the median counts")
    args = parser.parse_args(argv)
    has_texts = args.cpu or args.tokenizer is not None
    names = [*settings(1100, 1), EQUAL, N]
    names = [name for name in names if has_texts or name not in NEED_TEXTS]
    if args.only is not None:
        if unknown := [name for name in args.only if name not in names]:
            parser.error(f"--only {unknown[0]} is none of {'; '.join(names)}")
        wanted = {*args.only, *map(base_of, args.only)}
        names = [name for name in names if name in wanted]
    with tempfile.TemporaryDirectory() as folder:
        model = demo_model_path() if args.cpu else write_shape("qwen3-0.6b", Path(folder))
        options: dict[str, Any] = {"device": "cpu"} if args.cpu else {"load_format": "dummy"}
        if args.tokenizer is not None:
            options["tokenizer"] = args.tokenizer
        llm = LLM(model, skip_tokenizer_init=not has_texts, **options)
    work = demo(64, Path(model)) if args.cpu else headline(256)
    runs = list_runs(llm, work.prompts, work.output_lens)
    runs |= sample_runs(llm, 4, (20, 60), 16) if args.cpu else sample_runs(llm, 64, (300, 900), 350)
    speeds = timed(llm, {name: runs[name] for name in names}, args.repeat)
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    for name, speed in medians.items():
        share = f"{speed / medians[base_of(name)]:7.1%} of {base_of(name)}"
        print(f"{name:36}{speed:10,.0f} output tokens/s{share}")
    print(json.dumps({"output_tokens_per_s": speeds}))


if __name__ == "__main__":
    main()
