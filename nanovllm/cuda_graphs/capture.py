"""Which decode steps of a runner are captured as CUDA graphs, in which order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from nanovllm.batch import Batch, StepKind, greedy
from nanovllm.cuda_graphs.graphs import CUDAGraphs, Rehearsal, graph_sizes
from nanovllm.cuda_graphs.prefill import PrefillGraphs, most_tokens
from nanovllm.runner.inputs import prepare_decode
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.protocols import GraphOutput, SharedRows

_NOTHING = np.empty(0, np.int32)
EMPTY_BATCH = Batch(
    kind=StepKind.DECODE,
    seq_ids=(),
    slots=_NOTHING,
    token_ids=_NOTHING,
    query_lens=_NOTHING,
    context_lens=_NOTHING,
    tables=(_NOTHING.reshape(0, 1),),
    draws=_NOTHING,
    sampling=greedy(0),
)


def capture(runner: ModelRunner) -> None:
    """Graphs of decode steps for batch sizes that cover `max_num_seqs`, over the fixed input buffer. Captures
    the largest one; all others are captured on first use."""
    rehearsal = Rehearsal(runner.model.model)

    def make(shared: SharedRows | None, drawn: bool, sizes: list[int], pool: object) -> CUDAGraphs:
        step = partial(make_step, runner, shared, drawn)
        return CUDAGraphs(sizes, step, runner.device.torch, pool, rehearsal)

    sizes = graph_sizes(runner.config.max_num_seqs)
    runner.graphs[0, True] = first = make(None, True, sizes, None)
    first.capture(sizes[-1])
    # In fewer sizes: most workloads do not need them.
    few = sizes[::-4][::-1]
    runner.graphs[0, False] = make(None, False, sorted({*sizes[:3], *sizes[::-2]}), first.pool)
    if runner.prefixes is not None:
        for chunk, nothing in runner.prefixes.nothing.items():
            for drawn in (True, False):
                runner.graphs[chunk, drawn] = make(nothing, drawn, few, first.pool)
    if prefill_share(runner):
        groups = len(runner.layout.groups)
        runner.prefills = PrefillGraphs(runner.model, runner.device, first.pool, runner.size.tokens, groups)


def prefill_share(runner: ModelRunner) -> float:
    """What the graphs of prefill steps take of the memory of the largest step's activations; 0: there are
    none. Pieces end at attention alone, so no layer with a state can be in one. Sums over several ranks are
    not captured, because NCCL keeps a graph alive and cannot be aborted."""
    model = runner.model
    in_parts = runner.layout.groups[-1].policy.in_parts
    if runner.tp.size > 1 or runner.routed is not None or len(model.model.layers) < 2 or not in_parts:
        return 0.0
    return most_tokens(runner.model, runner.size.tokens) / runner.size.tokens


def make_step(
    runner: ModelRunner, shared: SharedRows | None, drawn: bool, rows: int
) -> Callable[[], GraphOutput]:
    """A decode step of `rows` sequences over the fixed input buffer, to capture as a graph."""
    batch = replace(EMPTY_BATCH, tables=EMPTY_BATCH.tables * len(runner.layout.groups))
    arrays = prepare_decode(batch, runner.block_size, shared, runner.max_model_len)
    inputs = runner.staging.send(arrays, replace(runner.size, tokens=rows, seqs=rows))()
    return lambda: runner.graph_step(inputs, drawn)
