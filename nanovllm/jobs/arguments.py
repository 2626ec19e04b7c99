"""The values of arguments: from the text of a command line to what it means, each on its own.

argparse.ArgumentTypeError for a wrong one. Knows no flags.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from nanovllm.jobs.choices import parse_choices


def json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def json_object(text: str) -> dict[str, Any]:
    value = json_or_text(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object {{...}}, not {text!r}")
    return value


def text_or_file(text: str) -> str:
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise argparse.ArgumentTypeError(
            f"the file {text[1:]!r} cannot be read: {why}; @ stands before the path of a file"
        ) from None


def columns(text: str) -> str | list[str]:
    if text in ("all", "none"):
        return text
    names = json_or_text(text) if text.startswith("[") else text.split(",")
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise argparse.ArgumentTypeError(
            f'must be all, none, names with commas between, or names as JSON ["a", "b"], not {text!r}'
        )
    return names


def choices(text: str) -> list[str]:
    try:
        return parse_choices(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def page(text: str) -> Path:
    if not text.endswith(".html"):  # it may be the path of the output by mistake
        raise argparse.ArgumentTypeError(f"must end in .html, not {text!r}")
    return Path(text)


def delimiter(text: str) -> str:
    text = "\t" if text == "\\t" else text
    if len(text) != 1 or text in '"\r\n':
        raise argparse.ArgumentTypeError(f"must be one character, no quote and no line end, not {text!r}")
    return text


def shard(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"must be I/N with I from 1 to N, such as 2/8, not {text!r}")
    return int(found[1]), int(found[2])


def count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"must be a number of rows, 0 or more, not {text!r}")
    return int(text)


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text!r}")
    return int(text)
