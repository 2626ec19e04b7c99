"""The order of a list's prompts: branches together, all else in place, in little memory."""

from __future__ import annotations

import tracemalloc
from array import array
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import sliding_window_view

from nanovllm.order import tree
from nanovllm.order.tree import TEXT_WIDTH, WIDTH, tree_of, tree_of_list


def in_branches(prompts: list[array[int]]) -> list[int]:
    """As the order of `tree_of`, by comparing all tokens."""
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


PARTS = st.lists(st.sampled_from([0, 1, 2]), max_size=4)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(PARTS, st.integers(0, WIDTH - 1)), max_size=40))
def test_branches_are_together_and_all_else_in_place(shapes: list[tuple[list[int], int]]) -> None:
    prompts = [array("i", np.repeat(parts, WIDTH).tolist() + [7] * more) for parts, more in shapes]
    flat = np.array([token for prompt in prompts for token in prompt], np.int32)
    order = tree_of(flat, np.cumsum([0, *map(len, prompts)])).order
    assert order.dtype == np.int32 and order.tolist() == in_branches(prompts)
    assert tree_of_list(prompts).order.tolist() == order.tolist()


def test_a_branch_that_moves_takes_its_place_as_its_name() -> None:
    """Else a later branch at its old place would count as the same."""
    shapes = [[1, 0], [0, 0, 1], [0, 0, 0], [1, 1, 0]]
    prompts = [array("i", np.repeat(parts, WIDTH).tolist()) for parts in shapes]
    assert tree_of_list(prompts).order.tolist() == in_branches(prompts) == [0, 3, 1, 2]


def test_one_differing_token_is_another_branch() -> None:
    """Whichever of the window it is."""
    for place in range(WIDTH):
        prompts = [array("i", [5] * WIDTH + [row]) for row in range(4)]
        prompts[1][place] = prompts[3][place] = 6
        assert tree_of_list(prompts).order.tolist() == [0, 2, 1, 3]


@pytest.mark.parametrize("shared", [0, 70])
def test_memory(shared: int) -> None:
    """At most 60 bytes a prompt beside the tokens, and what is copied at once."""
    count, length = 200_000, 100
    rows = np.random.default_rng(0).integers(0, 150_000, (count, length), np.int32)
    rows[:, :shared] = rows[np.arange(count) % 3, :shared]
    flat, offsets = rows.reshape(-1), np.arange(count + 1, dtype=np.int64) * length
    tracemalloc.start()
    order = tree_of(flat, offsets).order
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    expected = np.arange(count) if not shared else np.concatenate([np.arange(n, count, 3) for n in range(3)])
    assert order.tolist() == expected.tolist()
    assert most <= 60 * count + 6 * 2**20


def test_a_long_beginning_takes_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that share megabytes, and part in pairs far in: a step further on compares more of them."""
    looks = 0

    def counted(*args: Any) -> Any:
        nonlocal looks
        looks += 1
        return sliding_window_view(*args)

    monkeypatch.setattr(tree, "sliding_window_view", counted)
    texts = [b"word " * 600_000 + bytes([65 + row % 2]) * 20_000 for row in range(6)]
    assert tree_of_list(texts).order.tolist() == [0, 2, 4, 1, 3, 5]
    assert looks <= 512 + 256 * 7, "in steps of the same width they are 46,875"


def test_many_tokens_are_ordered_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer prompt than a portion is one of its own."""
    monkeypatch.setattr(tree, "MOST_TOKENS", 5 * WIDTH)
    prompts = [
        array("i", [kind] * WIDTH * many)
        for kind, many in [(1, 1), (2, 1), (1, 1), (3, 9), (2, 2), (1, 1), (2, 1)]
    ]
    found = tree_of_list(prompts).order.tolist()
    assert found == [0, 2, 1, 3, 4, 6, 5] and tree_of_list([]).order.tolist() == []


def branches_of(prompts: list[array[int]], most: int) -> tuple[list[list[int]], list[list[int]]]:
    """The units of more than one prompt, and the families, of `tree_of_list`: their prompts, ascending."""
    tree = tree_of_list(prompts, most)
    assert (np.diff(tree.units) >= 0).all()
    found = []
    for labels in (tree.units, tree.families):
        members = defaultdict(list)
        for row, label in zip(tree.order.tolist(), labels.tolist(), strict=True):
            members[label].append(row)
        found.append(sorted(sorted(rows) for rows in members.values() if len(rows) > 1))
    for family, shared in enumerate(tree.shared.tolist()):
        beginnings = {prompts[row][:shared].tobytes() for row in tree.order[tree.families == family].tolist()}
        assert len(beginnings) <= 1 or not shared
    return found[0], found[1]


@pytest.mark.parametrize("portion", [tree.MOST_TOKENS, 24 * WIDTH])
def test_units_and_families(monkeypatch: pytest.MonkeyPatch, portion: int) -> None:
    """Documents of two prompts below an instruction of six: the documents are units, and the instruction is
    a family, in each portion."""
    monkeypatch.setattr(tree, "MOST_TOKENS", portion)
    prompts = [array("i", [1] * WIDTH + [10 + row % 3] * WIDTH + [row] * WIDTH) for row in range(6)]
    prompts += [array("i", [2 + row] * WIDTH) for row in range(3)]
    units, families = branches_of(prompts, 2)
    assert units == [[0, 3], [1, 4], [2, 5]]
    assert families == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]
    units, families = branches_of(prompts, 8)
    assert units == [[0, 1, 2, 3, 4, 5]] and families == [list(range(9))]


def test_texts_are_compared_by_bytes() -> None:
    shared = [letter * TEXT_WIDTH for letter in "ab"]
    texts = [f"{shared[row % 2]}{row}".encode() for row in range(6)]
    assert tree_of_list(texts).order.tolist() == [0, 2, 4, 1, 3, 5]
    assert tree_of_list([text[1:] for text in texts]).order.tolist() == list(range(6))
