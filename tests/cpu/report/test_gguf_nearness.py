"""tools/gguf_nearness.py: its prompts and figures."""

from __future__ import annotations

from typing import Any

import torch

from tools.gguf_nearness import prompts_of, row_of


class Tokenizer:
    def apply_chat_template(self, chat: list[dict[str, str]], **options: Any) -> list[int]:
        return [1, *self(chat[0]["content"])["input_ids"]]

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(each) for each in text]}


def test_there_are_500_different_prompts() -> None:
    prompts = prompts_of(Tokenizer())
    assert len({tuple(each) for each in prompts}) == 500
    assert sum(each[0] == 1 for each in prompts) == 250


def test_figures_are_those_of_the_distributions() -> None:
    reference = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.5 - 1e-3, 1e-3]]).log()
    assert row_of(reference, reference) == "2 of 2 | 0.00000 +- 0.00000 | 0.0000"
    other = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.5 - 1e-3, 1e-3]]).log()
    # KL of the first row: 0.5 log 2 + 0.25 log 0.5 = 0.25 log 2 = 0.17329
    assert row_of(reference, other).startswith("1 of 2 | 0.08664 +- 0.08664 | 0.17")
