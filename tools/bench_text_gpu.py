"""Text at both ends on a real device: short prompts as ids, as texts and as a job, and how long a GPU waits.

    python -m tools.bench text-gpu --tokenizer FOLDER           # the 0.6B shape, 16,384 prompts
    python -m tools.bench text-gpu --model FOLDER --prompts 64  # on a CPU there are no shares

Each kind runs once to warm up, then --runs times, with other prompts in every run. Prints the rows a second,
the ratio to ids, and when the first answer was there. On a GPU one more run has a profiler: the share of time
without a kernel between the first and the last one, and the same after the first second.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

import torch

from nanovllm import LLM, SamplingParams, demo_model_path
from nanovllm.jobs.main import parse_args
from nanovllm.jobs.run import run as run_job
from tools.bench_jobs import LoadedLLM
from tools.bench_text import WORDS
from tools.benchmark.kernels import Kernel, busy_time, kernels_of
from tools.benchmark.shapes import write_shape


def texts(rows: int, seed: int) -> list[str]:
    """Prompts of 10 to 42 words, none like another."""
    draw = Random(seed)
    return [
        f"Review {seed} {row}: {' '.join(draw.choices(WORDS.split(), k=draw.randint(8, 40)))}"
        for row in range(rows)
    ]


def as_ids(llm: LLM, prompts: Sequence[str], tokens: int) -> Callable[[], object]:
    ids = [llm.get_tokenizer().encode(prompt) for prompt in prompts]
    params = SamplingParams(temperature=0.6, max_tokens=tokens, ignore_eos=True, detokenize=False)
    return partial(llm.generate, ids, params, use_tqdm=False)


def as_texts(llm: LLM, prompts: Sequence[str], tokens: int) -> Callable[[], object]:
    params = SamplingParams(temperature=0.6, max_tokens=tokens, ignore_eos=True)
    return partial(llm.generate, prompts, params, use_tqdm=False)


def as_job(llm: LLM, prompts: Sequence[str], tokens: int) -> Callable[[], object]:
    held = tempfile.TemporaryDirectory()  # until nothing refers to `run`
    folder = Path(held.name)
    with (folder / "in.jsonl").open("w") as file:
        file.writelines(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    sampling = f"temperature=0.6,ignore_eos=true,max_tokens={tokens}"
    command = ["run", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), "--model", demo_model_path()]
    engine: Any = LoadedLLM(llm)

    def run() -> None:
        code = run_job(parse_args([*command, "--sampling", sampling]), engine)
        assert code == 0, f"the job of {held.name} ended with code {code}"

    return run


KINDS = {"ids": as_ids, "texts": as_texts, "job": as_job}


def idle(kernels: Sequence[Kernel], skipped: float = 0.0) -> float:
    """The share of time without a kernel, from `skipped` seconds after the first kernel on."""
    late = [each for each in kernels if each.start >= kernels[0].start + 1e6 * skipped]
    return 1 - busy_time(late) / (max(each.end for each in late) - late[0].start) if late else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder, instead of dummy weights of --shape")
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--tokenizer", help="a folder with tokenizer.json; the demo model's by default")
    parser.add_argument("--prompts", type=int, default=16384)
    parser.add_argument("--tokens-out", type=int, default=32)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    tokenizer = Path(args.tokenizer or demo_model_path())
    with tempfile.TemporaryDirectory() as folder:
        if args.model:
            llm = LLM(args.model)
        else:
            vocabulary = json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"]
            sizes = {"vocab_size": len(vocabulary) + 512}
            shape = str(write_shape(args.shape, Path(folder)))
            llm = LLM(shape, load_format="dummy", tokenizer=str(tokenizer), hf_overrides=sizes)
    first: list[float] = []
    llm.on_step = lambda stats: first.append(perf_counter()) if stats.num_finished and not first else None
    seeds, of_ids = count(), 0.0
    for name, make in KINDS.items():
        seconds, firsts = [], []
        for _ in range(args.runs + 1):
            run = make(llm, texts(args.prompts, next(seeds)), args.tokens_out)
            first.clear()
            start = perf_counter()
            run()
            seconds.append(perf_counter() - start)
            firsts += [each - start for each in first]
        took = median(seconds[1:])
        of_ids = of_ids or took
        rates = ", ".join(f"{args.prompts / each:,.0f}" for each in seconds[1:])
        line = f"{name:6} {args.prompts / took:9,.0f} rows/s of {rates}; {of_ids / took:.3f} times ids"
        if firsts:  # a job watches the steps itself
            line += f"; first answer after {median(firsts[1:]):.2f} s"
        if torch.cuda.is_available():
            kernels = kernels_of(make(llm, texts(args.prompts, next(seeds)), args.tokens_out))
            line += f"; idle {idle(kernels):.1%}, after the first second {idle(kernels, 1.0):.1%}"
        print(line, flush=True)
    llm.close()


if __name__ == "__main__":
    main()
