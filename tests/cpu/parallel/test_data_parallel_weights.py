"""update_weights with replicas: all of them get the new weights, and so do those that restart later."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import write_tiny_model

from nanovllm import LLM, SamplingParams
from nanovllm.parallel.replicas.replica import Replica

TINY: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@pytest.fixture
def news(tmp_path: Path) -> list[dict[str, torch.Tensor]]:
    """The tensors of some checkpoints."""
    folders = [
        write_tiny_model(tmp_path / str(seed), seed=seed, tie_word_embeddings=True) for seed in range(4)
    ]
    return [load_file(folder / "model.safetensors") for folder in folders]


class OneAndTwo:
    """An engine and two replicas that get the same calls."""

    def __init__(self, folder: Path) -> None:
        self.one, two = LLM(folder, **TINY), LLM(folder, data_parallel_size=2, **TINY)
        self.two = two

    def __enter__(self) -> OneAndTwo:
        return self

    def __exit__(self, *error: object) -> None:
        self.one.close()
        self.two.close()

    def call(self, method: str, *args: Any) -> None:
        for llm in (self.one, self.two):
            getattr(llm, method)(*args)

    def kill(self) -> None:
        os.kill(inside.replicas(self.two).processes[1].pid or 0, signal.SIGKILL)

    def tokens(self) -> list[list[int]]:
        """Of answers to the same prompts, which must be equal."""
        inside.replicas(self.two).call(Replica.get_room)
        prompts = [[5 + number] * 9 for number in range(12)]
        expected = [each["token_ids"] for each in self.one.generate(prompts, GREEDY, use_tqdm=False)]
        assert [each["token_ids"] for each in self.two.generate(prompts, GREEDY, use_tqdm=False)] == expected
        return expected


def shared_memories() -> int:
    """How many files of shared tensors this process holds."""
    links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum("nanovllm tensors" in str(link) for link in links)


def test_new_weights_reach_every_replica(tmp_path: Path, news: list[dict[str, torch.Tensor]]) -> None:
    """Also one that restarts, after one update or several."""
    with OneAndTwo(tmp_path / "0") as both:
        first = both.tokens()
        both.call("update_weights", news[1] | {HEAD: news[1][EMBEDDING]})
        second = both.tokens()
        both.kill()
        assert first != second == both.tokens()
        wrong: list[tuple[Any, type[Exception], str]] = [
            (news[2] | {NORM: torch.ones(33)}, ValueError, r"replica 0: model.norm.weight has shape \(33,\)"),
            (
                iter([(NORM, news[2][NORM]), ("no", torch.ones(1))]),
                ValueError,
                "replica 0: .* no tensor 'no'",
            ),
            ({NORM: torch.ones(32, dtype=torch.int32)}, ValueError, "weight is torch.int32; pass it as"),
            ({NORM: [1.0]}, TypeError, "model.norm.weight must be a torch.Tensor, not list"),
            (None, TypeError, "named_tensors must be a dict or pairs"),
        ]
        for tensors, error, match in wrong:
            with pytest.raises(error, match=match):
                both.two.update_weights(tensors)
        assert second == both.tokens() and shared_memories() == 1
        both.call("update_weights", [(name, news[2][name]) for name in (EMBEDDING, NORM)])
        third = both.tokens()
        both.kill()
        assert second != third == both.tokens() and shared_memories() == 2
        both.call("update_weights", news[3] | {HEAD: news[3][EMBEDDING]})
        assert third != both.tokens() and shared_memories() == 1, "nothing is left of the earlier ones"
    assert shared_memories() == 0


def test_new_weights_of_replicas_that_sleep(tmp_path: Path, news: list[dict[str, torch.Tensor]]) -> None:
    """Level 1 keeps them, level 2 drops them, also if a replica dies meanwhile."""
    with OneAndTwo(tmp_path / "0") as both:
        first = both.tokens()
        both.call("sleep")
        both.call("wake_up", ["weights"])
        both.call("update_weights", news[1])
        both.call("sleep")
        with pytest.raises(RuntimeError, match=r"sleeps \(weights\); call wake_up\(\) first"):
            both.two.update_weights(news[2])
        both.kill()
        both.call("wake_up")
        second = both.tokens()
        both.kill()
        assert first != second == both.tokens()
        both.call("sleep", 2)
        both.call("sleep", 1)
        both.kill()
        both.call("wake_up")
        assert first == both.tokens() and shared_memories() == 0
        both.kill()
        assert first == both.tokens()
