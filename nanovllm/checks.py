"""Checks of what callers pass: numbers that float32 holds, integers, token ids, texts, sampling parameters.

Each returns plain Python values, or raises TypeError or ValueError with the name, the value and what is
expected. In a list of rows such an error may stand in place of the row that has it.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, TypeAlias, TypeVar

import numpy as np

from nanovllm.batch import SAMPLING_PARAMETERS, parameter
from nanovllm.doors import EXTRAS, Table

MAX_TEXTS = {"stop": 1000, "bad_words": 5000}  # strings
MAX_CHARS = {"stop": 2**16, "bad_words": 2**18}  # of all strings together
TINY, HUGE = float(np.finfo(np.float32).smallest_subnormal), float(np.finfo(np.float32).max)
NUMBERS = (int, float, np.integer, np.floating)
SEED_LIMIT = 2**63
MAX_N = 16_384  # vLLM's
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens")
PENALTIES = {  # by their fields of `SamplingParams`
    "repetition_penalty": parameter(np.float32, 1, "above 0; 1 changes nothing", lambda value: value > 0),
    **dict.fromkeys(
        ("frequency_penalty", "presence_penalty"),
        parameter(np.float32, 0, "from -2 to 2; 0 changes nothing", lambda value: abs(value) <= 2),
    ),
}
_NUMBER_FIELDS = SAMPLING_PARAMETERS | PENALTIES
_EXTRAS: Table[Any] = Table(EXTRAS)
_EXTRA_FIELDS: dict[str, Any] = {  # with the values that ask for nothing
    **dict.fromkeys(("logprobs", "prompt_logprobs", "allowed_token_ids", "structured_outputs", "extra_args")),
    **dict.fromkeys(("thinking_token_budget", "trace_decode_token_ids")),
    **{"logit_bias": {}, "logits_processors": [], "logprob_token_ids": [], "bad_words": [], "min_tokens": 0},
}
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
        ids = token_ids if isinstance(token_ids, array) else pack_ints(token_ids)
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


def pack_ints(ids: Sequence[int]) -> array[int]:
    """The ids as int32; struct.error if one does not fit. Three times as fast as np.array or array alone."""
    return array("i", struct.pack(f"={len(ids)}i", *ids))


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


class Default(int):
    """The default of a parameter: equal to the plain number, and known as nobody's choice."""


def checked(params: _Value) -> _Value:
    """A copy of `SamplingParams` with plain values. Checks fields set since construction, too."""
    copied, values = object.__new__(type(params)), checked_params(params)
    if values["trace_decode_token_ids"] is not None:
        values |= _EXTRAS["replayed"](values)
    vars(copied).update(values)
    return copied


def checked_params(params: Any) -> dict[str, Any]:
    """All fields of `SamplingParams`, as plain Python values; lists and dictionaries are new."""
    values = dict(vars(params))
    for name, column in _NUMBER_FIELDS.items():
        given, expected = values[name], column.expected
        if column.dtype is np.float32:
            values[name] = check_float(name, given, expected)
        else:
            values[name] = check_int(name, given, -math.inf, expected)
        if not column.is_right(values[name]):
            raise wrong(name, given, expected)
    expected = f"an integer from 1 to {MAX_N}"
    values["n"] = 1 if params.n is None else check_int("n", params.n, 1, expected, MAX_N)
    if values["n"] > 1 and values["temperature"] == 0:
        fix = "they would all be equal; set a temperature above 0, or pass the prompt several times"
        raise ValueError(f"n must be 1 with temperature=0, not {values['n']}: {fix}")
    if params.max_tokens is not None and not isinstance(params.max_tokens, Default):
        least = 1 if params.prompt_logprobs is None else 0
        expected = f"an integer of at least {least}, or None for as many as fit"
        values["max_tokens"] = check_int("max_tokens", params.max_tokens, least, expected)
    if params.seed is not None:
        expected = "None or an integer from -2**63 to 2**63 - 1"
        seed = check_int("seed", params.seed, -SEED_LIMIT, expected, SEED_LIMIT - 1)
        values["seed"] = None if seed == -1 else seed  # vLLM's other name of None
    for name in _FLAGS:
        check_bool(name, values[name])
    stop_token_ids = check_token_ids("stop_token_ids", params.stop_token_ids)
    values["stop_token_ids"] = list(dict.fromkeys(stop_token_ids))
    values["stop"] = check_texts("stop", params.stop)
    if values["stop"] and not params.detokenize:
        raise ValueError(f"stop={show(params.stop)} needs detokenize=True, because it is found in the text")
    if params.repetition_detection is not None:
        values["repetition_detection"] = _EXTRAS["repetitions"].checked(params.repetition_detection)
    if has_extras(params):
        return values | _EXTRAS["params"](params, values["max_tokens"])
    return values | {name: copy(plain) for name, plain in _EXTRA_FIELDS.items()}


def has_extras(params: Any) -> bool:
    """Whether a field of `SamplingParams` asks for what few requests have: see `extras/params.py`."""
    own = [(getattr(params, name), plain) for name, plain in _EXTRA_FIELDS.items()]
    return not all(each is None or (type(each) is type(plain) and each == plain) for each, plain in own)
