"""StructuredOutputsParams: the required form of an output's text.

Checks the fields; `extras/structured.py` compiles them for the tokens of a model.
"""

from __future__ import annotations

import json as json_module
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.checks import check_bool, show
from nanovllm.names import KnownFields
from nanovllm.text.prompts import check_text

MAX_CHARS = 2**20  # of a schema, expression or grammar, and of all choices together
MAX_CHOICES = 10_000
MAX_DEPTH = 100  # of brackets
_MAX_PROPERTIES = 1000  # of an object in a schema
_MAX_STRUCTURES = 1000  # of a structural tag, for all triggers together
_BRACKETS = re.compile(r"\\.|[(\[{]|[)\]}]")
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True)
class StructuredOutputsParams(KnownFields):
    """Exactly one constraint on the text of an output, and JSON options. Immutable.

    json: a JSON schema as a dictionary, a JSON string, or a pydantic model class; stored as a string.
        Properties appear in the order of the schema.
    regex: a regular expression that matches the whole text, in the syntax of Rust's regex crate: no
        look-around and no back-references.
    choice: a list of strings, none empty and no two equal; the whole text is one of them.
    grammar: a context-free grammar: Lark as llguidance reads it, with the start rule `start`; or GBNF (EBNF
        with `::=`), with the start rule `root`.
    json_object: True for any JSON object.
    structural_tag: free text with function calls, as a dictionary or a JSON string: `{"structures":
        [{"begin": text, "schema": JSON schema, "end": text}], "triggers": [text]}`. After a trigger, one of
        the structures that begin with it must follow. Stored as a string.
    disable_any_whitespace: no whitespace in JSON, except within strings, so that a model cannot write it
        without end. False allows any whitespace; None: True, unless there is a `whitespace_pattern`.
    disable_additional_properties: objects have only the properties that the schema names, unless the schema
        sets `additionalProperties`.
    disable_big_integers: an integer without limits in the schema has at most 64 bits, so that a model cannot
        repeat digits without end. A schema that names a number beyond 64 bits adds no limit.
    whitespace_pattern: a regular expression for the whitespace of JSON, such as `[ ]?`.

    ValueError or TypeError names the field, the value and the fix. Schemas, expressions and grammars are
    compiled, and so checked, when a request is made.
    """

    json: str | Mapping[str, Any] | type | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_big_integers: bool = True

    def __post_init__(self) -> None:
        if self.json_object not in (None, True, False):
            raise TypeError(f"json_object must be True or None, not {show(self.json_object)}")
        given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"structured outputs take exactly one of {', '.join(CONSTRAINTS)}, not "
                f"{' and '.join(given) or 'none'}"
            )
        if self.json is not None:
            expected = "a JSON schema: a dictionary, a JSON string or a pydantic model class"
            object.__setattr__(self, "json", _json_text("json", self.json, expected))
        if self.structural_tag is not None:
            object.__setattr__(self, "structural_tag", _tag_text(self.structural_tag))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{name} must be a string, not {show(value)}")
            if value == "":
                raise ValueError(f"{name} must not be empty; leave it out")
            if value is not None:
                _check_size(name, len(value), MAX_CHARS, "characters")
                _check_size(name, _bracket_depth(value), MAX_DEPTH, "nested brackets")
        for name in ("disable_additional_properties", "disable_big_integers"):
            check_bool(name, getattr(self, name))
        if self.disable_any_whitespace is not None:
            check_bool("disable_any_whitespace", self.disable_any_whitespace)
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise ValueError(
                f"whitespace_pattern={show(self.whitespace_pattern)} contradicts disable_any_whitespace=True"
            )

    def named(self) -> str:
        """The constraint's name, and the beginning of its value."""
        name = next(name for name in CONSTRAINTS if getattr(self, name) not in (None, False))
        return f"{name} {show(getattr(self, name))}"


