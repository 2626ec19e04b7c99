"""Steps of a list or a job whose answers have the lengths of chats, without a device: the real scheduler
plans each step, and each row gets a token at once.

    OMP_NUM_THREADS=1 python -m tools.bench order --lengths limits          # max_tokens says the length
    OMP_NUM_THREADS=1 python -m tools.bench order --lengths groups --spread 0.3 --job
    OMP_NUM_THREADS=1 python -m tools.bench order --sorted                  # the list is longest first

Prints all steps; the steps of the tail, in which fewer than half of `max_num_seqs` rows run; the length of
the longest row in it; the tokens of prompts that were computed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from nanovllm import SamplingParams
from nanovllm.batch import Batch, StepKind, StepOutput
from nanovllm.engine import startup
from nanovllm.jobs.main import parse_args
from nanovllm.jobs.run import run as run_job
from nanovllm.llm import LLM
from tools.bench_jobs import LoadedLLM
from tools.benchmark.shapes import write_shape

STOP, DRAWN, LONGEST = 3, 7, 4000
SHARES = (0.25, 0.2, 0.17, 0.13, 0.1, 0.08, 0.05, 0.02)  # of the rows, by group; medians from 30 to 2,000


class AtOnce:
    """Acts as the output of a step that is there."""

    def __init__(self, token_ids: np.ndarray) -> None:
        self._token_ids = token_ids

    def waits_for_host(self) -> bool:
        return True

    def result(self) -> StepOutput[np.ndarray]:
        return StepOutput(self._token_ids)


class NoDevice:
    """Draws a token for each row, and the one that ends it after as many as its length."""

    def __init__(self, llm: LLM, lengths: dict[int, int]) -> None:
        """lengths: by the first token of a prompt after its instruction, which is its number."""
        self._core: Any = llm._executor
        self._lengths = lengths
        self._left: dict[int, int] = {}  # tokens, by sequence
        self.longest: dict[int, int] = {}
        self.steps: list[tuple[bool, int, int]] = []  # whether prefill, rows, the longest of these rows
        self.computed = 0
        self._core.ranks.run = lambda method, batch: self.launch(batch)

    def launch(self, batch: Batch) -> AtOnce:
        drawn = np.full((len(batch.seq_ids), 1), DRAWN)
        most = 0
        for row, seq_id in enumerate(batch.seq_ids):
            if seq_id not in self._left:
                prompt = self._core.requests.unfinished[seq_id].request.prompt_token_ids
                self._left[seq_id] = self.longest[seq_id] = self._lengths[prompt[-1]]
            most = max(most, self.longest[seq_id])
            if batch.draws[row]:
                self._left[seq_id] -= 1
                if self._left[seq_id] <= 0:
                    drawn[row] = STOP
        is_prefill = batch.kind is StepKind.PREFILL
        self.computed += len(batch.token_ids) if is_prefill else 0
        self.steps.append((is_prefill, len(batch.seq_ids), most))
        return AtOnce(drawn)


def load(args: argparse.Namespace, folder: Path) -> LLM:
    path = write_shape("qwen3-0.6b", folder) / "config.json"
    small = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1}
    small |= {"num_key_value_heads": 1, "head_dim": 8, "eos_token_id": STOP}
    path.write_text(json.dumps(json.loads(path.read_text()) | small))
    startup._CPU_STEP = 2**20  # tokens of a step are limited as on a GPU
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu"}
    options |= {"async_scheduling": True, "enforce_eager": True, "kvcache_block_size": 128}
    return LLM(str(folder), num_kvcache_blocks=args.cache // 128, max_num_seqs=args.max_num_seqs, **options)


def drawn_rows(args: argparse.Namespace) -> tuple[list[list[int]], list[int]]:
    """Prompts, which end with their number, and the lengths of their answers."""
    rng = np.random.default_rng(args.seed)
    medians = np.full(args.rows, 200.0)
    groups = np.zeros(args.rows, int)
    spread = 1.0
    if args.lengths == "groups":
        groups = rng.choice(len(SHARES), args.rows, p=np.array(SHARES) / sum(SHARES))
        medians = np.geomspace(30, 2000, len(SHARES))[groups]
        spread = args.spread
    lengths = np.clip(medians * np.exp(spread * rng.standard_normal(args.rows)), 10, LONGEST).astype(int)
    prompts = [
        [1000 + int(group)] * args.shared + rng.integers(1000, 9000, 20).tolist() + [10_000 + row]
        for row, group in enumerate(groups)
    ]
    return prompts, lengths.tolist()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    help_lengths = "known by max_tokens, alike within each of 8 groups with an instruction, or not known"
    parser.add_argument(
        "--lengths", choices=["limits", "groups", "nothing"], default="limits", help=help_lengths
    )
    parser.add_argument("--spread", type=float, default=0.3, help="sigma of the lengths in a group")
    parser.add_argument("--shared", type=int, default=320, help="tokens of an instruction")
    parser.add_argument("--cache", type=int, default=2**23, help="tokens of the KV cache")
    parser.add_argument("--sorted", action="store_true", help="the list is given longest first, as one group")
    parser.add_argument("--job", action="store_true", help="as `nanovllm run`, in place of `generate`")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    prompts, lengths = drawn_rows(args)
    order = list(range(args.rows))
    limits = lengths if args.lengths == "limits" else [LONGEST] * args.rows
    if args.sorted:
        order = np.argsort(-np.array(lengths), kind="stable").tolist()
        prompts = [prompt[args.shared :] for prompt in prompts]
    with tempfile.TemporaryDirectory() as name, load(args, Path(name)) as llm:
        llm._first_at_once = lambda num_replicas: None  # a stream begins as on a GPU
        device = NoDevice(llm, {10_000 + row: length for row, length in enumerate(lengths)})
        if args.job:
            with Path(name, "in.jsonl").open("w") as file:
                for row in order:
                    params: dict[str, Any] = {
                        "max_tokens": limits[row],
                        "temperature": 0,
                        "detokenize": False,
                    }
                    file.write(json.dumps({"prompt": prompts[row], "sampling_params": params}) + "\n")
            command = ["run", f"{name}/in.jsonl", "-o", f"{name}/out.jsonl", "--model", name]
            engine: Any = LoadedLLM(llm)
            code = run_job(parse_args([*command, *["--ordered"] * args.sorted]), engine)
            assert code == 0, f"the job ended with code {code}"
        else:
            asked = [SamplingParams(temperature=0, max_tokens=limits[row], detokenize=False) for row in order]
            outputs = llm.generate([array("i", prompts[row]) for row in order], asked, use_tqdm=False)
            assert [len(each["token_ids"]) for each in outputs] == [lengths[row] for row in order]
    steps = device.steps
    last = max(n for n, (prefill, rows, _) in enumerate(steps) if prefill or 2 * rows >= args.max_num_seqs)
    found = {
        "steps": len(steps),
        "of prefill": sum(prefill for prefill, _, _ in steps),
        "tail": len(steps) - 1 - last,
        "its longest row": max([most for _, _, most in steps[last + 1 :]], default=0),
        "work": round(sum(lengths) / args.max_num_seqs),
        "prompt tokens computed": device.computed,
    }
    print(json.dumps({**vars(args), **found}))


if __name__ == "__main__":
    main()
