"""Random JSON schemas for the tests of structured outputs."""

from __future__ import annotations

import random
from typing import Any

WORDS = ["name", "age", "city", "tags", "price", "note", "kind", "the user's id", "größe", "名前"]


def random_schema(seed: int) -> dict[str, Any]:
    """An object with a few required properties, another one for each seed; small, so answers are short."""
    rng = random.Random(seed)
    return _object(rng, 0, f"{seed}")


def _object(rng: random.Random, depth: int, suffix: str = "") -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(1, 3))
    properties = {name: _value(rng, depth + 1) for name in names}
    if suffix:
        properties[f"n{suffix}"] = {"const": int(suffix)}
    required = [name for name in properties if rng.random() < 0.6 or name.startswith("n")]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-5, 5)
    kinds: list[dict[str, Any]] = [
        {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 900)},
        {"type": "number", "minimum": 0, "maximum": 10},
        {"type": "boolean"},
        {"type": ["null", "boolean"]},
        {"enum": rng.sample(["red", "green", "blue", 7, None, "grün"], 3)},
        {"type": "string", "maxLength": rng.randint(1, 6)},
        {"type": "string", "pattern": "^[a-c]{1,3}-[0-9]$"},
        {"type": "string", "format": "ipv4"},
        {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"const": "none"}]},
    ]
    if depth < 3:
        kinds.append({"type": "array", "items": _value(rng, depth + 1), "minItems": 1, "maxItems": 2})
        kinds.append(_object(rng, depth))
    return rng.choice(kinds)
