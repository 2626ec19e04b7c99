"""An LLM whose KV cache starts as NaN and whose scheduler is checked after every step."""

from __future__ import annotations

from typing import Any

from nanovllm import LLM
from nanovllm.engine.batch import Batch
from nanovllm.engine.sequence import Sequence


class CheckedLLM(LLM):
    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(str(model), **options)
        self._runner.kv_cache.fill_(float("nan"))
        self.batches: list[Batch] = []
        self.sequences: list[Sequence] = []

    def _step(self) -> tuple[Batch | None, list[Sequence]]:
        batch, finished = super()._step()
        self._scheduler.check()
        if batch is not None:
            self.batches.append(batch)
        self.sequences += finished
        return batch, finished

    @property
    def num_free_blocks(self) -> int:
        return self._scheduler.block_manager.num_free_blocks
