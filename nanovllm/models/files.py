"""The files of a model's folder: which of them are read, and the one reader for those in JSON.

Only regular files count, also through links, as in a hub cache. Reads no weight and knows no model.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nanovllm.errors import ModelLoadError

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILES = (  # patterns; transformers reads these
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "tekken.json"),
    *("chat_template.json", "*.jinja", "additional_chat_templates/*.jinja"),
    *("vocab.txt", "merges.txt", "*.model", "*.tiktoken"),
)
VOCABULARIES = ("tokenizer.json", "vocab.json", "tekken.json")  # large, and read by their own parsers
MAX_JSON_BYTES = 2**25
MAX_VOCABULARY_BYTES = 2**28
MAX_DEPTH = 64  # of objects and lists within each other
MAX_MESSAGE = 4000  # characters of an error that quotes a file
MAX_LISTED = 40  # names of one kind in an error message
LFS_POINTER = b"version https://git-lfs"
LFS_FIX = (
    "is a git-lfs pointer and not the file itself; run `git lfs pull` in its folder, or use `hf download`"
)


def regular_files(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """The files of `folder` with such names, sorted: no folders, pipes, devices or dangling links."""
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def model_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """The small files and the weight files of a model that loading it reads."""
    small = regular_files(folder, (CONFIG_FILE, GENERATION_FILE, INDEX_FILE, *TOKENIZER_FILES))
    return small, [folder / name for name in weight_files(folder)]


def weight_files(folder: Path) -> dict[str, set[str]]:
    """Return {weight file: tensors that the index lists for it}; empty if there are none.

    Raises ModelLoadError if the index is malformed, or names files that do not exist.
    """
    if (folder / WEIGHTS_FILE).is_file():
        return {WEIGHTS_FILE: set()}
    index = folder / INDEX_FILE
    if not index.is_file():
        return {path.name: set() for path in regular_files(folder, ["*.safetensors"])}
    weight_map = read_json(index, unique_keys=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index} has no weight_map, an object of tensor and file names")
    files: dict[str, set[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name or name in (".", "..") or not {*name}.isdisjoint("/\\\0"):
            where, what = f"{index}: weight_map[{shortened(repr(tensor))}]", shortened(repr(name))
            raise ModelLoadError(f"{where} must be the name of a file in the same folder, not {what}")
        files.setdefault(name, set()).add(tensor)
    absent = sorted(name for name in files if not (folder / name).is_file())
    if absent:
        raise ModelLoadError(f"{folder}: {INDEX_FILE} names files that do not exist: {listing(absent)}")
    return files


def read_json(path: Path, unique_keys: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file of at most MAX_JSON_BYTES, nested at most MAX_DEPTH deep.

    unique_keys: refuse an object that has a key twice. Raises ModelLoadError that names the file.
    """

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
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not {type(content).__name__}")
    level: list[Any] = [content]
    for _ in range(MAX_DEPTH):
        children = (child for each in level for child in (each.values() if isinstance(each, dict) else each))
        level = [child for child in children if isinstance(child, (dict, list))]
    if level:
        raise ModelLoadError(f"{path} is nested more than {MAX_DEPTH} deep")
    return content


def check_tokenizer_files(folder: Path) -> None:
    """Raise ModelLoadError if a tokenizer's file in JSON is too large, malformed or a git-lfs pointer."""
    for path in regular_files(folder, TOKENIZER_FILES):
        if path.name in VOCABULARIES:
            _check_size(path, MAX_VOCABULARY_BYTES)
            with path.open("rb") as file:
                check_no_pointer(path, file.read(len(LFS_POINTER)))
        elif path.suffix == ".json":
            read_json(path)


def check_no_pointer(path: Path, start: bytes) -> None:
    """Raise ModelLoadError if a file with this start only says where git-lfs finds the real one."""
    if start.startswith(LFS_POINTER):
        raise ModelLoadError(f"{path} {LFS_FIX}")


def _read(path: Path, most: int) -> bytes:
    _check_size(path, most)
    with path.open("rb") as file:
        text = file.read(most)
    check_no_pointer(path, text)
    return text


def _check_size(path: Path, most: int) -> None:
    size = path.stat().st_size
    if size > most:
        raise ModelLoadError(f"{path} has {size:,} bytes, and at most {most:,} are read; is it another file?")


def shortened(message: object) -> str:
    """An error's message, cut if a file has made it long."""
    text = str(message)
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}..."


def listing(names: Iterable[str]) -> str:
    """The first names, for an error message, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - MAX_LISTED} more" if len(listed) > MAX_LISTED else ""
    return shortened(", ".join(listed[:MAX_LISTED])) + more
