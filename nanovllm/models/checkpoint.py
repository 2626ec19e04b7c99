"""Checkpoint: the config, the tokenizer and the tensors of one model, read from its files.

A format of weights is a class with these methods; `models/registry.py` lists them. The one reader of JSON is
here. Only regular files count, also through links, as in a hub cache. Knows no model.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from safetensors import SafetensorError, safe_open

from nanovllm.errors import ModelLoadError
from nanovllm.quantization.shards import WeightSource

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
MODELOPT_FILE = "hf_quant_config.json"
MODULES_FILE = "modules.json"  # of sentence-transformers, with the folders of modules
_EMBEDDING_FILES = (MODULES_FILE, "*sentence_*.json", "*_*/config.json")
_WEIGHTS_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_TOKENIZER_FILES = (  # patterns; transformers reads these
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "tekken.json"),
    *("chat_template.json", "*.jinja", "additional_chat_templates/*.jinja"),
    *("vocab.txt", "merges.txt", "*.model", "*.tiktoken"),
)
_SMALL_FILES = (
    CONFIG_FILE,
    GENERATION_FILE,
    MODELOPT_FILE,
    _INDEX_FILE,
    *_TOKENIZER_FILES,
    *_EMBEDDING_FILES,
)
_TEKKEN = "tekken.json"
_OTHER_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model", "*.tiktoken")
_VOCABULARIES = ("tokenizer.json", "vocab.json", _TEKKEN)  # large, and read by their own parsers
# What transformers 5 writes for a number that JSON does not have, as {"__float__": "Infinity"}.
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
MAX_JSON_BYTES = 2**25
MAX_VOCABULARY_BYTES = 2**28
MAX_DEPTH = 64  # of objects and lists within each other
_MAX_MESSAGE = 4000  # characters of an error that quotes a file
_MAX_LISTED = 40  # names of one kind in an error message
_LFS_POINTER = b"version https://git-lfs"
_LFS_FIX = (
    "is a git-lfs pointer and not the file itself; run `git lfs pull` in its folder, or use `hf download`"
)
_UNSUPPORTED_FILES = {  # unsupported files, with what to do instead
    "*.bin": "convert them to safetensors",
    "*.pth": "convert them to safetensors",
    "*.gguf": "pass the path of such a file as the model",
    "adapter_config.json": "merge the adapter into its base model first (peft's merge_and_unload)",
}
SAMPLES = 16  # of a weight file, for its fingerprint, 64 KiB each
T = TypeVar("T")


class Checkpoint:
    """A folder in Hugging Face format with *.safetensors files. Another format overrides every method.

    Opens no file before it is asked. Every method may raise ModelLoadError that names the file.
    """

    absent: frozenset[str] = frozenset()  # tensors that an index lists and no file has, once opened

    def __init__(self, path: Path) -> None:
        self.path = path

    states_ends = True  # whether its files list all tokens that end an answer

    @classmethod
    def reads(cls, path: Path) -> bool:
        """Whether files at `path` are of this format, as far as their names say."""
        return path.is_dir()

    def config(self) -> dict[str, Any]:
        """The content of config.json, or what the files say instead."""
        if not self.path.is_dir():
            raise ValueError(f"model folder {str(self.path)!r} does not exist")
        if not (self.path / CONFIG_FILE).is_file():
            raise ModelLoadError(
                f"{self.path} has no {CONFIG_FILE}, as a model folder in Hugging Face format has"
                f"{_unread(self.path)}"
            )
        content: dict[str, Any] = _with_floats(read_json(self.path / CONFIG_FILE))
        return content

    def generation(self) -> dict[str, Any]:
        """The content of generation_config.json; empty if there is none."""
        file = self.path / GENERATION_FILE
        content: dict[str, Any] = _with_floats(read_json(file)) if file.is_file() else {}
        return content

    def modelopt(self) -> dict[str, Any]:
        """The content of the file in which ModelOpt says how it has quantised; empty if there is none."""
        file = self.path / MODELOPT_FILE
        return read_json(file) if file.is_file() else {}

    def tokenizer(self, read: Callable[[Path], T]) -> T:
        """Check the tokenizer's files, and return what `read` makes of a folder with them."""
        if (self.path / _TEKKEN).is_file() and not _regular_files(self.path, _OTHER_VOCABULARIES):
            raise ModelLoadError(
                f"{self.path} has a tokenizer in {_TEKKEN} alone, the format of mistral-common, which is not "
                "read; put the tokenizer.json and tokenizer_config.json of the model in transformers' format "
                "there, pass a folder that has them as tokenizer, or pass skip_tokenizer_init=True and token "
                "ids as prompts"
            )
        for path in _regular_files(self.path, _TOKENIZER_FILES):
            if path.name in _VOCABULARIES:
                _check_size(path, MAX_VOCABULARY_BYTES)
                with path.open("rb") as file:
                    check_no_pointer(path, file.read(len(_LFS_POINTER)))
            elif path.suffix == ".json":
                read_json(path)
        return read(self.path)

    @contextmanager
    def tensors(self) -> Iterator[Mapping[str, WeightSource]]:
        """All tensors by their names in transformers; opens every file, which checks its header and length.
        Within the context, indexing a tensor reads it."""
        with ExitStack() as stack:
            yield self._open(stack)

    def _open(self, stack: ExitStack) -> dict[str, WeightSource]:
        tensors: dict[str, WeightSource] = {}
        owners: dict[str, str] = {}
        files = _weight_files(self.path)
        if not files:
            raise ModelLoadError(f"{self.path} holds no *.safetensors weights{_unread(self.path)}")
        for file_name in files:
            path = self.path / file_name
            try:
                opened = stack.enter_context(safe_open(path, framework="pt"))
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
            except (OSError, SafetensorError) as error:
                with suppress(OSError), path.open("rb") as file:
                    check_no_pointer(path, file.read(len(_LFS_POINTER)))
                raise ModelLoadError(
                    f"{path} cannot be read, is it complete? {type(error).__name__}: {shortened(error)}"
                ) from error
            twice = sorted(slices.keys() & owners.keys())
            if twice:
                raise ModelLoadError(f"{path} has tensors that {owners[twice[0]]} has too: {listing(twice)}")
            owners.update(dict.fromkeys(slices, file_name))
            tensors.update(slices)
        listed = {name for names in files.values() for name in names}
        self.absent = frozenset(listed - tensors.keys())
        return tensors

    def files(self) -> tuple[list[Path], list[Path]]:
        """The small files and the weight files that loading reads."""
        small = _regular_files(self.path, _SMALL_FILES)
        return small, [self.path / name for name in _weight_files(self.path)]

    def fingerprint(self) -> str:
        """A hash of all files: small ones whole; of weights the name, the size, and SAMPLES pieces spread
        over the file."""
        digest = xxhash.xxh3_128()
        small, weights = self.files()
        for path in small:
            whole = xxhash.xxh3_128()
            with path.open("rb") as file:
                while chunk := file.read(2**20):
                    whole.update(chunk)
            digest.update(f"{path.name} {whole.hexdigest()}\n".encode())
        for path in sorted(weights):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                for sample in range(SAMPLES):
                    file.seek(size * sample // SAMPLES)
                    digest.update(file.read(2**16))
        return digest.hexdigest()


def _weight_files(folder: Path) -> dict[str, set[str]]:
    """Return {weight file: tensors that the index lists for it}; empty if there are none.

    Raises ModelLoadError if the index is malformed, or names files that do not exist.
    """
    if (folder / _WEIGHTS_FILE).is_file():
        return {_WEIGHTS_FILE: set()}
    index = folder / _INDEX_FILE
    if not index.is_file():
        return {path.name: set() for path in _regular_files(folder, ["*.safetensors"])}
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
        raise ModelLoadError(f"{folder}: {_INDEX_FILE} names files that do not exist: {listing(absent)}")
    return files


def _unread(folder: Path) -> str:
    """A hint about unsupported files in `folder`; an empty string if there are none."""
    for pattern, fix in _UNSUPPORTED_FILES.items():
        if names := [path.name for path in _regular_files(folder, [pattern])]:
            return f"; it has {listing(names)}, which is not read: {fix}"
    return ""


def _regular_files(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """The files of `folder` with such names, sorted: no folders, pipes, devices or dangling links."""
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


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


def _with_floats(value: Any) -> Any:
    """A value of JSON with the numbers that _FLOATS names."""
    if isinstance(value, list):
        return [_with_floats(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and isinstance(name := value["__float__"], str) and name in _FLOATS:
        return _FLOATS[name]
    return {key: _with_floats(each) for key, each in value.items()}


def check_no_pointer(path: Path, start: bytes) -> None:
    """Raise ModelLoadError if a file with this start only says where git-lfs finds the real one."""
    if start.startswith(_LFS_POINTER):
        raise ModelLoadError(f"{path} {_LFS_FIX}")


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
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."


def listing(names: Iterable[str]) -> str:
    """The first names, for an error message, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - _MAX_LISTED} more" if len(listed) > _MAX_LISTED else ""
    return shortened(", ".join(listed[:_MAX_LISTED])) + more
