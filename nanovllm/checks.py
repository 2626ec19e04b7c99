"""Checks of single values that callers pass: numbers that float32 holds, integers, token ids, texts.

Each returns a plain Python value, or raises TypeError or ValueError with the name, the value and what is
expected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

MAX_TEXTS = {"stop": 1000, "bad_words": 5000}  # strings
MAX_CHARS = {"stop": 2**16, "bad_words": 2**18}  # of all strings together
TINY, HUGE = float(np.finfo(np.float32).smallest_subnormal), float(np.finfo(np.float32).max)
NUMBERS = (int, float, np.integer, np.floating)


def check_float(name: str, value: Any, expected: str) -> float:
    """`value` as a float that fits into float32, the dtype of sampling."""
    if type(value) is float and (value == 0 or TINY <= value <= HUGE):
        return value
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, NUMBERS):
        raise TypeError(f"{name} must be a number, {expected}, not {show(value)}")
    with np.errstate(over="ignore", under="ignore"):
        try:
            number = float(value)
        except OverflowError:  # an integer
            number = float("inf")
        narrow = np.float32(number)
    if not np.isfinite(narrow):
        raise wrong(name, value, f"{expected}, and finite in float32: at most {HUGE:.3g}")
    if value != 0 and narrow == 0:
        raise wrong(name, value, f"{expected}, and not 0 in float32: at least {TINY:.2g}")
    return number


def check_int(name: str, value: Any, least: float, expected: str, most: float = math.inf) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be {expected}, not {show(value)}")
    if not least <= int(value) <= most:
        raise wrong(name, value, expected)
    return int(value)


def check_token_ids(name: str, value: Any) -> list[int]:
    if value is None:
        return []
    if not isinstance(value, list) and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, set, frozenset)):
        raise TypeError(f"{name} must be a list of token ids, not {show(value)}")
    if set(map(type, value)) == {int} and min(value) >= 0:
        return list(value)
    return [check_int(name, token_id, 0, "a list of token ids, integers of at least 0") for token_id in value]


def check_texts(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    expected = "a string or a list of strings, none of them empty"
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{name} must be {expected}, not {show(value)}")
    if len(texts) > MAX_TEXTS[name]:
        raise ValueError(f"{name} has {len(texts):,} strings, and may have {MAX_TEXTS[name]:,}; pass fewer")
    size = sum(map(len, texts))
    if size > MAX_CHARS[name]:
        raise ValueError(f"{name} has {size:,} characters, and may have {MAX_CHARS[name]:,}; pass less")
    if not all(texts):
        raise wrong(name, value, expected)
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise wrong(name, text, f"{expected}, without lone surrogates") from None
    return list(texts)


def wrong(name: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{name} must be {expected}, not {show(value)}")


def check_bool(name: str, value: object) -> None:
    """Raise TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {show(value)}")


def show(value: object) -> str:
    """The beginning of `value`, for an error message."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer with more digits than Python prints, or deep nesting
        text = "a value too long to print"
    return text if len(text) <= 60 else f"{text[:57]}..."
