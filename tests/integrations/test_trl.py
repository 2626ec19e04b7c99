"""TRL's GRPOTrainer with `Rollouts`: after every optimizer step they sample from the trained model."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import demo_model_path

pytest.importorskip("trl", reason="needs TRL: pip install -e '.[trl]'")

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from nanovllm.integrations.trl import Rollouts

GROUP, STEPS, LENGTH = 4, 3, 12
ENGINE: dict[str, Any] = {"dtype": "float32", "num_kvcache_blocks": 200}


def index_reward(completions: list[Any], **others: Any) -> list[float]:
    return [float(index % 3) for index, _ in enumerate(completions)]


class Checked(Rollouts):
    """Rollouts that are compared with the trainer's current model."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls: list[dict[str, Any]] = []

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        output = super().__call__(prompts, trainer)
        rows = zip(output["prompt_ids"], output["completion_ids"], output["logprobs"], strict=True)
        for prompt_ids, completion_ids, logprobs in rows:
            assert 1 <= len(completion_ids) == len(logprobs) <= LENGTH
            with torch.no_grad():
                logits = trainer.model(torch.tensor([prompt_ids + completion_ids])).logits[0].float()
            scaled = torch.log_softmax(logits[len(prompt_ids) - 1 : -1] / trainer.temperature, -1)
            expected = scaled.gather(1, torch.tensor(completion_ids)[:, None])[:, 0].tolist()
            assert logprobs == pytest.approx(expected, abs=2e-3)
        output["prompts"] = prompts
        weight = trainer.model.model.layers[0].mlp.down_proj.weight
        self.calls.append(output | {"weight": weight.detach().clone()})
        return {name: output[name] for name in ("prompt_ids", "completion_ids", "logprobs")}


def train(rollouts: Rollouts | None, folder: Path, prompts: list[Any], **arguments: Any) -> GRPOTrainer:
    """Three optimizer steps. arguments: of GRPOConfig, and another `reward` or `learning_rate`."""
    reward = arguments.pop("reward", index_reward)
    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)
    config = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=2 * GROUP,
        num_generations=GROUP,
        max_completion_length=LENGTH,
        max_steps=STEPS,
        temperature=6.0,  # the demo model is very certain of its answers
        learning_rate=arguments.pop("learning_rate", 1e-3),
        lr_scheduler_type="constant",
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        **arguments,
    )
    trainer = GRPOTrainer(
        model,
        reward,
        config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(demo_model_path()),
        rollout_func=rollouts,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize(("conversational", "sleep"), [(True, True), (False, False)])
def test_completions_are_the_trained_models(conversational: bool, sleep: bool, tmp_path: Path) -> None:
    texts = [f"Spell {word}." for word in ("KEY", "DOOR", "LOCK", "HOUSE")]
    prompts = [[{"role": "user", "content": text}] for text in texts] if conversational else texts
    rollouts = Checked(sleep=sleep, **ENGINE)
    trainer = train(rollouts, tmp_path, prompts)
    assert len(rollouts.calls) == STEPS
    for call in rollouts.calls:
        assert len(call["completion_ids"]) == 2 * GROUP
        groups = [call["prompts"][start : start + GROUP] for start in (0, GROUP)]
        assert all(group == [group[0]] * GROUP for group in groups) and groups[0] != groups[1]
        assert len({tuple(ids) for ids in call["completion_ids"][:GROUP]}) > 1
    weights = [call["weight"] for call in rollouts.calls]
    assert not any(torch.equal(before, after) for before, after in pairwise(weights))
    assert any(entry.get("reward") is not None for entry in trainer.state.log_history)
    assert rollouts.llm is not None and rollouts.llm.is_sleeping() == sleep
    rollouts.llm.close()


def test_completions_are_those_of_trls_own_rollouts(tmp_path: Path) -> None:
    """Both sample the most likely token only. Equal completions have no gradient, so weights stay as they
    are: Adam would make large steps of rounding errors."""
    prompts = [f"Spell {word}." for word in ("KEY", "DOOR", "LOCK", "HOUSE", "A", "BIRD")]
    completions = []
    for rollouts in (None, Rollouts(**ENGINE)):
        seen: list[tuple[str, list[int]]] = []

        def reward(
            prompts: list[str], completion_ids: list[list[int]], seen: Any = seen, **others: Any
        ) -> list[float]:
            seen += zip(prompts, completion_ids, strict=True)
            return index_reward(completion_ids)

        train(rollouts, tmp_path, prompts, top_k=1, learning_rate=0.0, reward=reward)
        completions.append(seen)
        if rollouts is not None and rollouts.llm is not None:
            rollouts.llm.close()
    theirs, ours = completions
    assert ours == theirs and len(ours) == STEPS * 2 * GROUP
    assert len({tuple(ids) for _, ids in ours}) == len(prompts)


def test_what_cannot_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="max_num_seqs"):
        Rollouts(max_seqs=3)
    with pytest.raises(ValueError, match="top_p"):
        train(Rollouts(**ENGINE), tmp_path, ["A", "B"], generation_kwargs={"top_p": 2.0})
