"""Checks of single values that callers pass: numbers that float32 holds, integers, token ids, texts.

Each returns a plain Python value, or raises TypeError or ValueError with the name, the value and what is
expected. In a list of rows such an error may stand in place of the row that has it.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

MAX_TEXTS = {"stop": 1000, "bad_words": 5000}  # strings
MAX_CHARS = {"stop": 2**16, "bad_words": 2**18}  # of all strings together
TINY, HUGE = float(np.finfo(np.float32).smallest_subnormal), float(np.finfo(np.float32).max)
NUMBERS = (int, float, np.integer, np.floating)
_Value = TypeVar("_Value")
BadRow: TypeAlias = "TypeError | ValueError"


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


def pack_token_ids(token_ids: Sequence[int], vocab_size: int, where: str, ordered: bool = True) -> array[int]:
    """Return the ids as int32; an array of them as it is. ValueError if one is not in the vocabulary, with
    its position if the ids are `ordered`."""
    try:
        ids = token_ids if isinstance(token_ids, array) else _packed(token_ids)
        known = not token_ids or np.frombuffer(ids, np.uint32).max() < vocab_size  # negative: above 2**31
    except struct.error:  # an id does not fit into int32
        ids, known = array("i"), False
    if not known:
        position, bad = next((i, id_) for i, id_ in enumerate(token_ids) if not 0 <= id_ < vocab_size)
        at = f" at position {position}" if ordered else ""
        raise ValueError(
            f"{where}: token id {show(bad)}{at} is outside the vocabulary (0 to {vocab_size - 1})"
        )
    return ids


def _packed(ids: Sequence[int]) -> array[int]:
    """The ids as int32; struct.error if one does not fit. Three times as fast as np.array or array alone."""
    return array("i", struct.pack(f"={len(ids)}i", *ids))


def packed_ints(ids: list[Any]) -> array[int] | None:
    """The ids as int32; None unless all are of the type int and fit. Looks at no single id: packing
    refuses what is no integer, an integer of another library makes the sum one, and True and False pack to 1
    and 0."""
    try:
        packed = _packed(ids)
        if type(sum(ids)) is not int:
            return None
    except (struct.error, TypeError):
        return None
    has_bool = np.frombuffer(packed, np.int32).min() <= 1 and bool in set(map(type, ids))
    return None if has_bool else packed


def attempt(check: Callable[..., _Value], *args: Any) -> _Value | BadRow:
    """Return `check(*args)`, or the TypeError or ValueError that it raises. Values that are nested too deeply
    for Python to read or print give an error too."""
    try:
        return check(*args)
    except RecursionError:
        return ValueError("it is nested too deeply")
    except (TypeError, ValueError) as error:
        return error.with_traceback(None)  # a traceback would keep the row's values alive


def raise_first(rows: Iterable[object]) -> None:
    for row in rows:
        if isinstance(row, Exception):
            raise row


def check_on_error(on_error: object) -> None:
    """Raise ValueError unless `on_error` is "raise" or "return"."""
    if on_error not in ("raise", "return"):
        raise ValueError(f"on_error must be 'raise' or 'return', not {on_error!r}")
