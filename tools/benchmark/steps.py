"""The time of a run of nanovllm by step and by phase, from its `on_step` callback."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanovllm import LLM
from nanovllm.batch import StepKind
from tools.benchmark.kernels import PROFILE_TOKENS
from tools.benchmark.roofline import Cost, Floor, Speed, prefill_flops
from tools.benchmark.workloads import Sharing

BATCH_SIZES = (256, 128, 64, 8, 1)


@dataclass(frozen=True, eq=False)
class Step:
    """The data of one step, `seconds` as in StepStats."""

    seconds: float
    kind: StepKind
    query_lens: np.ndarray  # [S]
    context_lens: np.ndarray  # [S]
    rows: np.ndarray  # [S] the index of each prompt


class StepRecorder:
    """Records each step of an engine of one model in a list."""

    def __init__(self, llm: LLM) -> None:
        self._log: list[Step] = []
        indices: dict[int, int] = {}  # of the prompts of sequences, which may have ended
        core: Any = llm._executor
        inner = core._answers

        def answers() -> Any:
            read, owners = core._read, core.requests.unfinished
            seq_ids = () if read is None else read[0][0].seq_ids
            indices.update((each, owners[each].request.index) for each in seq_ids if each in owners)
            outputs, stats = inner()
            if read is not None:
                batch, rows = read[0][0], np.array([indices[each] for each in seq_ids])
                self._log.append(Step(stats.seconds, stats.kind, batch.query_lens, batch.context_lens, rows))
            return outputs, stats

        core._answers = answers

    def take(self) -> list[Step]:
        """The steps since the last call, all of one `generate` with one completion for each prompt."""
        steps, self._log = self._log, []
        return steps


def phases(
    steps: list[Step], cost: Cost, speed: Speed, floor: Floor, sharing: Sharing | None
) -> dict[str, Any]:
    """Tokens/s, TFLOP/s or TB/s and the share of the floor of prefill (with mixed steps) and decode.

    The rates count what the steps had to compute or read: weights and K/V, with shared prefixes (`sharing`)
    read once in each step, but not the further traffic of attention, norms and copies.
    """
    report: dict[str, Any] = {}
    prefill = [step for step in steps if step.kind is StepKind.PREFILL]
    if prefill:
        tokens = sum(int(step.query_lens.sum()) for step in prefill)
        flops = sum(prefill_flops(cost, step.query_lens, step.context_lens) for step in prefill)
        report["prefill"] = _phase(prefill, tokens, "tflops", flops, speed.flops_per_s, floor.prefill)
    decode = [step for step in steps if step.kind is StepKind.DECODE]
    if decode:
        tokens = sum(len(step.query_lens) for step in decode)
        contexts = sum(cost.read_tokens(step.context_lens) for step in decode)
        if sharing is not None:
            contexts -= sum(sharing.saved(step.rows) for step in decode)
        rows = np.array([len(step.query_lens) for step in decode])
        read = cost.decode_bytes(len(decode), contexts) + float(cost.expert_bytes(rows).sum())
        report["decode"] = _phase(decode, tokens, "tb_per_s", read, speed.bytes_per_s, floor.decode)
    return report


def _phase(
    steps: list[Step], tokens: int, rate: str, work: float, peak: float, floor: float
) -> dict[str, Any]:
    """The figures of `steps`. work: their total. rate: in 10**12 per second. peak: the maximum per second.
    floor: in seconds."""
    seconds = sum(step.seconds for step in steps)
    return {
        "seconds": seconds,
        "steps": len(steps),
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        rate: work / seconds / 1e12,
        "share_of_peak": work / seconds / peak,
        "share_of_floor": floor / seconds,
    }


def step_times(steps: list[Step]) -> dict[str, Any]:
    """The median decode step at some batch sizes and the largest, batches up to 5 % smaller counted in."""
    decode = [(len(step.query_lens), step) for step in steps if step.kind is StepKind.DECODE]
    sizes = sorted({*BATCH_SIZES, max((size for size, _ in decode), default=1)}, reverse=True)
    report = {}
    for size in sizes:
        chosen = [step for num_seqs, step in decode if 0.95 * size <= num_seqs <= size]
        if chosen:
            report[str(size)] = {
                "ms": statistics.median(step.seconds for step in chosen) * 1e3,
                "steps": len(chosen),
                "mean_context": float(np.mean([step.context_lens.mean() for step in chosen])),
            }
    return report


def host_exposed(steps: list[Step], replays: dict[str, float]) -> dict[str, float]:
    """The time of a decode step without a running kernel, in the timed run and in the profiled run.

    The profiler makes kernels a little longer, so the first figure is too small. It makes the gaps between
    kernels much longer, so the second figure is too large. The truth is between the two.
    """
    first = [step for step in steps if step.kind is StepKind.DECODE][1 : PROFILE_TOKENS - 1]
    wall = statistics.median(step.seconds for step in first) * 1e6
    kernels, profiled = replays["kernel_us"], replays["step_us"]
    return {
        "batch": len(first[0].query_lens),
        "step_us": wall,
        "kernel_us": kernels,
        "exposed_us": wall - kernels,
        "exposed_share": 1 - kernels / wall,
        "profiled_step_us": profiled,
        "profiled_exposed_share": 1 - kernels / profiled,
        "replay_gap_us": replays["gap_us"],
    }
