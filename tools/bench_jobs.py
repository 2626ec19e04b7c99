"""The overhead of `nanovllm run` over `LLM.generate`, and the gain of its order window.

    python -m tools.bench_jobs overhead                       # the headline workload, 8 times over
    python -m tools.bench_jobs order --prefix 4096 --rows 2048    # 20 shared prefixes in random order
    python -m tools.bench_jobs overhead --cpu                 # the demo model and its problems
    python -m tools.bench_jobs order --cpu --prefix 512 --rows 512 --tokens-out 16 --num-kvcache-blocks 256

Without --cpu it uses dummy weights of a Qwen3 shape. The rows are token ids in a JSON Lines file. They run as
a job with an engine that is already loaded, so that loading does not count. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from nanovllm import LLM, SamplingParams, demo_model_path
from nanovllm.jobs.main import parse_args
from nanovllm.jobs.run import run as run_job
from tools.benchmark.workloads import QWEN3, Workload, demo, headline, prefixes, write_shape


class LoadedLLM:
    """Acts as an engine that a job loads and closes, but always uses the same one."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def __call__(self, *args: object, **options: object) -> LoadedLLM:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.llm, name)

    def close(self) -> None:
        pass


def write_rows(work: Workload, path: Path) -> None:
    with path.open("w") as file:
        for prompt, length in zip(work.prompts, work.output_lens, strict=True):
            params = {"max_tokens": length, "ignore_eos": True, "temperature": 0.6, "detokenize": False}
            file.write(json.dumps({"prompt": prompt, "sampling_params": params}) + "\n")


def job_seconds(llm: LLM, folder: Path, number: int, *argv: str) -> float:
    """Run the rows in `folder` as a job; return its seconds without loading."""
    llm.reset_prefix_cache()
    out = folder / f"out{number}.jsonl"
    command = ["run", str(folder / "in.jsonl"), "-o", str(out), "--model", str(folder / "model"), *argv]
    start = perf_counter()
    code = run_job(parse_args(command), LoadedLLM(llm))
    assert code == 0, f"the job ended with code {code}"
    return perf_counter() - start


def generate_seconds(llm: LLM, work: Workload) -> float:
    llm.reset_prefix_cache()
    params = [
        SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.6, detokenize=False)
        for length in work.output_lens
    ]
    start = perf_counter()
    llm.generate(work.prompts, params, use_tqdm=False)
    return perf_counter() - start


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["overhead", "order"])
    parser.add_argument("--shape", choices=QWEN3, default="qwen3-0.6b")
    parser.add_argument("--cpu", action="store_true", help="the demo model on a CPU")
    parser.add_argument("--prefix", type=int, default=4096, help="tokens that rows share")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--tokens-out", type=int, default=64)
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--num-kvcache-blocks", type=int)
    parser.add_argument("--repeat", type=int, default=2)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options: dict[str, Any] = {"max_num_seqs": args.max_num_seqs, "skip_tokenizer_init": True}
        options["num_kvcache_blocks"] = args.num_kvcache_blocks
        if args.cpu:
            model = folder / "model"
            shutil.copytree(demo_model_path(), model)
            options["device"] = "cpu"
        else:
            (folder / "model").mkdir()
            model = write_shape(args.shape, folder / "model")
            options["load_format"] = "dummy"
        if args.what == "overhead":
            once = demo(64, model) if args.cpu else headline(256)
            work = Workload(f"{once.name} x 8", once.prompts * 8, once.output_lens * 8)
        else:
            drawn = prefixes(args.rows, args.prefix, 512 if args.cpu else 10_001)
            work = replace(drawn, output_lens=[args.tokens_out] * args.rows)
        write_rows(work, folder / "in.jsonl")
        with LLM(model, **options) as llm:
            warm_up = work.beginning(args.max_num_seqs, max(work.output_lens))
            generate_seconds(llm, warm_up)  # batches of all sizes: each is slow when it first comes
            seconds: dict[str, list[float]] = {"generate": [], "ordered": [], "window": []}
            for turn in range(args.repeat):
                if args.what == "overhead":
                    seconds["generate"].append(generate_seconds(llm, work))
                seconds["ordered"].append(job_seconds(llm, folder, 2 * turn, "--ordered"))
                seconds["window"].append(job_seconds(llm, folder, 2 * turn + 1))
            blocks = llm._executor.ranks.num_blocks
    figures = {"rows": len(work.prompts), "tokens_in": work.tokens_in, "tokens_out": work.tokens_out}
    print(json.dumps({**vars(args), **figures, "kvcache_blocks": blocks, "seconds": seconds}))


if __name__ == "__main__":
    main()
