"""Prefill in two halves, on ranks that copy their sums to each other."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import inside
import numpy as np
import pytest
import torch
import torch.distributed as dist
from copying_ranks import run_late_ranks
from tiny_models import VOCAB_SIZE, write_tiny_model

from nanovllm.batch import Batch, StepKind, greedy
from nanovllm.config import Config
from nanovllm.device import Device
from nanovllm.models.registry import load_model_config
from nanovllm.parallel.group import TPGroup
from nanovllm.parallel.peer_memory import PeerCopies
from nanovllm.runner.inputs import OVERLAP_TOKENS
from nanovllm.runner.model_runner import ModelRunner


def prompts_batch(seed: int) -> Batch:
    """50 sequences of 40 to 59 tokens, with blocks of 16."""
    rng = np.random.default_rng(seed)
    lens = rng.integers(40, 60, 50, dtype=np.int32)
    return Batch(
        kind=StepKind.PREFILL,
        seq_ids=tuple(range(50)),
        slots=np.arange(50, dtype=np.int32),
        token_ids=rng.integers(2, VOCAB_SIZE, int(lens.sum()), dtype=np.int32),
        query_lens=lens,
        context_lens=lens,
        tables=(np.arange(200, dtype=np.int32).reshape(50, 4),),
        draws=np.ones(50, np.int32),
        sampling=greedy(50),
    )


@pytest.mark.parametrize(("size", "layers"), [(2, 3), (4, 3), (4, 1)])
def test_ranks_that_copy_their_sums(
    size: int, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Consecutive steps with delayed copies. In one of the three layers, ranks keep only their rows of the
    residual stream.
    """
    path = write_tiny_model(tmp_path, num_hidden_layers=layers)
    model_config = load_model_config(path)
    batches = [prompts_batch(seed) for seed in range(3)]
    assert all(len(batch.token_ids) >= OVERLAP_TOKENS for batch in batches)

    def hidden_states(tp: TPGroup) -> list[torch.Tensor]:
        config = Config(str(path), tensor_parallel_size=tp.size, device="cpu", kvcache_block_size=16)
        runner = ModelRunner(config, model_config, path, Device("cpu"), tp, 128)
        runner.allocate_kv_cache(200)
        seen: list[torch.Tensor] = []
        runner.model.register_forward_hook(lambda _, inputs, hidden: seen.append(hidden.clone()))
        for batch in batches:
            runner.run(batch)
        return seen

    expected = hidden_states(TPGroup())
    store = dist.HashStore()

    def run(rank: int, copies: PeerCopies) -> tuple[list[torch.Tensor], int]:
        tp = TPGroup(rank, size, dist.ProcessGroupGloo(store, rank, size))
        memory = SimpleNamespace(logits=None, copies=copies, fits=lambda *rows: False)
        inside.set_peer_memory(tp, memory)
        before = inside.num_copied_sums(copies)
        return hidden_states(tp), inside.num_copied_sums(copies) - before

    results = run_late_ranks(monkeypatch, size, 2048, model_config.hidden_size, run)
    for found, sums in results:
        assert sums == len(batches) * 4 * (layers - 1)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert all(map(torch.equal, found, results[0][0]))
