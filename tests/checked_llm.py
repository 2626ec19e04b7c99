"""An LLM whose KV cache starts as NaN on every rank, and whose scheduler is checked after every step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from invariants import check_scheduler

from nanovllm import LLM, SamplingParams
from nanovllm.batch import Batch
from nanovllm.device import Device
from nanovllm.engine import core
from nanovllm.layers.stream import Group
from nanovllm.outputs import RequestOutput
from nanovllm.plan.sequence import Sequence, SequenceStatus
from nanovllm.runner.model_runner import ModelRunner, RankSetup

BLOCK = 8


class CheckedSetup(RankSetup):
    """Fills the KV cache with NaN. Workers unpickle this class, so it acts on every rank."""

    def load(self, device: Device, group: Group, check: Callable[[], None] = lambda: None) -> ModelRunner:
        runner = super().load(device, group, check)
        allocate = runner.allocate_kv_cache

        def allocate_nan(num_blocks: int) -> int:
            allocated = allocate(num_blocks)
            runner.kv_cache.fill_(float("nan"))
            for layer in runner.model.state_layers:
                pools = [each for each in vars(layer).values() if isinstance(each, torch.Tensor)]
                assert pools and sum(pool.nbytes for pool in pools) == layer.state_bytes(
                    runner.config.max_num_seqs
                )
                for pool in pools:
                    pool.fill_(float("nan"))
            return allocated

        runner.allocate_kv_cache = allocate_nan  # type: ignore[method-assign]
        return runner


class CheckedLLM(inside.AroundSteps, LLM):
    def __init__(self, model: Any, **options: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(core, "RankSetup", CheckedSetup)
            super().__init__(str(model), **options)
        cells = inside.runner(self).kv_cache.flatten()
        assert all(part.isnan().all() for part in cells.split(2**18)) or inside.runner(self).graphs
        self.batches: list[Batch] = []  # of the steps that finished
        self.sequences: list[Sequence] = []

    def around_step(self, step: Callable[[], Any]) -> Any:
        unfinished = inside.scheduler_state(inside.scheduler(self)).unfinished.values()
        stepped = step()
        check_scheduler(inside.scheduler(self))
        self.sequences += [seq for seq in unfinished if seq.status is SequenceStatus.FINISHED]
        return stepped

    def finished(self, read: Any) -> None:
        self.batches += [] if read is None else [read[0][0]]

    @property
    def num_free_blocks(self) -> int:
        return len(inside.block_state(inside.block_manager(self)).free)


def logits_of(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], index: int
) -> tuple[torch.Tensor, list[int]]:
    """Generate; return the logits [tokens, vocabulary] from which prompt `index`'s answer was chosen, and the
    answer.
    """
    runner, request_id = inside.runner(llm), inside.next_id(llm) + index
    steps: list[torch.Tensor] = []  # hidden states of each step
    kept: list[torch.Tensor] = []

    def recorded(run: Any) -> Any:
        def record(*args: Any) -> Any:
            result = run(*args)
            if result is not None:  # it may be that a step cannot be recorded; then it runs the model
                steps.append(result[0] if isinstance(result, tuple) else result)
            return result

        return record

    launch = runner.launch

    @torch.inference_mode()
    def launch_recorded(batch: Batch) -> Any:
        handle = launch(batch)
        for seq_id in inside.requests(llm).unfinished_sequences(request_id):
            if seq_id in batch.seq_ids and batch.draws[batch.seq_ids.index(seq_id)]:
                logits = runner.model.compute_logits(steps[-1][: len(batch.slots)])
                kept.append(logits[batch.seq_ids.index(seq_id)].clone())
        return handle

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "launch", launch_recorded)
        patch.setattr(runner, "run_model", recorded(runner.run_model))
        for graphs in runner.graphs.values():
            patch.setattr(graphs, "replay", recorded(graphs.replay))
        if runner.recorded is not None:
            patch.setattr(runner.recorded, "run", recorded(runner.recorded.run))
        output = llm.generate(prompts, params, use_tqdm=False)[index]
    assert len(kept) == len(output["token_ids"])
    return torch.stack(kept), output["token_ids"]


class Bar:
    """A tqdm-like bar. Calling it returns the bar itself, so it also serves as the class."""

    total, done, closed = 0, 0, False

    def __call__(self, total: int, desc: str) -> Bar:
        assert self.total == 0, "one bar is made"
        self.total = total
        return self

    def update(self, count: int) -> None:
        self.done += count

    def close(self) -> None:
        self.closed = True


def make_tiny(model: Path, **options: Any) -> CheckedLLM:
    """An LLM for a model of `tiny_models` on the CPU, with blocks of BLOCK tokens and one step ahead."""
    defaults = {
        "device": "cpu",
        "skip_tokenizer_init": True,
        "kvcache_block_size": BLOCK,
        "max_model_len": 64,
        "async_scheduling": True,
    }
    return CheckedLLM(model, **defaults | options)


def run(llm: LLM) -> list[RequestOutput]:
    """Step until all requests are finished; return their outputs."""
    outputs = []
    while not llm.is_finished():
        outputs += llm.step()
    return outputs
