"""Engines whose free blocks are NaN before each step, for tests of layers with windows."""

from __future__ import annotations

from typing import Any

import inside
import numpy as np
import pytest
import torch
from checked_llm import CheckedLLM

from nanovllm.batch import Batch
from nanovllm.windows.layout import TwoGroups

CELLS: dict[str, dict[str, Any]] = {
    "tight": {"max_num_batched_tokens": 7, "num_kvcache_blocks": 14},
    "ample": {"num_kvcache_blocks": 100, "async_scheduling": False},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 11},
}


def spoil_free_blocks(llm: CheckedLLM, patch: pytest.MonkeyPatch) -> list[int]:
    """Before each step, fill all blocks with NaN that are free and not cached; return how many, by step."""
    runner, counts = inside.runner(llm), []
    launch = runner.launch

    def launch_spoilt(batch: Batch) -> Any:
        state, slabs = inside.block_state(inside.block_manager(llm)), inside.block_manager(llm).num_blocks
        cached = [content is not None for content in state.content]
        free = [slab for slab in state.free if not any(cached[slab::slabs])]
        runner.kv_cache[:, :, free] = torch.nan
        for layer in runner.model.attention_layers:
            free_parts, offset = state.free_parts[layer.group], state.offsets[layer.group]
            blocks = np.array([part - offset for part in free_parts if not cached[part]], np.int32)
            if isinstance(runner.layout, TwoGroups):
                blocks = runner.layout.blocks_of(blocks, layer.group, slabs)
            layer.cache.k[blocks] = layer.cache.v[blocks] = torch.nan
        counts.append(len(free))
        return launch(batch)

    patch.setattr(runner, "launch", launch_spoilt)
    return counts
