"""The demo model's tasks: an independent computation of every answer, a clean split, and a strict score.

Needs no model.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from string import ascii_uppercase

import demo_tasks
import pytest
from demo_tasks import TASKS, Example, heldout, make_example, score

NUMBER = re.compile(r"\d+")
WORD = re.compile(r"\b[A-Z]+\b")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in NUMBER.findall(text)]


def _word(prompt: str) -> str:
    """The word in capitals in a prompt. The first word of the prompt does not count: it may be a single
    capital letter.
    """
    return WORD.findall(prompt.split(" ", 1)[1])[-1]


def _final(answer: str) -> str:
    return answer.rsplit("Answer: ", 1)[1]


def _check_steps(answer: str, pattern: str) -> None:
    """Check that every step with "=" has the form of `pattern` and is correct."""
    lines = [line for line in answer.split("\n") if "=" in line]
    assert lines
    for line in lines:
        assert re.fullmatch(pattern, line), line
        left, right = line.split("=")
        assert eval(re.sub(r"\b0+(?=\d)", "", left)) == int(right), line


def _check_add(e: Example) -> None:
    _check_steps(e.answer, r"\d\+\d\+[01]=\d\d")
    assert _final(e.answer) == str(sum(_numbers(e.prompt)))


def _check_subtract(e: Example) -> None:
    _check_steps(e.answer, r"[01]\d-\d-[01]=\d")
    first, second = _numbers(e.prompt)
    assert _final(e.answer) == str(abs(first - second))
    assert (first >= second) == ("What" in e.prompt) or first == second
    assert int(e.answer.split("\n")[-2]) == abs(first - second)


def _check_multiply(e: Example) -> None:
    _check_steps(e.answer, r"\d\*\d\+\d=\d\d")
    first, second = _numbers(e.prompt)
    assert _final(e.answer) == str(first * second)


def _check_digit_sum(e: Example) -> None:
    digits = [int(digit) for digit in NUMBER.findall(e.prompt)[0]]
    assert _final(e.answer) == str(sum(digits))
    assert len(e.answer.split("\n")) == len(digits) + 1


def _check_sort_numbers(e: Example) -> None:
    assert _final(e.answer) == " ".join(map(str, sorted(_numbers(e.prompt))))
    buckets = [line.split(": ") for line in e.answer.split("\n")[:-1]]
    assert all(number[0] == tens for tens, row in buckets for number in row.split())


def _check_extreme(e: Example) -> None:
    choose = max if "largest" in e.prompt else min
    assert e.answer == str(choose(_numbers(e.prompt)))


def _check_count_by(e: Example) -> None:
    start, end, step = _numbers(e.prompt)
    numbers = range(start, end - 1, -step) if "down" in e.prompt else range(start, end + 1, step)
    assert e.answer == " ".join(map(str, numbers))


def _check_primes(e: Example) -> None:
    low, high = ([2, *_numbers(e.prompt)])[-2:]
    sieve = set(range(2, high + 1)) - {a * b for a in range(2, 101) for b in range(2, high // a + 1)}
    assert e.answer == " ".join(map(str, sorted(n for n in sieve if n >= low)))


def _check_times_table(e: Example) -> None:
    number, last = _numbers(e.prompt)
    rows = [_numbers(row) for row in e.answer.split("\n")]
    assert rows == [[i, number, i * number] for i in range(1, last + 1)]


def _check_number_words(e: Example) -> None:
    small = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
    small += " sixteen seventeen eighteen nineteen"
    tens = "twenty thirty forty fifty sixty seventy eighty ninety"
    values = {name: i for i, name in enumerate(small.split())}
    values |= {name: 20 + 10 * i for i, name in enumerate(tens.split())}
    total = 0
    for word in e.answer.split():
        total += values.get(word, 0)
        if word == "thousand":
            total *= 1000
        elif word == "hundred":
            total = total // 1000 * 1000 + total % 1000 * 100
    assert [total] == _numbers(e.prompt)


def _check_repeat(e: Example) -> None:
    times = _numbers(e.prompt)[0]
    assert e.answer.split() == [x for i in range(times) for x in (str(i + 1), _word(e.prompt))]


def _check_alphabet(e: Example) -> None:
    first, last = (ascii_uppercase.index(letter) for letter in re.findall(r"\b[A-Z]\b", e.prompt))
    line = ascii_uppercase[min(first, last) : max(first, last) + 1]
    assert e.answer.replace(" ", "") == (line if first < last else line[::-1])


def _check_count_letter(e: Example) -> None:
    letter, word = WORD.findall(e.prompt)
    assert _final(e.answer) == str(word.count(letter))
    assert e.answer.split("\n")[0].split()[-1] == f"{word[-1]}{word.count(letter)}"


def _check_reverse(e: Example) -> None:
    word = _word(e.prompt)
    rising, falling, final = e.answer.split("\n")
    assert NUMBER.sub("", rising).replace(" ", "") == word
    assert _numbers(rising) == list(range(1, len(word) + 1)) == _numbers(falling)[::-1]
    assert _final(final) == "".join(reversed(word)) == NUMBER.sub("", falling).replace(" ", "")


def _check_unique(e: Example) -> None:
    word = _word(e.prompt)
    assert _final(e.answer) == "".join(sorted(set(word), key=word.index))
    assert e.answer.count("-") == len(word) - len(set(word))


def _equals(right: Callable[[str], str]) -> Callable[[Example], None]:
    def check(e: Example) -> None:
        assert e.answer == right(e.prompt)

    return check


CHECKS: dict[str, Callable[[Example], None]] = {
    "add": _check_add,
    "subtract": _check_subtract,
    "multiply": _check_multiply,
    "digit_sum": _check_digit_sum,
    "sort_numbers": _check_sort_numbers,
    "sort_letters": _equals(lambda prompt: "".join(sorted(_word(prompt)))),
    "extreme": _check_extreme,
    "count_by": _check_count_by,
    "primes": _check_primes,
    "times_table": _check_times_table,
    "number_words": _check_number_words,
    "repeat": _check_repeat,
    "alphabet": _check_alphabet,
    "spell": _equals(lambda prompt: "-".join(_word(prompt))),
    "capitals": _equals(lambda prompt: prompt.split()[1].upper()),
    "parity": _equals(lambda prompt: "odd" if prompt.split()[1][-1] in "13579" else "even"),
    "count_letter": _check_count_letter,
    "unique_letters": _check_unique,
    "reverse": _check_reverse,
}


@pytest.mark.parametrize("task", TASKS)
def test_every_answer_is_right(task: str) -> None:
    rng = Random(11)
    for i in range(400):
        CHECKS[task](make_example(rng, "test" if i % 4 == 0 else "train", task))


def test_the_same_seed_gives_the_same_examples_in_another_process() -> None:
    """Neither the examples nor the split depend on Python's hash seed, which differs between processes."""
    code = "from demo_tasks import heldout; print([e.prompt for e in heldout(30, 5)], end='')"
    folder = Path(demo_tasks.__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    assert done.stdout == str([example.prompt for example in heldout(30, 5)])
    assert heldout(30, 5) != heldout(30, 6)
    rngs = Random(3), Random(3)
    assert [make_example(rngs[0]) for _ in range(50)] == [make_example(rngs[1]) for _ in range(50)]


def test_held_out_problems_are_never_trained_on() -> None:
    tested = {example.prompt for example in heldout(3000, 1)}
    assert len(tested) == 3000
    rng = Random(2)
    assert tested.isdisjoint(make_example(rng).prompt for _ in range(30000))


def test_another_wording_does_not_leak_a_problem() -> None:
    """If "Add a and b." is held out, "What is a + b?" is too."""
    rng = Random(4)
    tested = {tuple(_numbers(make_example(rng, "test", "add").prompt)) for _ in range(500)}
    assert tested.isdisjoint(tuple(_numbers(make_example(rng, "train", "add").prompt)) for _ in range(5000))


def test_the_held_out_set_has_every_task_and_answers_of_many_lengths() -> None:
    examples = heldout(1000, 0)
    assert {example.task for example in examples} == set(TASKS)
    lengths = sorted(len(example.answer) for example in examples)
    assert lengths[100] <= 6
    assert lengths[-100] >= 70
    assert len(set(lengths)) > 60


def test_score_counts_only_exact_answers() -> None:
    rng = Random(0)
    examples = [make_example(rng, "test", task) for task in ("add", "add", "spell", "parity")]
    answers = [example.answer for example in examples]
    assert score(examples, answers) == {"overall": 1.0, "add": 1.0, "spell": 1.0, "parity": 1.0}
    answers[0] = answers[0][:-1]
    answers[2] += " "
    assert score(examples, answers) == {"overall": 0.5, "add": 0.5, "spell": 0.0, "parity": 1.0}
    changed = replace(examples[1], answer=examples[1].answer + "0")
    assert score([changed], [examples[1].answer])["overall"] == 0.0


def test_wrong_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="train"):
        make_example(Random(0), "valid")
    with pytest.raises(ValueError, match="unknown task 'fly'"):
        make_example(Random(0), task="fly")
    with pytest.raises(ValueError, match="negative"):
        heldout(-1, 0)
    with pytest.raises(ValueError, match="2 and 1"):
        score(heldout(2, 0), ["x"])
    with pytest.raises(ValueError, match="at least one"):
        score([], [])
