"""Prompts that part from each other within blocks, and how many of their tokens must be computed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest

from nanovllm.plan.prefix_tree import PrefixTree


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens are equal at the beginning."""
    ends = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(ends, min(len(one), len(other)))


def branching_prompts(rng: random.Random, count: int, longest: int, vocab: int) -> list[list[int]]:
    """Prompts of tokens 1 .. vocab - 1 that begin with a part of an earlier one, or with all of it."""
    prompts: list[list[int]] = []
    for _ in range(count):
        start = rng.choice(prompts)[: rng.randint(0, longest)] if prompts and rng.random() < 0.9 else []
        more = [rng.randrange(1, vocab) for _ in range(rng.choice([0, 1, 2, 5, 9, longest // 2]))]
        prompts.append((start + more)[:longest] or [1])
    return prompts


def must_compute(prompts: Iterable[Sequence[int]]) -> int:
    """The nodes of the tree of these prompts, and one token for each that an earlier one begins with."""
    nodes: set[tuple[int, ...]] = set()
    held = 0
    for prompt in prompts:
        held += tuple(prompt) in nodes
        nodes |= {tuple(prompt[: end + 1]) for end in range(len(prompt))}
    return len(nodes) + held


def share_whole_blocks_only(patch: pytest.MonkeyPatch) -> None:
    """Let the prefix cache find full blocks only."""
    patch.setattr(PrefixTree, "add_partial", lambda *_: None)
    patch.setattr(PrefixTree, "nearest", lambda *_: (None, 0))
