"""Values of arguments that a model writes without quotes: text becomes what the tool's schema says."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

_KINDS: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "boolean": (bool,),
    "null": (type(None),),
    "integer": (int,),
    "number": (int, float),
}


def parameters_of(tools: Iterable[Any] | None) -> dict[str, Mapping[str, Any]]:
    """The schema of each parameter by name, for each function by name. tools: OpenAI's form, or bare
    functions; what has no such form is left out."""
    found = {}
    for tool in tools or ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            found[function["name"]] = properties if isinstance(properties, Mapping) else {}
    return found


def typed(text: str, schema: Any) -> Any:
    """The value that a text stands for: of the schema's first type that fits, else the text itself.

    A schema without a type, or none, keeps the text, unless it is JSON of one of its `enum`.
    """
    for kind in _types(schema):
        if kind == "string":
            return text
        found, value = _read(text)
        if kind == "boolean" and text.strip().lower() in ("true", "false"):  # Python's way, too
            return text.strip().lower() == "true"
        if kind == "null" and text.strip().lower() in ("null", "none"):
            return None
        if kind == "integer" and found and isinstance(value, float) and value.is_integer():
            return int(value)
        if found and isinstance(value, _KINDS.get(kind, ())):
            if kind in ("integer", "number") and isinstance(value, bool):
                continue
            return value
    if isinstance(schema, Mapping) and isinstance(schema.get("enum"), list) and text not in schema["enum"]:
        found, value = _read(text)
        if found and any(type(value) is type(each) and value == each for each in schema["enum"]):
            return value
    return text


def _types(schema: Any) -> list[str]:
    """The types that a schema names, in its order."""
    if not isinstance(schema, Mapping):
        return []
    kind = schema.get("type")
    if isinstance(kind, str):
        return [kind]
    if isinstance(kind, list):
        return [each for each in kind if isinstance(each, str)]
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return [each for part in schema[key] for each in _types(part)]
    return []


def _read(text: str) -> tuple[bool, Any]:
    """Whether a text is JSON, and its value. NaN and Infinity are no JSON."""
    try:
        return True, json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False, None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
