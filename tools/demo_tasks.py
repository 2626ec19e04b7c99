"""The tasks of the demo model: small random problems, each with exactly one correct answer as text.

Owns the prompts, the answers, the split into training and held-out problems, and the score. Answers show
their steps (one column, letter or count at a time), so a model with a few million parameters can solve every
task. Words whose letters matter are in capitals: the demo tokenizer encodes each capital letter, like each
digit, as one token. Pure Python; knows nothing of models or tokenizers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from string import ascii_uppercase

HELD_OUT_ONE_IN = 16
VOWELS = "AEIOU"
CONSONANTS = "BCDFGHJKLMNPQRSTVWXYZ"
ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
]
ONES += ["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


@dataclass(frozen=True)
class Example:
    """A question and its only correct answer; `task` names the kind of problem."""

    task: str
    prompt: str
    answer: str


@dataclass(frozen=True)
class Problem:
    """A problem and its possible wordings. `key` is the same for all wordings, so the split keeps them
    together.
    """

    key: tuple[object, ...]
    wordings: tuple[str, ...]
    answer: str


def _number(rng: Random, max_digits: int) -> int:
    """A random number; each number of digits is equally likely."""
    digits = rng.randint(1, max_digits)
    return rng.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)


def _word(rng: Random, shortest: int, longest: int) -> str:
    """A random word in capitals: consonants and vowels in turn, any letters, or three to five letters that
    repeat.
    """
    length = rng.randint(shortest, longest)
    kind = rng.randrange(3)
    if kind == 0:
        start = rng.randrange(2)
        return "".join(rng.choice((CONSONANTS, VOWELS)[(start + i) % 2]) for i in range(length))
    letters = ascii_uppercase if kind == 1 else rng.sample(ascii_uppercase, rng.randint(3, 5))
    return "".join(rng.choice(letters) for _ in range(length))


def _join(items: Sequence[object]) -> str:
    return " ".join(map(str, items))


def add(rng: Random) -> Problem:
    """One line for each column, from the right: `digit+digit+carry=sum`. The first digit of the sum is the
    next carry.
    """
    a, b = _number(rng, 6), _number(rng, 6)
    width = max(len(str(a)), len(str(b)))
    lines, carry = [f"{a:0{width}}+{b:0{width}}"], 0
    for x, y in zip(reversed(f"{a:0{width}}"), reversed(f"{b:0{width}}"), strict=True):
        total = int(x) + int(y) + carry
        lines.append(f"{x}+{y}+{carry}={total:02}")
        carry = total // 10
    lines.append(f"Answer: {a + b}")
    return Problem((a, b), (f"Add {a} and {b}.", f"What is {a} + {b}?"), "\n".join(lines))


def subtract(rng: Random) -> Problem:
    """One line for each column, from the right: `top-bottom-borrow=digit`. A 1 before the top digit marks a
    borrow.
    """
    a = _number(rng, 6)
    b = rng.randint(0, a) if rng.random() < 0.5 else min(a, _number(rng, 6))
    if rng.random() < 0.25:
        b = max(0, a - _number(rng, 3))  # close numbers: the result has leading zeros to strip
    width = len(str(a))
    lines, borrow, digits = [f"{a}-{b:0{width}}"], 0, ""
    for x, y in zip(reversed(str(a)), reversed(f"{b:0{width}}"), strict=True):
        borrows = int(int(x) - int(y) - borrow < 0)
        digit = 10 * borrows + int(x) - int(y) - borrow
        lines.append(f"{borrows}{x}-{y}-{borrow}={digit}")
        digits, borrow = f"{digit}{digits}", borrows
    lines += [digits, f"Answer: {a - b}"]
    return Problem((a, b), (f"Subtract {b} from {a}.", f"What is {a} - {b}?"), "\n".join(lines))


def multiply(rng: Random) -> Problem:
    """One line for each column, from the right: `digit*factor+carry=product`."""
    a, b = _number(rng, 6), rng.randint(2, 9)
    lines, carry = [f"{a}*{b}"], 0
    for x in reversed(str(a)):
        total = int(x) * b + carry
        lines.append(f"{x}*{b}+{carry}={total:02}")
        carry = total // 10
    lines.append(f"Answer: {a * b}")
    return Problem((a, b), (f"Multiply {a} by {b}.", f"What is {a} times {b}?"), "\n".join(lines))


def digit_sum(rng: Random) -> Problem:
    """One line for each digit, with the running total."""
    digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(2, 9)))
    lines = [f"+{digit}={sum(map(int, digits[: i + 1]))}" for i, digit in enumerate(digits)]
    lines.append(f"Answer: {sum(map(int, digits))}")
    return Problem((digits,), (f"Add up the digits of {digits}.",), "\n".join(lines))


def sort_numbers(rng: Random) -> Problem:
    """Two-digit numbers: one line for each first digit, then all numbers in order."""
    numbers = rng.sample(range(10, 100), rng.randint(3, 9))
    ordered = sorted(numbers)
    lines = []
    for tens in sorted({number // 10 for number in numbers}):
        lines.append(f"{tens}: {_join([number for number in ordered if number // 10 == tens])}")
    lines.append(f"Answer: {_join(ordered)}")
    wordings = (f"Sort these numbers: {_join(numbers)}.", f"Put these numbers in order: {_join(numbers)}.")
    return Problem(tuple(numbers), wordings, "\n".join(lines))


def sort_letters(rng: Random) -> Problem:
    letters = "".join(rng.sample(ascii_uppercase, rng.randint(2, 10)))
    wordings = (f"Sort the letters {letters}.", f"Put the letters {letters} in alphabetical order.")
    return Problem((letters,), wordings, "".join(sorted(letters)))


def extreme(rng: Random) -> Problem:
    numbers, largest = rng.sample(range(10, 100), rng.randint(2, 8)), rng.random() < 0.5
    prompt = f"Which of these numbers is the {'largest' if largest else 'smallest'}: {_join(numbers)}?"
    return Problem((largest, *numbers), (prompt,), str(max(numbers) if largest else min(numbers)))


def count_by(rng: Random) -> Problem:
    start, step, count = rng.randint(0, 99), rng.randint(1, 12), rng.randint(2, 25)
    numbers = [start + step * i for i in range(count)]
    if rng.random() < 0.5:
        end = numbers[-1] + rng.randrange(step)
        return Problem(
            (start, end, step), (f"Count from {start} to {end} in steps of {step}.",), _join(numbers)
        )
    numbers.reverse()
    end = max(0, start - rng.randrange(step))
    prompt = f"Count down from {numbers[0]} to {end} in steps of {step}."
    return Problem((numbers[0], end, step), (prompt,), _join(numbers))


def primes(rng: Random) -> Problem:
    low, high = 2, rng.randint(10, 200)
    wording = f"List the primes up to {high}."
    if rng.random() < 0.75:
        low = rng.randint(2, 180)
        high = rng.randint(low + 14, 200)  # below 200 the longest gap between primes is 14
        wording = f"List the primes from {low} to {high}."
    found = [n for n in range(low, high + 1) if all(n % d for d in range(2, int(n**0.5) + 1))]
    return Problem((low, high), (wording,), _join(found))


def times_table(rng: Random) -> Problem:
    number, last = rng.randint(2, 40), rng.randint(2, 12)
    rows = "\n".join(f"{i} x {number} = {i * number}" for i in range(1, last + 1))
    return Problem((number, last), (f"Write the times table of {number} up to {last}.",), rows)


def number_words(rng: Random) -> Problem:
    number = _number(rng, 4)
    words, rest = [], number
    for size, name in ((1000, "thousand"), (100, "hundred")):
        if rest >= size:
            words += [ONES[rest // size], name]
        rest %= size
    if rest >= 20:
        words.append(TENS[rest // 10] + (f" {ONES[rest % 10]}" if rest % 10 else ""))
    elif rest or not words:
        words.append(ONES[rest])
    return Problem((number,), (f"Write {number} in words.",), " ".join(words))


def repeat(rng: Random) -> Problem:
    word, times = _word(rng, 2, 7), rng.randint(2, 15)
    lines = "\n".join(f"{i} {word}" for i in range(1, times + 1))
    return Problem((word, times), (f"Write {word} {times} times.",), lines)


def alphabet(rng: Random) -> Problem:
    first, last = rng.sample(range(26), 2)
    step = 1 if first < last else -1
    letters = [ascii_uppercase[i] for i in range(first, last + step, step)]
    return Problem((first, last), (f"List the letters from {letters[0]} to {letters[-1]}.",), _join(letters))


def spell(rng: Random) -> Problem:
    word = _word(rng, 3, 10)
    return Problem((word,), (f"Spell {word}.", f"Spell the word {word}."), "-".join(word))


def capitals(rng: Random) -> Problem:
    """The only task with lowercase words: the tokenizer merges their letters, so the model must know each
    token's letters.
    """
    start = rng.randrange(2)
    word = "".join(rng.choice((CONSONANTS, VOWELS)[(start + i) % 2]) for i in range(rng.randint(3, 9)))
    return Problem((word,), (f"Write {word.lower()} in capital letters.",), word)


def parity(rng: Random) -> Problem:
    number = _number(rng, 8)
    return Problem((number,), (f"Is {number} even or odd?",), "odd" if number % 2 else "even")


def count_letter(rng: Random) -> Problem:
    """Each letter of the word with the count so far."""
    word = _word(rng, 3, 10)
    letter = rng.choice(word) if rng.random() < 0.85 else rng.choice(ascii_uppercase)
    counts = _join([f"{c}{word[: i + 1].count(letter)}" for i, c in enumerate(word)])
    wordings = (f"How many times does {letter} appear in {word}?", f"Count the letter {letter} in {word}.")
    return Problem((letter, word), wordings, f"{counts}\nAnswer: {word.count(letter)}")


def unique_letters(rng: Random) -> Problem:
    """Each letter with + if it is new and - if not, then the new letters."""
    word = _word(rng, 3, 10)
    marks = _join([f"{c}{'-' if c in word[:i] else '+'}" for i, c in enumerate(word)])
    prompt = f"Remove the repeated letters from {word}."
    return Problem((word,), (prompt,), f"{marks}\nAnswer: {''.join(dict.fromkeys(word))}")


def reverse(rng: Random) -> Problem:
    """The letters with their numbers, the same in reverse order, then the letters alone."""
    word = _word(rng, 2, 9)
    numbered = [f"{i}{c}" for i, c in enumerate(word, 1)]
    lines = (_join(numbered), _join(numbered[::-1]), f"Answer: {word[::-1]}")
    return Problem((word,), (f"Reverse the word {word}.", f"Write {word} backwards."), "\n".join(lines))


# The weight is a task's share of the training examples. Long and hard tasks have more.
TASKS: dict[str, tuple[Callable[[Random], Problem], float]] = {
    "add": (add, 3),
    "subtract": (subtract, 3),
    "multiply": (multiply, 2),
    "digit_sum": (digit_sum, 1),
    "sort_numbers": (sort_numbers, 3),
    "sort_letters": (sort_letters, 2),
    "extreme": (extreme, 3),
    "count_by": (count_by, 2),
    "primes": (primes, 1),
    "times_table": (times_table, 1),
    "number_words": (number_words, 1),
    "repeat": (repeat, 1),
    "alphabet": (alphabet, 1),
    "spell": (spell, 1),
    "capitals": (capitals, 2),
    "parity": (parity, 1),
    "count_letter": (count_letter, 1.5),
    "unique_letters": (unique_letters, 1.5),
    "reverse": (reverse, 1.5),
}
_NAMES = list(TASKS)
_WEIGHTS = [weight for _, weight in TASKS.values()]


def is_held_out(task: str, key: tuple[object, ...]) -> bool:
    """Whether a problem is held out for evaluation: one in 16, by a hash that is equal on every machine."""
    return zlib.crc32(repr((task, key)).encode()) % HELD_OUT_ONE_IN == 0


def make_example(rng: Random, split: str = "train", task: str | None = None) -> Example:
    """One example of `split` ("train" or "test", which have no problem in common), of `task` or of a random
    task by weight.

    Raises ValueError for an unknown split or task.
    """
    if split not in ("train", "test"):
        raise ValueError(f'split must be "train" or "test", not {split!r}')
    if task is not None and task not in TASKS:
        raise ValueError(f"unknown task {task!r}; the tasks are {', '.join(TASKS)}")
    name = rng.choices(_NAMES, _WEIGHTS)[0] if task is None else task
    while True:
        problem = TASKS[name][0](rng)
        if is_held_out(name, problem.key) == (split == "test"):
            return Example(name, rng.choice(problem.wordings), problem.answer)


def heldout(n: int, seed: int) -> list[Example]:
    """`n` different held-out examples; all tasks are equally frequent unless one has too few held-out
    problems.

    Deterministic in `seed`. Raises ValueError if `n` is negative.
    """
    if n < 0:
        raise ValueError(f"n must not be negative, not {n}")
    rng = Random(seed)
    found: dict[str, Example] = {}
    while len(found) < n:
        example = make_example(rng, "test", rng.choice(_NAMES))
        found.setdefault(example.prompt, example)
    return list(found.values())


def score(examples: Sequence[Example], answers: Sequence[str]) -> dict[str, float]:
    """The share of exactly correct answers: "overall" first, then for each task that occurs.

    Raises ValueError if the lengths differ or both are 0.
    """
    if len(examples) != len(answers) or not examples:
        raise ValueError(
            f"need as many answers as examples and at least one: {len(examples)} and {len(answers)}"
        )
    by_task: dict[str, list[bool]] = {"overall": []}
    for example, answer in zip(examples, answers, strict=True):
        right = answer == example.answer
        by_task["overall"].append(right)
        by_task.setdefault(example.task, []).append(right)
    return {task: sum(right) / len(right) for task, right in by_task.items()}
