"""How many structured answers of a model reach their end: 50 JSON schemas of many kinds, asked in a chat.

    python -m tools.structured_ends MODEL [--flexible] [--max-tokens 400] [--temperature 0.7] [--top-p 1.0]
        [--frequency-penalty 0.0] [--seed 0]

Prints the answers that ended by length. Exit code 1 if fewer than 98 % of them reached their end.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from nanovllm import LLM, SamplingParams, StructuredOutputsParams

LEAST = 0.98
TEXT = {"type": "string"}
TEXTS = {"type": "array", "items": TEXT, "maxItems": 3}
# What each asks for, and its schema. Arrays and digits after the point have limits, as far as schemas can say
# so: a small model repeats without end where it may. Most strings and integers have none.
KINDS: dict[str, dict[str, Any]] = {
    "a city": TEXT,
    "a year": {"type": "integer"},
    "a price": {"type": "number", "multipleOf": 0.01},
    "whether it is open": {"type": "boolean"},
    "a colour": {"enum": ["red", "green", "blue"]},
    "a size from 1 to 10": {"type": "integer", "minimum": 1, "maximum": 10},
    "a short note": {"type": "string", "maxLength": 40},
    "a date": {"type": "string", "format": "date"},
    "an e-mail address": {"type": "string", "format": "email", "maxLength": 40},
    "a product code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    "a number or nothing": {"type": ["number", "null"]},
    "a version or a name": {"anyOf": [{"type": "integer"}, TEXT]},
    "two tags": {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 2},
    "a point": {"type": "array", "prefixItems": [{"type": "integer"}] * 2, "items": False, "minItems": 2},
    "a constant": {"const": {"kind": "book", "parts": [1, 2]}},
    "an address": {
        "type": "object",
        "properties": {"street": TEXT, "number": {"type": "integer"}, "city": TEXT},
        "required": ["street", "number", "city"],
        "additionalProperties": False,
    },
    "a person": {
        "type": "object",
        "properties": {"name": TEXT, "age": {"type": "integer"}, "friends": TEXTS},
        "required": ["name"],
        "additionalProperties": False,
    },
}


def closed(properties: dict[str, Any]) -> dict[str, Any]:
    """An object with exactly these properties."""
    names = list(properties)
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def schemas() -> list[tuple[str, dict[str, Any]]]:
    """50 pairs (what to ask for, schema): each kind in an object, in a list, and nested beside a title."""
    found = []
    for name, schema in KINDS.items():
        found.append((name, closed({"value": schema})))
        found.append((f"a list: {name}", {"type": "array", "items": schema, "minItems": 1, "maxItems": 3}))
        nested = closed({"title": TEXT, "details": closed({"value": schema, "is_new": {"type": "boolean"}})})
        found.append((f"a record with a title, and in its details {name}", nested))
    return found[:50]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--flexible", action="store_true", help="allow any whitespace in JSON")
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--frequency-penalty", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    asked = schemas()
    params = [
        SamplingParams(
            structured_outputs=StructuredOutputsParams(
                json=schema, disable_any_whitespace=False if args.flexible else None
            ),
            temperature=args.temperature,
            top_p=args.top_p,
            frequency_penalty=args.frequency_penalty,
            max_tokens=args.max_tokens,
            seed=args.seed + index,
        )
        for index, (_, schema) in enumerate(asked)
    ]
    chats = [
        [{"role": "user", "content": f"Write {name} as JSON, as in this schema: {json.dumps(schema)}"}]
        for name, schema in asked
    ]
    with LLM(args.model) as llm:
        outputs = llm.chat(chats, params)
    ended = [output for output in outputs if output["finish_reason"] == "stop"]
    for output in ended:
        json.loads(output["text"])
    for output, (name, _) in zip(outputs, asked, strict=True):
        if output["finish_reason"] != "stop":
            print(f"{output['finish_reason']}: {name}: {output['text'][:60]!r} ... {output['text'][-30:]!r}")
    print(f"{len(ended)} of {len(outputs)} answers reached their end within {args.max_tokens} tokens")
    return int(len(ended) < LEAST * len(outputs))


if __name__ == "__main__":
    raise SystemExit(main())
