"""The one reader of JSON files, with limits of size and depth; and how pointers of git-lfs are refused."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from nanovllm.errors import ModelLoadError
from nanovllm.models.registry import shortened

# What transformers 5 writes for a number that JSON does not have, as {"__float__": "Infinity"}.
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
MAX_JSON_BYTES = 2**25
MAX_VOCABULARY_BYTES = 2**28
MAX_DEPTH = 64  # of objects and lists within each other
LFS_POINTER = b"version https://git-lfs"
_LFS_FIX = (
    "is a git-lfs pointer and not the file itself; run `git lfs pull` in its folder, or use `hf download`"
)


def read_json(path: Path, unique_keys: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file of at most MAX_JSON_BYTES, nested at most MAX_DEPTH deep.

    unique_keys: refuse an object that has a key twice. Raises ModelLoadError that names the file.
    """
    content = _json(path, unique_keys)
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def read_json_list(path: Path) -> list[Any]:
    """The same for a JSON array."""
    content = _json(path)
    if not isinstance(content, list):
        raise ModelLoadError(f"{path} must hold a JSON array, not {type(content).__name__}")
    return content


def _json(path: Path, unique_keys: bool = False) -> Any:

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
            raise ModelLoadError(f"{path} has the key {twice!r} twice; remove one of them")
        return found

    try:
        text = _read(path, MAX_JSON_BYTES)
        content = json.loads(text.decode(), object_pairs_hook=unique if unique_keys else None)
    except RecursionError:
        raise ModelLoadError(f"{path} is nested more than {MAX_DEPTH} deep") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {shortened(error)}") from error
    level: list[Any] = [content]
    for _ in range(MAX_DEPTH):
        children = (child for each in level for child in (each.values() if isinstance(each, dict) else each))
        level = [child for child in children if isinstance(child, (dict, list))]
    if level:
        raise ModelLoadError(f"{path} is nested more than {MAX_DEPTH} deep")
    return content


def with_floats(value: Any) -> Any:
    """A value of JSON with the numbers that _FLOATS names."""
    if isinstance(value, list):
        return [with_floats(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and isinstance(name := value["__float__"], str) and name in _FLOATS:
        return _FLOATS[name]
    return {key: with_floats(each) for key, each in value.items()}


def check_no_pointer(path: Path, start: bytes) -> None:
    """Raise ModelLoadError if a file with this start only says where git-lfs finds the real one."""
    if start.startswith(LFS_POINTER):
        raise ModelLoadError(f"{path} {_LFS_FIX}")


def _read(path: Path, most: int) -> bytes:
    check_size(path, most)
    with path.open("rb") as file:
        text = file.read(most)
    check_no_pointer(path, text)
    return text


def check_size(path: Path, most: int) -> None:
    size = path.stat().st_size
    if size > most:
        raise ModelLoadError(f"{path} has {size:,} bytes, and at most {most:,} are read; is it another file?")
