"""The overhead of `nanovllm run` over `LLM.generate`, the gain of its order window, and the cost of columns.

    python -m tools.bench jobs overhead                       # the headline workload, 8 times over
    python -m tools.bench jobs order --prefix 4096 --rows 2048    # 20 shared prefixes in random order
    python -m tools.bench jobs overhead --cpu                 # the demo model and its problems
    python -m tools.bench jobs order --cpu --prefix 512 --rows 512 --tokens-out 16 --num-kvcache-blocks 256
    python -m tools.bench jobs columns --rows 100000       # copied or not; an engine that computes nothing
    python -m tools.bench jobs columns --rows 100000 --cpu --tokens-out 8    # with the demo model

Without --cpu it uses dummy weights of a Qwen3 shape. The rows are token ids in a JSON Lines file. They run as
a job with an engine that is already loaded, so that loading does not count. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

from nanovllm import LLM, SamplingParams, demo_model_path
from nanovllm.engine.executor import Load
from nanovllm.engine.stats import History
from nanovllm.jobs.main import parse_args
from nanovllm.jobs.run import run as run_job
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.stats.summary import EngineStats, summary
from tools.benchmark.shapes import QWEN3, write_shape
from tools.benchmark.workloads import Workload, demo, headline, prefixes


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


def write_rows_with_columns(rows: int, path: Path) -> None:
    """Rows with six columns of about 300 bytes."""
    with path.open("w") as file:
        for index in range(rows):
            row: dict[str, Any] = {"id": f"r{index}", "prompt": f"row {index}", "label": index % 7}
            row |= {"url": f"https://example.org/{index}", "note": "text " * 40, "tags": ["a", "b"]}
            file.write(json.dumps(row) + "\n")


class Nothing:
    """Acts as an engine, and answers each prompt at once, without computing anything."""

    tokenizer = None
    on_step: Any = None
    model_config = SimpleNamespace(max_model_len=2**20, head=None)
    config = SimpleNamespace(max_num_seqs=256, data_parallel_size=1)

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0)

    def stream(self, prompts: Any, params: Any, on_error: str) -> Iterator[RequestOutput]:
        for index, prompt in enumerate(prompts):
            next(params)
            answer = CompletionOutput(0, "an answer", [1, 2], finish_reason="stop")
            yield RequestOutput(str(index), prompt["prompt"], [1], None, [answer], index=index)

    def stats(self) -> EngineStats:
        return summary(History(), Load(0, 0, 0, 0.0, 0.0))

    def reset_prefix_cache(self) -> None:
        pass


def peak_memory() -> float:
    """The largest size of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def columns(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Jobs that copy no columns, and all, in turn; peaks of memory with a tenth of the rows, and with all."""
    engine: Any = Nothing()
    if args.cpu:
        shutil.copytree(demo_model_path(), folder / "model")
        engine = LLM(folder / "model", device="cpu", max_num_seqs=args.max_num_seqs, num_kvcache_blocks=2000)
    else:
        shutil.copytree(demo_model_path(), folder / "model")
    sampling = f"temperature=0,ignore_eos=true,max_tokens={args.tokens_out}"
    found: dict[str, Any] = {"seconds": {"none": [], "all": []}, "peak_mib": []}
    for rows in (args.rows // 10, args.rows):
        write_rows_with_columns(rows, folder / "in.jsonl")
        for turn in range(1 if rows < args.rows else args.repeat):
            for number, value in enumerate(("none", "all")):
                more = ["--columns", value, "--sampling", sampling]
                seconds = job_seconds(engine, folder, rows + 2 * turn + number, *more)
                if rows == args.rows:
                    found["seconds"][value].append(round(seconds, 2))
        found["peak_mib"].append(round(peak_memory()))
    found["rate_of_plain"] = round(min(found["seconds"]["none"]) / min(found["seconds"]["all"]), 3)
    return found


def job_seconds(llm: Any, folder: Path, number: int, *argv: str) -> float:
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
    parser.add_argument("what", choices=["overhead", "order", "columns"])
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
        if args.what == "columns":
            print(json.dumps({**vars(args), **columns(args, folder)}))
            return
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
