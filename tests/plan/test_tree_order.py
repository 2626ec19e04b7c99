"""The order of a list's prompts: branches together, all else in place, in little memory."""

from __future__ import annotations

import tracemalloc
from array import array
from collections import defaultdict
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm.order import tree
from nanovllm.order.tree import WIDTH, by_prefix, tree_order


def in_branches(prompts: list[array[int]]) -> list[int]:
    """As `tree_order`, by comparing all tokens."""
    order = list(range(len(prompts)))

    def walk(places: list[int], depth: int) -> None:
        branches = defaultdict(list)
        places = [place for place in places if len(prompts[order[place]]) >= depth + WIDTH]
        for place in places:
            branches[prompts[order[place]][depth : depth + WIDTH].tobytes()].append(order[place])
        rest = iter(places)
        of_branches = [[(next(rest), row) for row in rows] for rows in branches.values()]
        for branch in of_branches:
            for place, row in branch:
                order[place] = row
        for branch in of_branches:
            if len(branch) > 1:
                walk([place for place, _ in branch], depth + WIDTH)

    walk(order.copy(), 0)
    return order


class Asked(NamedTuple):
    number: int
    prompt_token_ids: array[int]


def requests_of(prompts: list[array[int]]) -> list[Asked]:
    return [Asked(number, prompt) for number, prompt in enumerate(prompts)]


PARTS = st.lists(st.sampled_from([0, 1, 2]), max_size=4)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(PARTS, st.integers(0, WIDTH - 1)), max_size=40))
def test_branches_are_together_and_all_else_in_place(shapes: list[tuple[list[int], int]]) -> None:
    prompts = [array("i", np.repeat(parts, WIDTH).tolist() + [7] * more) for parts, more in shapes]
    flat = np.array([token for prompt in prompts for token in prompt], np.int32)
    order = tree_order(flat, np.cumsum([0, *map(len, prompts)]))
    assert order.dtype == np.int32 and order.tolist() == in_branches(prompts)
    assert [each.number for each in by_prefix(requests_of(prompts))] == order.tolist()


def test_one_differing_token_is_another_branch() -> None:
    """Whichever of the window it is."""
    for place in range(WIDTH):
        prompts = [array("i", [5] * WIDTH + [row]) for row in range(4)]
        prompts[1][place] = prompts[3][place] = 6
        assert [each.number for each in by_prefix(requests_of(prompts))] == [0, 2, 1, 3]


@pytest.mark.parametrize("shared", [0, 70])
def test_memory(shared: int) -> None:
    """At most 60 bytes a prompt beside the tokens, and what is copied at once."""
    count, length = 200_000, 100
    rows = np.random.default_rng(0).integers(0, 150_000, (count, length), np.int32)
    rows[:, :shared] = rows[np.arange(count) % 3, :shared]
    flat, offsets = rows.reshape(-1), np.arange(count + 1, dtype=np.int64) * length
    tracemalloc.start()
    order = tree_order(flat, offsets)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    expected = np.arange(count) if not shared else np.concatenate([np.arange(n, count, 3) for n in range(3)])
    assert order.tolist() == expected.tolist()
    assert most <= 60 * count + 6 * 2**20


def test_many_tokens_are_ordered_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer prompt than a portion is one of its own."""
    monkeypatch.setattr(tree, "MOST_TOKENS", 5 * WIDTH)
    prompts = [
        array("i", [kind] * WIDTH * many)
        for kind, many in [(1, 1), (2, 1), (1, 1), (3, 9), (2, 2), (1, 1), (2, 1)]
    ]
    found = [each.number for each in by_prefix(requests_of(prompts))]
    assert found == [0, 2, 1, 3, 4, 6, 5] and by_prefix(requests_of([])) == []
