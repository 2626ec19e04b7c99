"""What drafts are made of, without a model: the settings, the places of runs, both methods, the budget."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.config import Config
from nanovllm.drafts.budget import Budget, Trust
from nanovllm.drafts.places import MOST_TOKENS, Answers, Places
from nanovllm.drafts.proposer import Draft, Proposer, make_proposer
from nanovllm.drafts.settings import DraftSettings

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
TOKENS = st.lists(st.integers(0, 3), max_size=40)


def ids(tokens: list[int]) -> array[int]:
    return array("i", tokens)


def text_of(tokens: list[int], proposer: Proposer) -> Places:
    places = Places(proposer.width)
    places.extend(ids(tokens))
    return places


# -- settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "least", "most"),
    [
        ({}, 5, 5),
        ({"prompt_lookup_max": 3}, 3, 3),
        ({"prompt_lookup_min": 2}, 2, 2),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, 2, 4),
    ],
)
def test_one_length_of_ngrams_stands_for_both(given: dict[str, int], least: int, most: int) -> None:
    settings = DraftSettings.of(NGRAM | given)
    assert (settings.prompt_lookup_min, settings.prompt_lookup_max) == (least, most)


def test_defaults_are_those_of_vllm() -> None:
    settings = DraftSettings.of({"method": "suffix"})
    assert settings.num_speculative_tokens == settings.suffix_decoding_max_tree_depth == 24
    assert settings.suffix_decoding_max_cached_requests == 10_000
    assert settings.suffix_decoding_max_spec_factor == 1.0
    assert settings.suffix_decoding_min_token_prob == 0.1
    assert DraftSettings.of({"model": "[ngram]", "num_speculative_tokens": 3}).method == "ngram"
    neutral = {"draft_tensor_parallel_size": 1, "rejection_sample_method": "standard", "quantization": None}
    assert DraftSettings.of(NGRAM | neutral) == DraftSettings.of(NGRAM)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"method": "eagle", "model": "a/b", "num_speculative_tokens": 2}, ValueError, "model='a/b'"),
        *(
            ({"method": method, "num_speculative_tokens": 2}, ValueError, f"not '{method}'; no second model")
            for method in ("eagle", "eagle3", "mtp", "draft_model", "medusa", "mlp_speculator", "ngram_gpu")
        ),
        ({"num_speculative_tokens": 2}, ValueError, "method must be 'ngram' or 'suffix'"),
        ({"method": "ngram"}, ValueError, "needs num_speculative_tokens, such as 4"),
        (
            NGRAM | {"num_speculative_tokens": 0},
            ValueError,
            "num_speculative_tokens must be an integer of at",
        ),
        (NGRAM | {"num_speculative_tokens": 2.5}, TypeError, "num_speculative_tokens must be an integer"),
        (
            NGRAM | {"prompt_lookup_min": 4, "prompt_lookup_max": 3},
            ValueError,
            "prompt_lookup_min=4 is above",
        ),
        (NGRAM | {"prompt_lookup_max": 0}, ValueError, "prompt_lookup_max must be"),
        (NGRAM | {"prompt_lookup": 3}, TypeError, "unknown key 'prompt_lookup'; did you mean 'prompt_lookup"),
        (NGRAM | {"suffix_decoding_max_spec_factor": 2.0}, ValueError, "does nothing with method='ngram'"),
        (NGRAM | {"parallel_drafting": True}, ValueError, "parallel_drafting=True is not supported"),
        (NGRAM | {"draft_tensor_parallel_size": 2}, ValueError, "draft_tensor_parallel_size=2 is not"),
        (NGRAM | {"disable_by_batch_size": 16}, ValueError, "disable_by_batch_size=16 is not supported"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 1}, ValueError, "must be at least 2"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, ValueError, "in \\[0, 1\\], not 1.5"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 0}, ValueError, "a positive number, not 0"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": -1}, ValueError, "of at least 0"),
        ({"method": "suffix", "prompt_lookup_max": 3}, ValueError, "does nothing with method='suffix'"),
        ("ngram", TypeError, "must be a dictionary such as"),
        (True, TypeError, "must be a dictionary such as"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(given: Any, error: type[Exception], says: str) -> None:
    for make in (DraftSettings.of, lambda given: Config.from_kwargs("model", speculative_config=given)):
        with pytest.raises(error, match=says):
            make(given)


def test_nothing_asks_for_nothing() -> None:
    for nothing in (None, {}):
        assert Config.from_kwargs("model", speculative_config=nothing).speculative_config is None


# -- places -------------------------------------------------------------------------------------------------


@given(st.lists(TOKENS, max_size=4), st.integers(1, 4))
def test_places_are_those_of_a_search(parts: list[list[int]], width: int) -> None:
    places, whole = Places(width), [token for part in parts for token in part]
    for part in parts:
        places.extend(ids(part))
    last = len(whole) - 1
    expected = [
        place
        for place in range(last - 1, width - 2, -1)
        if len(whole) >= width and whole[place - width + 1 : place + 1] == whole[last - width + 1 :]
    ]
    assert places.earlier(100) == expected
    assert places.earlier(2) == expected[:2]
    for place in expected:
        count = next(
            (n for n in range(place + 1) if whole[place - n] != whole[last - n]),
            place + 1,
        )
        assert places.matched(place, places.ids, 100) == count >= width
        assert places.matched(place, places.ids, 2) == min(count, 2)


def test_old_answers_are_forgotten() -> None:
    answers, text = Answers(2, 4), Places(2)
    for number in range(9):
        answers.add(ids([number, number, 50 + number]))
        assert len(answers.ids) <= 4 * 4
        text.extend(ids([number, number]))
        assert len(answers.of(text, 9)) == 1
    text.extend(ids([1, 1]))
    assert answers.of(text, 9) == []
    few = Answers(2, 0)
    few.add(ids([1, 1, 1]))
    assert few.of(text, 9) == []
    large = Answers(2, 10**6)
    for number in range(5):
        large.add(ids([number] * (MOST_TOKENS // 3)))
        assert len(large.ids) <= MOST_TOKENS + 1


# -- methods ------------------------------------------------------------------------------------------------


def drafted(method: dict[str, Any], tokens: list[int], most: int = 4) -> list[int]:
    proposer = make_proposer(DraftSettings.of(method))
    return proposer.draft(text_of(tokens, proposer), most).token_ids


def test_ngrams() -> None:
    method = NGRAM | {"prompt_lookup_min": 2, "prompt_lookup_max": 3}
    assert drafted(method, [1, 2, 3, 4, 5, 6, 2, 3]) == [4, 5, 6, 2]
    assert drafted(method, [1, 2, 3, 4, 5, 9, 2, 3, 7, 8, 1, 2, 3]) == [4, 5, 9, 2]  # the longer one
    assert drafted(method, [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3]) == [5, 1, 2, 3]  # the later one
    assert drafted(method, [7, 8, 9, 7, 8, 9, 7, 8]) == [9, 7, 8, 9]  # it repeats, beyond the end
    assert drafted(method, [1, 2, 3, 4, 5, 6]) == []
    assert drafted(method, [1]) == drafted(method, []) == []


def test_suffixes_follow_the_places_that_agree() -> None:
    method = {"method": "suffix", "suffix_decoding_max_spec_factor": 4.0}
    proposer = make_proposer(DraftSettings.of(method))
    tokens = [1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 1, 2, 3, 5, 9, 1, 2]
    found = proposer.draft(text_of(tokens, proposer), 3)
    assert found == Draft([3, 5, 9], [1.0, pytest.approx(2 / 3), pytest.approx(1 / 3)])
    assert drafted(method | {"suffix_decoding_min_token_prob": 0.5}, tokens, 3) == [3, 5]
    assert len(drafted(method | {"suffix_decoding_max_spec_factor": 1.0}, tokens, 9)) == 2
    assert drafted(method, [1, 2, 3]) == []


def test_suffixes_look_into_earlier_answers() -> None:
    proposer = make_proposer(DraftSettings.of({"method": "suffix", "suffix_decoding_max_spec_factor": 3}))
    text = text_of([8, 9, 4, 5], proposer)
    assert proposer.draft(text, 6).token_ids == []
    proposer.ended(ids([3, 4, 5, 6, 7]))
    assert proposer.draft(text, 6).token_ids == [6, 7]  # and not the next answer
    proposer.ended(ids([4, 5, 1]))
    proposer.ended(ids([4, 5, 1]))
    assert proposer.draft(text, 6).token_ids == [1]


@given(TOKENS, st.integers(1, 9), st.sampled_from([NGRAM | {"prompt_lookup_min": 1}, {"method": "suffix"}]))
def test_drafts_are_tokens_of_the_text(tokens: list[int], most: int, method: dict[str, Any]) -> None:
    proposer = make_proposer(DraftSettings.of(method))
    found = proposer.draft(text_of(tokens, proposer), most)
    assert len(found.token_ids) == len(found.shares) <= most
    assert set(found.token_ids) <= set(tokens)
    assert all(0 < share <= 1 for share in found.shares)
    assert sorted(found.shares, reverse=True) == found.shares


def test_a_text_that_repeats_nothing_has_no_drafts() -> None:
    for method in (NGRAM | {"prompt_lookup_min": 1}, {"method": "suffix"}):
        assert drafted(method, [*range(500)]) == []


# -- the budget ---------------------------------------------------------------------------------------------


def run_budget(budget: Budget, gains: list[list[float]], fixed: float, steps: int = 60) -> list[int]:
    """The last choice, if a step takes the time of `fixed` rows and of its own."""
    counts: list[int] = []
    for _ in range(steps):
        counts = budget.choose(gains)
        assert all(0 <= count <= len(each) for count, each in zip(counts, gains, strict=True))
        rows = len(gains) + sum(counts)
        budget.observe(rows, (fixed + rows) / 1000)
    return counts


def test_the_budget_learns_what_a_step_costs() -> None:
    sure, doubtful = [0.95, 0.9, 0.85, 0.8], [0.3, 0.1]
    assert run_budget(Budget(64), [sure, doubtful], fixed=1000) == [4, 2]  # rows cost nothing
    assert run_budget(Budget(64), [sure, doubtful], fixed=1.5) == [2, 0]
    assert run_budget(Budget(64), [doubtful, doubtful], fixed=0) == [0, 0]  # each row costs a row
    assert run_budget(Budget(3), [sure, doubtful], fixed=1000) == [1, 0]  # there are no more rows
    assert Budget(64).choose([[0.01], []]) == [0, 0]  # never worth it


def test_rows_fill_steps_of_common_sizes() -> None:
    rng, budget = random.Random(1), Budget(600)
    for _ in range(50):
        seqs = rng.randrange(20, 300)
        gains = [sorted([rng.random() for _ in range(4)], reverse=True) for _ in range(seqs)]
        rows = seqs + sum(budget.choose(gains))
        assert rows <= 600 and rows % 4 == 0


def test_trust_follows_what_was_right() -> None:
    trust = Trust(0.5)
    for _ in range(20):
        trust.learn(4, wrong=False)
    assert trust.value > 0.95
    gains = trust.gains([1.0, 0.5])
    assert gains[0] > 0.95 > 0.5 > gains[1]
    for _ in range(40):
        trust.learn(0, wrong=True)
    assert trust.value < 0.05
