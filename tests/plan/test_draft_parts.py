"""What drafts are made of, without a model: settings, places of runs, both methods, what is learned."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.config import Config
from nanovllm.drafts.places import MOST_TOKENS, Answers, Lines, Places, own_places
from nanovllm.drafts.proposer import Proposer, make_proposer
from nanovllm.drafts.settings import DraftSettings
from nanovllm.drafts.texts import Texts, learned

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
TOKENS = st.lists(st.integers(0, 3), max_size=40)


def ids(tokens: list[int]) -> array[int]:
    return array("i", tokens)


def lines_of(*texts: list[int]) -> Lines:
    """Each in two parts, as a prompt and an output."""
    return Lines.of([(ids(text[: len(text) // 2]), ids(text[len(text) // 2 :])) for text in texts])


def found_at(places: Places, text: int, start: int = 0) -> list[int]:
    """The places of a text that begins at `start`."""
    return [place - start for place in places.at[text].tolist() if place >= 0]


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


def search(whole: list[int], width: int) -> dict[int, int]:
    """The places of the last `width` tokens of a text, the latest first, and how many tokens match there."""
    last, found = len(whole) - 1, {}
    for place in range(last - 1, width - 2, -1):
        if len(whole) >= width and whole[place - width + 1 : place + 1] == whole[last - width + 1 :]:
            differ = (n for n in range(place + 1) if whole[place - n] != whole[last - n])
            found[place] = next(differ, place + 1)
    return found


@given(st.lists(TOKENS, min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 9), st.integers(1, 50))
def test_places_are_those_of_a_search(texts: list[list[int]], width: int, more: int, most: int) -> None:
    lines, start = lines_of(*texts), 0
    places = own_places(lines, width, width + more, most)
    for number, text in enumerate(texts):
        expected = [*search(text, 1 if width == 1 else 2).items()][:most]  # two tokens are looked up
        expected = [(place, min(count, width + more)) for place, count in expected if count >= width]
        assert found_at(places, number, start) == [place for place, _ in expected]
        assert [count for count in places.lengths[number].tolist() if count] == [n for _, n in expected]
        start += len(text)


def test_old_answers_are_forgotten() -> None:
    answers = Answers(4)

    def num_places(*text: int) -> int:
        return int((answers.places(lines_of([*text]), 5, 9).at >= 0).sum())

    for number in range(19):
        answers.add(ids([number, number, 50 + number]))
        found = {other for other in range(19) if num_places(other, other)}
        assert found and found <= {
            *range(number - 3, number + 1)
        }  # the newest ones are not sorted in at once
    assert num_places(17, 58) == num_places(58, 58) == num_places(17) == num_places() == 0
    answers = Answers(0)
    answers.add(ids([1, 1, 1]))
    assert num_places(1, 1) == 0
    answers = Answers(10**6)
    for number in range(5):
        answers.add(ids([number] * (MOST_TOKENS // 3)))
        assert num_places(number, number) == 9
    assert num_places(0, 0) == 0
    answers.add(ids([9] * (3 * MOST_TOKENS)))  # one that is too long
    assert num_places(9, 9) == 9


@given(st.lists(TOKENS, min_size=1, max_size=6), st.lists(TOKENS, min_size=1, max_size=3))
def test_places_in_answers_are_those_of_a_search(outputs: list[list[int]], texts: list[list[int]]) -> None:
    answers = Answers(100)
    for output in [*outputs, [9] * 300]:  # after the last one the table has all
        answers.add(ids(output))
    whole = [token for output in outputs if len(output) > 1 for token in [*output, -1]]
    places = answers.places(lines_of(*texts), 6, 10**3)
    for number, text in enumerate(texts):
        expected = {
            place: min(count, 6)
            for place in range(1, len(whole))
            if len(text) > 1 and whole[place - 1 : place + 1] == text[-2:]
            for count in [num_equal(whole[: place + 1][::-1], text[::-1])]
        }
        assert found_at(places, number) == sorted(expected, reverse=True)
        for place, count in zip(places.at[number].tolist(), places.lengths[number].tolist(), strict=True):
            assert count == expected.get(place, 0)


def num_equal(left: list[int], right: list[int]) -> int:
    """How many of the first tokens are equal."""
    return next(
        (n for n, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]),
        min(len(left), len(right)),
    )


# -- methods ------------------------------------------------------------------------------------------------


def draft(proposer: Proposer, tokens: list[int], *others: list[int]) -> tuple[list[int], list[float]]:
    """What may follow a text, looked up beside others."""
    found = proposer.draft(lines_of(*others, tokens))
    assert len(found.token_ids) == len(found.shares) == 1 + len(others)
    shares = [share for share in found.shares[-1].tolist() if share]
    return found.token_ids[-1].tolist()[: len(shares)], shares


def drafted(method: dict[str, Any], tokens: list[int]) -> list[int]:
    others = [[], [1], [5, 5, 5, 5], tokens[::-1], tokens * 3]
    found = draft(make_proposer(DraftSettings.of(method)), tokens)
    assert draft(make_proposer(DraftSettings.of(method)), tokens, *others) == found
    return found[0]


def test_ngrams() -> None:
    method = NGRAM | {"prompt_lookup_min": 2, "prompt_lookup_max": 3}
    assert drafted(method, [1, 2, 3, 4, 5, 6, 2, 3]) == [4, 5, 6, 2]
    assert drafted(method, [1, 2, 3, 4, 5, 9, 2, 3, 7, 8, 1, 2, 3]) == [4, 5, 9, 2]  # the longer one
    assert drafted(method, [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3]) == [5, 1, 2, 3]  # the later one
    assert drafted(method, [7, 8, 9, 7, 8, 9, 7, 8]) == [9, 7, 8, 9]  # it repeats, beyond the end
    assert drafted(method, [1, 2, 3, 4, 5, 6]) == []
    assert drafted(method, [1]) == drafted(method, []) == []
    assert drafted(NGRAM | {"prompt_lookup_min": 1}, [5, 6, 7, 5]) == [6, 7, 5, 6]
    assert drafted(NGRAM | {"prompt_lookup_min": 1}, [5, 5]) == [5, 5, 5, 5]


def test_suffixes_follow_the_places_that_agree() -> None:
    method = {"method": "suffix", "suffix_decoding_max_spec_factor": 4.0}
    tokens = [1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 1, 2, 3, 5, 9, 1, 2]
    found, shares = draft(make_proposer(DraftSettings.of(method)), tokens)
    assert found[:3] == [3, 5, 9]
    assert shares[:3] == [1.0, pytest.approx(2 / 3), pytest.approx(1 / 3)]
    assert drafted(method | {"suffix_decoding_min_token_prob": 0.5}, tokens) == [3, 5]
    assert drafted(method | {"num_speculative_tokens": 1}, tokens) == [3]
    assert len(drafted(method | {"suffix_decoding_max_spec_factor": 1.0}, tokens)) == 2
    assert drafted(method, [1, 2, 3]) == []


def test_suffixes_look_into_earlier_answers() -> None:
    proposer = make_proposer(DraftSettings.of({"method": "suffix", "suffix_decoding_max_spec_factor": 3}))
    text = [8, 9, 4, 5]
    assert draft(proposer, text)[0] == []
    proposer.ended(ids([3, 4, 5, 6, 7]))
    assert draft(proposer, text)[0] == [6, 7]  # and not the next answer
    proposer.ended(ids([4, 5, 1]))
    proposer.ended(ids([4, 5, 1]))
    assert draft(proposer, text)[0] == [1]


@given(
    st.lists(TOKENS, min_size=1, max_size=4),
    st.sampled_from([NGRAM | {"prompt_lookup_min": 1}, {"method": "suffix"}]),
)
def test_drafts_are_tokens_of_the_text(texts: list[list[int]], method: dict[str, Any]) -> None:
    proposer = make_proposer(DraftSettings.of(method))
    found = proposer.draft(lines_of(*texts))
    assert found.token_ids.shape == found.shares.shape == (len(texts), proposer.most)
    for text, tokens, shares in zip(texts, found.token_ids.tolist(), found.shares.tolist(), strict=True):
        assert set(tokens[: sum(share > 0 for share in shares)]) <= set(text)
        assert all(0 <= share <= 1 for share in shares)
        assert sorted(shares, reverse=True) == shares
        assert draft(proposer, text)[1] == [share for share in shares if share], "as alone"


def test_a_text_that_repeats_nothing_has_no_drafts() -> None:
    for method in (NGRAM | {"prompt_lookup_min": 1}, {"method": "suffix"}):
        assert drafted(method, [*range(500)]) == []


# -- texts --------------------------------------------------------------------------------------------------


def test_trust_follows_what_was_right() -> None:
    trust, no, yes = np.array([0.5]), np.array([False]), np.array([True])
    for _ in range(20):
        trust = learned(trust, np.array([4]), no)
    assert trust[0] > 0.95
    for _ in range(40):
        trust = learned(trust, np.array([0]), yes)
    assert trust[0] < 0.05


def seq_of(number: int, *tokens: int) -> Any:
    prompt, output = ids([*tokens[:3], 77]), ids([*tokens[3:]])  # the prompt of others is longer
    return SimpleNamespace(seq_id=number, prompt_ids=prompt, num_prompt_tokens=3, output_ids=output)


def test_texts_learn_from_drafts_that_were_not_computed() -> None:
    texts = Texts(make_proposer(DraftSettings.of(NGRAM | {"prompt_lookup_min": 1})))
    many = [seq_of(number, 1, 2, 3, 4, 1) for number in range(40)]
    most = np.full(40, 3)
    first = texts.draft(many, most)
    assert (first.token_ids[:, :3] == [2, 3, 4]).all() and not first.gains[:, 3:].any()
    assert (first.gains[:, 0] == first.gains[0, 0]).all() and first.gains[0, 1] < first.gains[0, 0]
    ids_of = [seq.seq_id for seq in many]
    drawn = np.array([[2, 3, 9] if number % 2 else [8, 0, 0] for number in range(40)])
    texts.learn(ids_of, drawn, np.where(drawn[:, 0] == 2, 3, 1))
    texts.learn(ids_of, np.full((40, 1), 5), np.ones(40, int))  # nothing was guessed since
    gains = texts.draft(many, most).gains[:, 0]
    assert (gains[1::2] > first.gains[0, 0]).all() and (gains[::2] < first.gains[0, 0]).all()
    texts.ended(many[0], "stop")
    assert texts.draft([seq_of(99, 1, 2, 3, 4, 1)], most[:1]).gains[0, 0] not in gains  # as all texts


def test_a_text_without_drafts_is_looked_at_less_often() -> None:
    texts = Texts(make_proposer(DraftSettings.of(NGRAM | {"prompt_lookup_min": 1})))
    looks = []
    for _ in range(40):  # until it repeats something
        texts.draft([seq_of(1, 5, 6, 7, 8, 9)], np.array([4]))
        looks.append(bool(texts.draft([seq_of(2, 5, 6, 7, 8, 5)], np.array([4])).gains.any()))
    assert all(looks)
    found = [bool(texts.draft([seq_of(1, 5, 6, 7, 8, 5)], np.array([4])).gains.any()) for _ in range(9)]
    assert any(found) and found == sorted(found)