def _json_text(name: str, value: Any, expected: str) -> str:
    """A JSON object as a string."""
    if hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    wrong = f"{name} must be {expected}, not {show(value)}"
    if not isinstance(value, (str, Mapping)):
        raise TypeError(wrong)
    try:
        if not isinstance(value, str):
            value = json_module.dumps(dict(value), ensure_ascii=False, allow_nan=False)
        _check_size(name, len(value), MAX_CHARS, "characters")
        parsed = json_module.loads(value)
        is_object = isinstance(parsed, dict)
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply; it may have {MAX_DEPTH} levels") from None
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{wrong} ({error})") from None
    if not is_object:
        raise ValueError(wrong)
    level, depth = [parsed], 0
    while level := [inner for each in level for inner in _inside(each)]:
        depth += 1
        _check_size(name, depth + 1, MAX_DEPTH, "levels")
        most = max((len(each) for each in level if isinstance(each, dict)), default=0)
        _check_size(name, most, _MAX_PROPERTIES, "properties of one object")
    return value


def _inside(value: object) -> list[Any]:
    """The objects and arrays within a JSON value."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [each for each in values if isinstance(each, (dict, list))]


def _bracket_depth(text: str) -> int:
    """The number of brackets that are open at once, at most."""
    depth = deepest = 0
    for bracket in _BRACKETS.findall(text):
        depth = max(0, depth + (bracket in "([{") - (bracket in ")]}"))
        deepest = max(deepest, depth)
    return deepest


def _check_size(name: str, size: int, most: int, of: str) -> None:
    """ValueError for a constraint that would take too long to compile."""
    if size > most:
        raise ValueError(f"{name} has {size:,} {of}, and may have {most:,}; make it smaller")


def _tag_text(value: Any) -> str:
    """Checked `structural_tag` as a string."""
    expected = '{"structures": [{"begin": text, "schema": JSON schema, "end": text}], "triggers": [text]}'
    text = _json_text("structural_tag", value, expected)
    tag = json_module.loads(text)
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if (
        not (isinstance(structures, list) and structures and isinstance(triggers, list) and all(triggers))
        or not all(isinstance(trigger, str) for trigger in triggers)
        or not all(isinstance(each, dict) and isinstance(each.get("schema"), dict) for each in structures)
        or not all(isinstance(each.get(name), str) for each in structures for name in ("begin", "end"))
    ):
        raise ValueError(f"structural_tag must be {expected}, not {show(value)}")
    _check_size("structural_tag", len(structures) * len(triggers), _MAX_STRUCTURES, "structures x triggers")
    for each in structures:
        if not each["begin"].startswith(tuple(triggers)):
            raise ValueError(f"structural_tag: {each['begin']!r} begins with none of the triggers {triggers}")
    return text


def _choices(choices: Any) -> tuple[str, ...]:
    expected = "a list of strings, at least one"
    is_list = isinstance(choices, Sequence) and not isinstance(choices, (str, bytes))
    if is_list:
        _check_size("choice", len(choices), MAX_CHOICES, "strings")
    if not is_list or not all(isinstance(choice, str) for choice in choices):
        raise TypeError(f"choice must be {expected}, not {show(choices)}")
    if not choices:
        raise ValueError(f"choice must be {expected}, not {show(choices)}")
    _check_size("choice", sum(map(len, choices)), MAX_CHARS, "characters")
    check_choices(choices)
    return tuple(choices)


def check_choices(choices: Sequence[str]) -> None:
    """ValueError for a choice that is empty, comes twice, or is no text."""
    seen: set[str] = set()
    for number, each in enumerate(choices, 1):
        if not each.strip():
            raise ValueError(
                f"choice {number} is {each!r}, which says nothing; leave it out, or give it a text"
            )
        if each in seen:
            raise ValueError(f"the choice {show(each)} comes twice; name it once")
        seen.add(each)
        check_text(each, f"choice {number}")
