"""How long requests took and how large they were, as histograms; all metrics of an engine under vLLM's names.

The buckets are vLLM's. Takes no times itself: an output brings its own.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from nanovllm.answers import RequestMetrics
from nanovllm.engine.stats import Answered
from nanovllm.metrics import Counter, Gauge, Histogram, Metric
from nanovllm.stats.summary import EngineStats

_FIRST_TOKEN = [
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0),
    *(40.0, 80.0, 160.0, 640.0, 2560.0),
]
_PER_TOKEN = [
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    80.0,
]
_LATENCY = [
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
]
_TOKENS = [
    float(digit * 10**power) for power in range(9) for digit in (1, 2, 5)
]  # up to the longest sequence
_EDGES: dict[str, Sequence[float]] = {
    "request_prompt_tokens": _TOKENS,
    "request_generation_tokens": _TOKENS,
    "time_to_first_token_seconds": _FIRST_TOKEN,
    "request_time_per_output_token_seconds": _PER_TOKEN,
    "e2e_request_latency_seconds": _LATENCY,
    "request_queue_time_seconds": _LATENCY,
    "request_inference_time_seconds": _LATENCY,
    "request_prefill_time_seconds": _LATENCY,
    "request_decode_time_seconds": _LATENCY,
}
_REASONS = ("stop", "length", "abort", "error", "repetition")


class _Distribution:
    """Counts values by bucket."""

    def __init__(self, edges: Sequence[float]) -> None:
        self._edges = list(edges)
        self._counts = [0] * (len(edges) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._edges, value)] += 1  # an edge belongs to the bucket below it
        self._sum += value

    def histogram(self, name: str, labels: dict[str, str], longest: float) -> Histogram:
        """longest: the largest edge that is of interest."""
        upto = [*accumulate(self._counts)]
        buckets = {
            str(edge): number for edge, number in zip(self._edges, upto, strict=False) if edge <= longest
        }
        return Histogram(name, labels, upto[-1], self._sum, buckets | {"+Inf": upto[-1]})


class RequestTimes:
    """What is known of requests that have ended; see `History`."""

    def __init__(self) -> None:
        self._all = {name: _Distribution(edges) for name, edges in _EDGES.items()}
        self._add = {name: each.add for name, each in self._all.items()}
        self._ended = dict.fromkeys(_REASONS, 0)
        self._drawn: dict[tuple[str, int], int] = {}  # tokens in earlier parts of an unfinished completion

    def count(self, entry: Answered) -> None:
        """Count an output or a part of one."""
        request_id, finished, metrics, num_prompt_tokens, completions = entry
        most = 0
        for index, reason, number in completions:
            number += self._drawn.pop((request_id, index), 0)
            if reason is None:
                self._drawn[request_id, index] = number
            else:
                self._ended[reason] += 1
                self._add["request_generation_tokens"](number)
                most = max(most, number)
        if finished and metrics is not None:
            self._add["request_prompt_tokens"](num_prompt_tokens)
            self._add_times(metrics, most)

    def drop_parts(self) -> None:
        """Forget completions that never end, because their stream was left."""
        self._drawn.clear()

    def _add_times(self, times: RequestMetrics, num_tokens: int) -> None:
        """num_tokens: of the longest completion."""
        add = self._add
        start, first, last = times.first_scheduled_time, times.first_token_time, times.last_token_time
        if times.finished_time is not None:
            add["e2e_request_latency_seconds"](times.finished_time - times.arrival_time)
        if times.time_in_queue is not None:
            add["request_queue_time_seconds"](times.time_in_queue)
        if first is not None and start is not None:
            add["time_to_first_token_seconds"](first - times.arrival_time)
            add["request_prefill_time_seconds"](first - start)
        if first is not None and start is not None and last is not None:
            add["request_inference_time_seconds"](last - start)
            add["request_decode_time_seconds"](last - first)
            if num_tokens > 1:
                add["request_time_per_output_token_seconds"]((last - first) / (num_tokens - 1))

    def metrics(self, labels: dict[str, str], longest: int) -> list[Metric]:
        """longest: the maximum number of tokens of a sequence."""
        ended: list[Metric] = [
            Counter("vllm:request_success", {**labels, "finished_reason": reason}, number)
            for reason, number in self._ended.items()
        ]
        return ended + [
            each.histogram(f"vllm:{name}", dict(labels), longest if "tokens" in name else math.inf)
            for name, each in self._all.items()
        ]


def engine_metrics(stats: EngineStats, has_prefix_cache: bool, labels: dict[str, str]) -> list[Metric]:
    """The engine's totals as vLLM's gauges and counters. has_prefix_cache: whether prompts are looked up."""
    gauges = {
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting,
        "kv_cache_usage_perc": stats.kv_cache_usage,
    }
    queried = stats.num_cached_tokens + stats.num_computed_tokens if has_prefix_cache else 0
    counters = {
        "num_preemptions": stats.num_preemptions,
        "prompt_tokens": stats.num_prompt_tokens,
        "prompt_tokens_cached": stats.num_cached_tokens,
        "generation_tokens": stats.num_output_tokens,
        "prefix_cache_queries": queried,
        "prefix_cache_hits": stats.num_cached_tokens,
    }
    if stats.num_draft_tokens:
        counters["spec_decode_num_draft_tokens"] = stats.num_draft_tokens
        counters["spec_decode_num_accepted_tokens"] = stats.num_accepted_tokens
    return [
        *(Gauge(f"vllm:{name}", dict(labels), float(value)) for name, value in gauges.items()),
        *(Counter(f"vllm:{name}", dict(labels), value) for name, value in counters.items()),
    ]
