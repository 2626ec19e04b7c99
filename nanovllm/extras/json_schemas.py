"""Rewrites JSON schemas into what llguidance enforces: limits that it lacks, numbers and formats that it
reads inexactly, patterns of names that lead nowhere. Compiles nothing.

What is enforced less or more strictly than the schema says is a warning, once.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import lru_cache, partial
from typing import Any

from nanovllm.extras.structured_outputs import StructuredOutputsParams

_logger = logging.getLogger("nanovllm")

# Keys of a JSON schema whose values are not schemas: dictionaries of schemas, and data.
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DATA = ("const", "enum", "default", "examples")
# The limits of an integer that llguidance can express: it reads them as float64, and fails at -2^63.
_LEAST_INTEGER, _GREATEST_INTEGER = -(2**63) + 1024, 2**63 - 1
_GREATEST_NUMBER = 2**63 - 1024  # of other numbers
_FLOAT_INTEGERS = 2**53  # up to here float64 has every integer
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")

# Dates of the calendar from the year 1 on, and times without leap seconds: what Python and pydantic read.
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_MONTHS = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_DATE = f"(?:{_YEAR}-(?:{_MONTHS}|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_HOUR}:[0-5][0-9](?:\\.[0-9]{{1,9}})?(?:[zZ]|[+-]{_HOUR})"
_FORMATS = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}[tT]{_TIME}"}
# Characters that JSON can only write as \u escapes.
_NEEDS_ESCAPES = re.compile(r"\\u00(?:0[0-7be-f]|1[0-9a-f]|7f)", re.I)


def enforceable(
    schema: dict[str, Any],
    params: StructuredOutputsParams,
    is_format: Callable[[str], bool],
    only_names: Callable[[str, Sequence[str]], list[str] | None],
) -> dict[str, Any]:
    """Return the schema with the limits that the params add to it, as llguidance enforces it.

    is_format: whether llguidance knows a format. only_names: those of the names that match a pattern, if no
    other name does; else None. ValueError names a number that llguidance cannot express.
    """
    has_big_numbers = _has_big_numbers(schema)
    schema = _mapped(schema, _express_numbers)
    if params.disable_additional_properties:
        schema = _mapped(schema, _close)
    if params.disable_big_integers and not has_big_numbers:
        schema = _mapped(schema, _limit_integers)
    schema = _mapped(schema, partial(_express_format, is_format))
    return _mapped(schema, partial(_drop_patterns, only_names))


def escapes(schema: dict[str, Any]) -> str:
    r"""The letters that may follow a backslash in JSON.

    With \u a name can be written in another way, under which llguidance takes it for an additional property.
    So strings have no \u, and no control characters but \b, \f, \n, \r and \t, unless the schema names some.
    """
    written = json.dumps(schema, ensure_ascii=False).replace("\x7f", "\\u007f")
    return 'nrbtf\\"' + "u" * (_NEEDS_ESCAPES.search(written) is not None)


@lru_cache
def warn_once(text: str) -> None:
    """Log a warning about a constraint, once for each text."""
    _logger.warning("structured_outputs, %s", text)


def strings(schema: Any) -> list[dict[str, Any]]:
    """The limits of each string in the schema that has a pattern, as schemas."""
    found: list[dict[str, Any]] = []
    kept = ("pattern", "minLength", "maxLength", "format")

    def collect(inner: dict[str, Any]) -> None:
        if isinstance(inner.get("pattern"), str):
            found.append({"type": "string"} | {name: inner[name] for name in kept if name in inner})

    _mapped(schema, collect)
    return found


def _mapped(schema: Any, change: Callable[[dict[str, Any]], None]) -> Any:
    """A copy of the schema, in which `change` has changed each schema, the inner ones first."""
    if isinstance(schema, list):
        return [_mapped(each, change) for each in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {}
    for name, each in schema.items():
        if name in _NAMED_SCHEMAS and isinstance(each, dict):
            each = {key: _mapped(value, change) for key, value in each.items()}
        elif name not in _DATA:
            each = _mapped(each, change)
        copy[name] = each
    change(copy)
    return copy


def _types(schema: dict[str, Any]) -> list[Any]:
    """The types that a schema names."""
    types = schema.get("type", [])
    return types if isinstance(types, list) else [types]


def _close(schema: dict[str, Any]) -> None:
    """Limit an object to the properties that its schema names."""
    if "additionalProperties" not in schema and ("properties" in schema or "patternProperties" in schema):
        schema["additionalProperties"] = False


# -- numbers ------------------------------------------------------------------------------------------------


def _is_integer(schema: dict[str, Any]) -> bool:
    return "integer" in _types(schema) and "number" not in _types(schema)


def _limit_integers(schema: dict[str, Any]) -> None:
    """Limit an integer to 64 bits on each side that has no limit, so that a model cannot repeat digits."""
    if not _is_integer(schema):
        return
    if not any(name in schema for name in _LOWER):
        schema["minimum"] = _LEAST_INTEGER
    if not any(name in schema for name in _UPPER):
        schema["maximum"] = _GREATEST_INTEGER


def _has_big_numbers(value: Any) -> bool:
    """Whether a JSON value has a number beyond the limits of `_limit_integers`."""
    if isinstance(value, dict):
        return any(map(_has_big_numbers, value.values()))
    if isinstance(value, list):
        return any(map(_has_big_numbers, value))
    return isinstance(value, (int, float)) and not -(2**63) <= value <= 2**63


def _express_numbers(schema: dict[str, Any]) -> None:
    """Refuse constants that llguidance would change, and move limits that it would change inwards."""
    for name in ("const", "enum"):
        if name in schema:
            schema[name] = _constant(schema[name], name, _is_integer(schema))
    given = {name: schema[name] for name in (*_LOWER, *_UPPER) if name in schema}
    for name, strict, step in ((*_LOWER, 1), (*_UPPER, -1)):
        _include_limit(schema, name, strict, step)
        value = schema.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            schema[name] = _limit(name, value, _is_integer(schema))
    kept: list[Any] = [schema.get(name) for name in ("minimum", "maximum")]
    is_empty = all(isinstance(each, (int, float)) for each in kept) and kept[0] > kept[1]
    if is_empty and given != {name: schema.get(name) for name in given}:
        limits = ", ".join(f"{name} {value}" for name, value in given.items())
        raise ValueError(f"llguidance reads numbers as float64, which has none within {limits}; use strings")


def _include_limit(schema: dict[str, Any], name: str, strict: str, step: int) -> None:
    """Write a limit that is excluded, beyond the integers of float64, as the next integer, included.

    llguidance adds 1 to it as float64, which changes nothing there.
    """
    limit, value = schema.get(strict), schema.get(name)
    if limit is True:  # as drafts up to 4 write it
        limit, value = value, None
    if not isinstance(limit, (int, float)) or isinstance(limit, bool) or abs(limit) < _FLOAT_INTEGERS:
        return
    del schema[strict]
    limits = [int(limit) + step, *([value] if isinstance(value, (int, float)) else [])]
    schema[name] = max(limits) if step > 0 else min(limits)


def _constant(value: Any, name: str, is_integer: bool) -> Any:
    """A constant of which llguidance reads each number as it is. ValueError for others."""
    if isinstance(value, list):
        return [_constant(each, name, is_integer) for each in value]
    if isinstance(value, dict):
        return {key: _constant(each, name, False) for key, each in value.items()}
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if value == 0:
        return 0  # also for -0.0, of which JSON's readers make 0 or -0.0
    if abs(value) <= _FLOAT_INTEGERS or (isinstance(value, float) and not is_integer):
        return value
    is_64_bit = _LEAST_INTEGER <= value <= _GREATEST_INTEGER
    if is_64_bit and (value == _GREATEST_INTEGER or int(float(value)) == value):
        return value
    if not is_64_bit and not is_integer and abs(value) < 10**300 and _printed(float(value)) == value:
        return value
    raise ValueError(
        f"{name} {value} cannot be enforced, because llguidance reads numbers as float64 and integers as 64 "
        "bits; use a string"
    )


def _limit(name: str, value: int | float, is_integer: bool) -> int | float:
    """The nearest limit, inwards, that llguidance reads as it is."""
    if abs(value) <= _FLOAT_INTEGERS:
        return value if value else 0
    is_lower, number = name == "minimum", int(value)
    greatest = _GREATEST_INTEGER if is_integer and not is_lower else _GREATEST_NUMBER
    if number > greatest if is_lower else number < _LEAST_INTEGER:
        raise ValueError(
            f"{name} {value} cannot be enforced: llguidance reads integers as 64 bits; use strings"
        )
    inner = min(max(number, _LEAST_INTEGER), greatest)
    if inner != _GREATEST_INTEGER:
        near = float(inner)
        while not _is_inner(inner, near, is_lower, is_integer):
            near = math.nextafter(near, math.inf if is_lower else -math.inf)
        inner = int(near)
    if inner != number:
        warn_once(f"{name} {value}: enforced as {inner}, because llguidance reads numbers as float64")
    return inner


def _is_inner(limit: int, near: float, is_lower: bool, is_integer: bool) -> bool:
    """Whether llguidance keeps the limit if it reads `near`."""
    read = [int(near)] if is_integer else [int(near), _printed(near)]
    return min(read) >= limit if is_lower else max(read) <= limit


def _printed(number: float) -> int:
    """The integer that llguidance prints for a number without a type: its shortest digits, and zeros."""
    return int(Decimal(repr(number)))


# -- strings and names --------------------------------------------------------------------------------------


def _express_format(is_format: Callable[[str], bool], schema: dict[str, Any]) -> None:
    """Replace formats that llguidance enforces loosely, and leave out those that it does not know."""
    name = schema.get("format")
    if not isinstance(name, str) or (_types(schema) and "string" not in _types(schema)):
        return
    if name in _FORMATS and isinstance(schema.get("allOf", []), list):
        del schema["format"]
        pattern = f"^{_FORMATS[name]}$"
        if "pattern" in schema:
            schema["allOf"] = [*schema.get("allOf", []), {"pattern": pattern}]
        else:
            schema["pattern"] = pattern
    elif not is_format(name):
        del schema["format"]
        warn_once(f"json: the format {name!r} is not enforced, because llguidance does not know it")


def _drop_patterns(
    only_names: Callable[[str, Sequence[str]], list[str] | None], schema: dict[str, Any]
) -> None:
    """Leave out patterns that match named properties only: else a comma is allowed, and no name after it."""
    patterns, properties = schema.get("patternProperties"), schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(patterns, dict) or not isinstance(properties, dict) or not isinstance(required, list):
        return
    names = list(dict.fromkeys([*properties, *(each for each in required if isinstance(each, str))]))
    for pattern in list(patterns):
        matching = only_names(pattern, names)
        if matching is None:
            continue
        inner = patterns.pop(pattern)
        for name in matching:
            properties[name] = {"allOf": [properties[name], inner]} if name in properties else inner
            schema["properties"] = properties
    if not patterns:
        del schema["patternProperties"]
