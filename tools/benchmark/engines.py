"""The engines that bench.py compares: each loads a model and turns a workload into a function that runs it.

Also creates the sampling parameters of each row. Times nothing.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

import nanovllm
from nanovllm.device import Device
from nanovllm.llm import LLM
from nanovllm.parallel.replicas.router import Router
from tools.benchmark.steps import Step, StepRecorder
from tools.benchmark.workloads import Workload

Run = Callable[[], object]

LEAST_MODEL_LEN = 4096  # for vLLM, whose default is the model's own limit
TEMPERATURE = 0.6
SHARED_GPU_BLOCKS = 3200  # of all replicas with --share-gpu: with the 0.6B shape 94 GB
TRANSFORMERS_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
SET_BY_WORKLOAD = ("n", "max_tokens", "ignore_eos", "stop_token_ids")  # how many tokens come out


@dataclass(frozen=True)
class Engine:
    """A loaded model."""

    prepare: Callable[[Workload], Run]  # a function that runs the workload
    take_steps: Callable[[], list[Step]]  # steps since the last call; empty for other engines


# -- sampling ------------------------------------------------------------------------------------------------


def parse_sampling(text: str, engine: str) -> dict[str, Any]:
    """Parse `--sampling name=value,name=value`, on top of temperature 0.6; values may be JSON.

    ValueError or TypeError for wrong parameters; with the engine nanovllm its own errors.
    """
    asked: dict[str, Any] = {}
    for part in filter(None, re.split(r",(?=\s*\w+\s*(?:=|$))|,$", text)):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise ValueError(f"write name=value, not {part!r}")
        if name in SET_BY_WORKLOAD:
            raise ValueError(f"{name} is the workload's to say; leave it out")
        asked[name] = _parse_value(value)
    found = {"temperature": TEMPERATURE} | asked
    if engine == "nanovllm":
        if isinstance(found.get("structured_outputs"), dict):
            found["structured_outputs"] = nanovllm.StructuredOutputsParams(**found["structured_outputs"])
        nanovllm.SamplingParams(**found)
    if engine == "transformers":
        unknown = found.keys() - set(TRANSFORMERS_SAMPLING)
        if unknown:
            raise ValueError(f"--engine transformers has no {', '.join(sorted(unknown))}")
    return found


def _parse_value(text: str) -> Any:
    """A bool or a JSON value; anything else stays a string, which the engine checks."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return json.loads(text)
    except ValueError:
        return text


def row_sampling(sampling: dict[str, Any], share: float, num_rows: int) -> list[dict[str, Any]]:
    """Each row's parameters: `sampling` for a `share` of the rows; the rest alternate greedy and plain."""
    rows, others = [], 0
    for row in range(num_rows):
        if int((row + 1) * share) > int(row * share):
            rows.append(sampling)
        else:
            rows.append({"temperature": 0.0 if others % 2 == 0 else TEMPERATURE})
            others += 1
    return rows


class RoundRobin(Router):
    """Feeds the replicas in turn, for comparison."""

    def __init__(self, num_replicas: int) -> None:
        super().__init__(num_replicas, reach=0)
        self._queues: list[deque[int]] = [deque() for _ in range(num_replicas)]
        self._turns = cycle(self._queues)

    def add(self, number: int, prompt: bytes) -> None:
        super().add(number, prompt)
        next(self._turns).append(number)

    def take(self, replica: int) -> int | None:
        queue = self._queues[replica]
        while queue:
            number = queue.popleft()
            if number in self._waiting:  # else it is aborted
                return self._give(replica, self._waiting[number])
        return None


# -- engines -------------------------------------------------------------------------------------------------


def load_nanovllm(args: argparse.Namespace, model: Path, dummy: bool, options: dict[str, Any]) -> Engine:
    if args.share_gpu:
        Device.ranks = lambda self, count, replicas=1: [str(self.torch)] * (count * replicas)
        options = {"num_kvcache_blocks": SHARED_GPU_BLOCKS // args.num_replicas, **options}
    llm = LLM(
        str(model),
        load_format="dummy" if dummy else "auto",
        skip_tokenizer_init=args.tokenizer is None,
        max_num_seqs=args.max_num_seqs,
        dtype=args.dtype or "auto",
        attention_backend=args.attention_backend,
        enforce_eager=args.enforce_eager,
        device=args.device,
        **options,
    )
    recorder = None
    if args.num_replicas > 1:  # its steps come from several engines in parallel
        if args.round_robin:
            llm._executor.pool.router = RoundRobin(args.num_replicas)
    else:
        recorder = StepRecorder(llm)

    def prepare(work: Workload) -> Run:
        rows = row_sampling(args.sampling, args.sampling_share, len(work.prompts))
        params = [
            nanovllm.SamplingParams(**row, ignore_eos=True, max_tokens=length)
            for row, length in zip(rows, work.output_lens, strict=True)
        ]

        def run() -> None:
            outputs = llm.generate(work.prompts, params, use_tqdm=args.progress)
            lens = [len(output["token_ids"]) for output in outputs]
            assert lens == work.output_lens, "an output has the wrong length"

        return run

    return Engine(prepare, list if recorder is None else recorder.take)


def load_transformers(args: argparse.Namespace, model: Path, dummy: bool, options: dict[str, Any]) -> Engine:
    """`generate` with one left-padded batch, which runs until the longest output is done."""
    from transformers import AutoConfig, AutoModelForCausalLM

    on_gpu = args.device != "cpu" and torch.cuda.is_available()
    device = torch.device(args.device if args.device != "auto" else "cuda" if on_gpu else "cpu")
    if dummy:
        net = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).to(device, args.torch_dtype)
    else:
        net = AutoModelForCausalLM.from_pretrained(model).to(device, args.torch_dtype)
    draws = args.sampling["temperature"] > 0
    sampling = {"top_k": 0, **args.sampling} if draws else {}

    def prepare(work: Workload) -> Run:
        width, longest = max(map(len, work.prompts)), max(work.output_lens)
        ids = torch.tensor([[0] * (width - len(p)) + p for p in work.prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in work.prompts], device=device)
        return lambda: net.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=draws,
            pad_token_id=0,
            **sampling,
        )

    return Engine(prepare, list)


def load_vllm(args: argparse.Namespace, model: Path, dummy: bool, options: dict[str, Any]) -> Engine:
    import vllm

    vllm.SamplingParams(**args.sampling)  # its own error, before anything is loaded
    llm = vllm.LLM(
        str(model),
        load_format="dummy" if dummy else "auto",
        skip_tokenizer_init=True,
        max_num_seqs=args.max_num_seqs,
        dtype=args.dtype or "auto",
        **options,
    )

    def prepare(work: Workload) -> Run:
        rows = row_sampling(args.sampling, args.sampling_share, len(work.prompts))
        params = [
            vllm.SamplingParams(**row, ignore_eos=True, max_tokens=length, detokenize=False)
            for row, length in zip(rows, work.output_lens, strict=True)
        ]
        prompts = [{"prompt_token_ids": ids} for ids in work.prompts]
        return lambda: llm.generate(prompts, params, use_tqdm=False)

    return Engine(prepare, list)


ENGINES = {"nanovllm": load_nanovllm, "transformers": load_transformers, "vllm": load_vllm}
