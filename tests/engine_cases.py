"""Greedy requests for the tests of the engine, and the tokens of their outputs."""

from __future__ import annotations

import random

from checked_llm import BLOCK
from tiny_models import VOCAB_SIZE

from nanovllm import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def make_prompts() -> list[list[int]]:
    """Prompts of up to three blocks; the last three begin with the same two blocks."""
    rng = random.Random(3)
    shared = [rng.randrange(2, VOCAB_SIZE) for _ in range(2 * BLOCK)]
    lens = [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 20]
    prompts = [[rng.randrange(2, VOCAB_SIZE) for _ in range(n)] for n in lens]
    return [*prompts, shared + prompts[2], shared, [*shared, 5]]


def tokens(outputs: list) -> list[list[int]]:
    return [output["token_ids"] for output in outputs]
