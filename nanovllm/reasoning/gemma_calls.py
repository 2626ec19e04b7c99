"""Arguments as Gemma 4 writes them: `{key:<|"|>text<|"|>,count:3,list:[1,2]}`. Finds no call."""

from __future__ import annotations

import json
import re
from typing import Any

QUOTE = '<|"|>'
_BARE = re.compile(r"[^,\]}]*")
_KEY = re.compile(
    r'\s*(?:<\|"\|>(?P<quoted>.*?)<\|"\|>|(?P<json>"(?:[^"\\]|\\.)*")|(?P<bare>[^:{}\[\],]+?))\s*:', re.DOTALL
)
_DECODER = json.JSONDecoder(strict=False)  # of strings as JSON has them, which models write, too
_MAX_DEPTH = 100
_PYTHON = {"None": None, "True": True, "False": False}


def read_gemma_call(text: str, at: int) -> tuple[dict[str, Any], int]:
    """The arguments that begin at a place with "{", and where they end. ValueError says why they are none."""
    value, end = _read(text, at, 0)
    if not isinstance(value, dict):
        raise ValueError("its arguments are no object")
    return value, end


def _read(text: str, at: int, depth: int) -> tuple[Any, int]:
    if depth > _MAX_DEPTH:
        raise ValueError(f"its arguments are nested more than {_MAX_DEPTH} deep")
    at = _skip(text, at)
    if text.startswith(QUOTE, at):
        start = at + len(QUOTE)
        end = text.find(QUOTE, start)
        if end < 0:
            raise ValueError("a string has no end")
        return text[start:end], end + len(QUOTE)
    if text.startswith("{", at):
        return _read_object(text, at + 1, depth)
    if text.startswith("[", at):
        return _read_list(text, at + 1, depth)
    if text.startswith('"', at):
        try:
            return _DECODER.raw_decode(text, at)
        except ValueError:
            raise ValueError("a string has no end") from None
    match = _BARE.match(text, at)
    assert match is not None
    return _bare(match[0].strip()), match.end()


def _read_object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    at = _skip(text, at)
    while not text.startswith("}", at):
        match = _KEY.match(text, at)
        if match is None:
            raise ValueError("a key is missing")
        found[_key(match)], at = _read(text, match.end(), depth + 1)
        at = _next(text, at, "}")
    return found, at + 1


def _key(match: re.Match[str]) -> str:
    if match["json"] is not None:
        return str(_DECODER.decode(match["json"]))
    return str(match["bare"] if match["quoted"] is None else match["quoted"])


def _read_list(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    found = []
    at = _skip(text, at)
    while not text.startswith("]", at):
        value, at = _read(text, at, depth + 1)
        found.append(value)
        at = _next(text, at, "]")
    return found, at + 1


def _next(text: str, at: int, close: str) -> int:
    """Where the next value begins, or the closing character stands."""
    at = _skip(text, at)
    if text.startswith(",", at):
        return _skip(text, at + 1)
    if not text.startswith(close, at):
        raise ValueError(f"{close} or a comma is missing")
    return at


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _bare(text: str) -> Any:
    """A number, true, false or null; ValueError for nothing, other words are text. Templates write these as
    Python does, too, and strings always have quotes."""
    if not text:
        raise ValueError("a value is missing")
    if text in _PYTHON:
        return _PYTHON[text]
    try:
        return json.loads(text, parse_constant=str)  # NaN and Infinity are text: no JSON has them
    except ValueError:
        return text
