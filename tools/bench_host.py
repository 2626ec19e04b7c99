"""Time of the host for `generate` without a device: a model of one tiny layer is loaded, and no step runs.

Steps are planned, their inputs are built and copied, and each row gets a token at once. Prints processor time
by part, for each prompt.

    OMP_NUM_THREADS=1 python -m tools.bench host --workload label-240
    OMP_NUM_THREADS=1 python -m tools.bench host --workload label-240 --profile
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import nanovllm
from nanovllm.batch import Batch, StepKind, StepOutput
from nanovllm.engine import startup
from nanovllm.llm import LLM
from nanovllm.runner.inputs import PendingOutput, prepare_decode, prepare_prefill
from tools.benchmark.shapes import write_shape
from tools.benchmark.workloads import SYNTHETIC

BLOCKS = 2**20  # tokens of the KV cache


def load(args: argparse.Namespace, folder: Path) -> LLM:
    path = write_shape("qwen3-0.6b", folder) / "config.json"
    small = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1}
    small |= {"num_key_value_heads": 1, "head_dim": 8}
    path.write_text(json.dumps(json.loads(path.read_text()) | small))
    startup._CPU_STEP = 2**20  # tokens of a step are limited as on a GPU
    return LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        device="cpu",
        async_scheduling=True,
        enforce_eager=True,
        kvcache_block_size=args.block_size,
        num_kvcache_blocks=BLOCKS // args.block_size,
        max_num_seqs=args.max_num_seqs,
    )


class Parts:
    """The processor time of calls that do not contain each other."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def timed(self, owner: Any, method: str, name: str | Callable[[Any], str]) -> None:
        inner = getattr(owner, method)

        def outer(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            result = inner(*args, **kwargs)
            part = name if isinstance(name, str) else name(result)
            self.seconds[part] += time.process_time() - start
            return result

        setattr(owner, method, outer)


def without_device(llm: LLM) -> None:
    """Let a step end after its inputs are copied."""
    core = llm._executor
    runner = core.runner

    def launch(batch: Batch) -> PendingOutput:
        if runner.layout.own_numbers:
            batch = runner.layout.numbered(batch, runner.kv_cache.shape[2])
        if batch.kind is StepKind.DECODE:
            shared = None if runner.prefixes is None else runner.prefixes.find(batch)
            inputs = prepare_decode(batch, runner.block_size, shared)
        else:
            inputs = prepare_prefill(batch, runner.block_size)
        runner.staging.send(inputs)()
        return runner.staging.receive(StepOutput(torch.full((len(batch.slots), 1), 7)))

    core.ranks.run = lambda method, batch: launch(batch)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", default="label-240", choices=sorted(SYNTHETIC))
    parser.add_argument("--num-seqs", type=int)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--profile", action="store_true", help="print the costliest functions of one run")
    args = parser.parse_args()
    default, draw = SYNTHETIC[args.workload]
    work = draw(args.num_seqs or default)
    params = [
        nanovllm.SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for n in work.output_lens
    ]
    with tempfile.TemporaryDirectory() as folder, load(args, Path(folder)) as llm:
        without_device(llm)
        core, parts = llm._executor, Parts()
        if not args.profile:
            parts.timed(llm, "_params", "params")
            parts.timed(llm, "_check", "check")
            parts.timed(llm, "_add", "add")
            parts.timed(
                core, "_plan", lambda step: "plan " + (step[0].kind.name.lower() if step else "nothing")
            )
            parts.timed(core.ranks, "run", "launch")
            parts.timed(core.scheduler, "postprocess", "postprocess")
            parts.timed(core, "_answers", "outputs")
            parts.timed(llm, "_noted", "noted")
        runs: list[dict[str, float]] = []
        profile = cProfile.Profile()
        for turn in range(args.repeat + 1):
            prompts = work.shifted(turn, 150_000).prompts
            parts.seconds.clear()
            last = args.profile and turn == args.repeat
            start = time.process_time()
            if last:
                profile.enable()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            profile.disable()
            total = time.process_time() - start
            assert [len(output["token_ids"]) for output in outputs] == work.output_lens
            del outputs
            runs.append({**parts.seconds, "rest": total - sum(parts.seconds.values()), "total": total})
        stats = llm.stats()
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
        return
    rows = len(work.prompts)
    print(f"{args.workload}, {rows} prompts, {stats.num_computed_tokens // len(runs)} tokens computed a run")
    for part in runs[-1]:
        own = [run.get(part, 0.0) / rows * 1e6 for run in runs[1:]]
        print(f"{part:16} {statistics.median(own):7.2f} us a prompt   least {min(own):7.2f}")


if __name__ == "__main__":
    main()
