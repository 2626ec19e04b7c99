"""Text at both ends of many short prompts, beside a device that only waits: a step takes a fixed time, and no
model runs.

    OMP_NUM_THREADS=1 python -m tools.bench text --prompts 1000000
    OMP_NUM_THREADS=1 python -m tools.bench text --prompts 1000000 --job --tokenizer FOLDER

Prints when the device began its first step and the first answer was there, how long the device waited for the
host, how often a step came late after the first second, and the memory of a prompt: of the process at its
peak, less that of the prompts, and less that of all answers. A job holds neither its prompts nor its answers.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from nanovllm import SamplingParams, demo_model_path
from nanovllm.batch import Batch, StepKind, StepOutput
from nanovllm.engine import startup
from nanovllm.jobs.main import parse_args
from nanovllm.jobs.run import run as run_job
from nanovllm.llm import LLM
from tools.bench_jobs import LoadedLLM

BLOCK, BLOCKS = 128, 2**14
WORDS = (
    """the a of to in is good bad book film plot slow fast very not and but I we they saw liked first last"""
)


class Waits:
    """Acts as the output of a step: it is there at a time."""

    def __init__(self, until: float, rows: int, token: int) -> None:
        self._until, self._rows, self._token = until, rows, token

    def waits_for_host(self) -> bool:
        return time.perf_counter() >= self._until

    def result(self) -> StepOutput[np.ndarray]:
        if (left := self._until - time.perf_counter()) > 0:
            time.sleep(left)
        return StepOutput(np.full((self._rows, 1), self._token))


class FakeDevice:
    """Steps that take `decode` seconds, or those of their prompt tokens; one after the other."""

    def __init__(self, decode: float, per_token: float, launch: float) -> None:
        """launch: seconds in which the host launches a step of prompts, which no graph holds."""
        self._decode, self._per_token, self._launch = decode, per_token, launch
        self.steps = self.prefills = 0
        self.started: float | None = None
        self.free_at = self.idle = self.idle_later = 0.0

    def launch(self, batch: Batch) -> Waits:
        now = time.perf_counter()
        if self.started is None:
            self.started = self.free_at = now
        waited = max(0.0, now - self.free_at)
        self.idle += waited
        self.idle_later += waited if now - self.started > 1.0 else 0.0
        seconds = self._decode
        if batch.kind is StepKind.PREFILL:
            seconds = max(0.001 + self._per_token * len(batch.token_ids), self._launch)
            self.prefills += 1
        self.free_at = max(now, self.free_at) + seconds
        while batch.kind is StepKind.PREFILL and time.perf_counter() < now + self._launch:
            pass  # the host is busy
        self.steps += 1
        return Waits(self.free_at, len(batch.slots), 200 + self.steps % 97)


def load(args: argparse.Namespace, folder: Path) -> LLM:
    shutil.copytree(args.tokenizer or demo_model_path(), folder, dirs_exist_ok=True)
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.gguf")]:
        path.unlink()
    shape = json.loads((Path(demo_model_path()) / "config.json").read_text())
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    shape |= {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1}
    shape |= {"num_key_value_heads": 1, "head_dim": 8, "vocab_size": len(vocabulary) + 512}
    shape |= {"max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(shape))
    startup._CPU_STEP = 2**20  # tokens of a step are limited as on a GPU
    options: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "async_scheduling": True}
    options |= {"enforce_eager": True, "kvcache_block_size": BLOCK, "num_kvcache_blocks": BLOCKS}
    return LLM(str(folder), max_num_seqs=args.max_num_seqs, **options)


def texts(count: int) -> list[str]:
    """Short prompts, none like another."""
    draw = random.Random(0)
    return [
        f"Review {row}: {' '.join(draw.choices(WORDS.split(), k=draw.randint(8, 40)))}"
        for row in range(count)
    ]


def memory(name: str) -> int:
    """Bytes of this process: "VmRSS" now, "VmHWM" at the peak since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {name}")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=100_000)
    parser.add_argument("--tokens-out", type=int, default=32)
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--step", type=float, default=0.003, help="seconds of a decode step")
    parser.add_argument("--per-token", type=float, default=1.75e-6, help="seconds of a prompt token")
    parser.add_argument("--launch", type=float, default=0.0, help="of the host, for a step of prompts")
    parser.add_argument("--job", action="store_true", help="as `nanovllm run`, in place of `generate`")
    parser.add_argument("--tokenizer", help="a folder with tokenizer.json; the demo model's by default")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        prompts = texts(args.prompts)
        if args.job:
            with (Path(name) / "in.jsonl").open("w") as file:
                file.writelines(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
            prompts = []
        with load(args, folder) as llm:
            llm._first_at_once = lambda num_replicas: None  # a stream begins as on a GPU
            device = FakeDevice(args.step, args.per_token, args.launch)
            core = llm._executor
            core.ranks.run = lambda method, batch: device.launch(batch)
            first: list[float] = []
            llm.on_step = lambda stats: (
                first.append(time.perf_counter()) if stats.num_finished and not first else None
            )
            gc.collect()
            forget_peak()
            before, start, cpu = memory("VmRSS"), time.perf_counter(), time.process_time()
            if args.job:
                sampling = f"temperature=0,ignore_eos=true,max_tokens={args.tokens_out}"
                command = ["run", f"{name}/in.jsonl", "-o", f"{name}/out.jsonl", "--model", str(folder)]
                engine: Any = LoadedLLM(llm)
                code = run_job(parse_args([*command, "--sampling", sampling]), engine)
                assert code == 0, f"the job ended with code {code}"
                outputs: list[Any] = []
                first = first or [time.perf_counter()]
            else:
                params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=args.tokens_out)
                outputs = llm.generate(prompts, params, use_tqdm=False)
                assert len(outputs) == args.prompts
            end = time.perf_counter()
            peak = memory("VmHWM")
            gc.collect()
            answers = memory("VmRSS") - before
            assert device.started is not None
            seconds = end - device.started
            found = {
                "prompts": args.prompts,
                "first step after": round(device.started - start, 2),
                "first answer after": round(first[0] - start, 2),
                "seconds": round(end - start, 2),
                "processor seconds": round(time.process_time() - cpu, 2),
                "steps": device.steps,
                "of prompts": device.prefills,
                "idle": round(device.idle / seconds, 4),
                "idle after a second": round(device.idle_later / seconds, 4),
                "bytes a prompt": round((peak - before - (0 if args.job else answers)) / args.prompts),
                "bytes an answer": round(answers / args.prompts),
            }
            print(json.dumps(found))


if __name__ == "__main__":
    main()
