"""StructuredOutputsParams: what the text of an output must look like.

Checks the fields; what they mean to the tokens of a model is compiled in `text/structured.py`.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")
FLAGS = ("disable_any_whitespace", "disable_additional_properties")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """Exactly one constraint on the text of an output, and options of JSON. Cannot be changed.

    json: a JSON schema as a dictionary, as a text, or as a pydantic model class; kept as a text. Properties
        come in the order of the schema.
    regex: a regular expression that the whole text matches, in the syntax of Rust's regex crate: no
        look-around and no back-references.
    choice: a list of texts, one of which is the whole text.
    grammar: a context-free grammar: Lark as llguidance reads it, from the rule `start`; or GBNF (EBNF with
        `::=`), from the rule `root`.
    json_object: True for any JSON object.
    disable_any_whitespace: JSON without whitespace outside of its strings.
    disable_additional_properties: objects have no properties but those that the schema names, unless it says
        itself which others they may have.
    whitespace_pattern: a regular expression for the whitespace of JSON, such as `[ ]?`.

    ValueError or TypeError names the field, the value and the fix. Whether a schema, an expression or a
    grammar is right is checked with the request.
    """

    json: str | Mapping[str, Any] | type | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        if self.json_object not in (None, True, False):
            raise TypeError(f"json_object must be True or None, not {_show(self.json_object)}")
        given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"structured outputs take exactly one of {', '.join(CONSTRAINTS)}, not "
                f"{' and '.join(given) or 'none'}"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{name} must be a text, not {_show(value)}")
            if value == "":
                raise ValueError(f"{name} must not be empty; leave it out")
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {_show(getattr(self, name))}")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise ValueError(
                f"whitespace_pattern={_show(self.whitespace_pattern)} contradicts disable_any_whitespace=True"
            )


def _schema_text(schema: Any) -> str:
    """A JSON schema as a JSON text."""
    expected = "a JSON schema: a dictionary, its text or a pydantic model class"
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if isinstance(schema, str):
        try:
            if isinstance(json_module.loads(schema), dict):
                return schema
        except ValueError as error:
            raise ValueError(f"json must be {expected}, not {_show(schema)} ({error})") from None
        raise ValueError(f"json must be {expected}, not {_show(schema)}")
    if not isinstance(schema, Mapping):
        raise TypeError(f"json must be {expected}, not {_show(schema)}")
    try:
        return json_module.dumps(dict(schema), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise type(error)(f"json must be {expected}, not {_show(schema)} ({error})") from None


def _choices(choices: Any) -> tuple[str, ...]:
    expected = "a list of texts, at least one"
    if isinstance(choices, (str, bytes)) or not isinstance(choices, Sequence):
        raise TypeError(f"choice must be {expected}, not {_show(choices)}")
    if not all(isinstance(choice, str) for choice in choices):
        raise TypeError(f"choice must be {expected}, not {_show(choices)}")
    if not choices:
        raise ValueError(f"choice must be {expected}, not {_show(choices)}")
    return tuple(choices)


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
