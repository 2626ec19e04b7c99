"""SafetensorsCheckpoint: a model folder as transformers writes it, with config.json and *.safetensors.

Only regular files count, also through links, as in a hub cache. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from nanovllm.errors import ModelLoadError
from nanovllm.formats.json_files import (
    LFS_POINTER,
    MAX_VOCABULARY_BYTES,
    check_no_pointer,
    check_size,
    read_json,
    with_floats,
)
from nanovllm.models.registry import (
    CONFIG_FILE,
    GENERATION_FILE,
    MODELOPT_FILE,
    MODULES_FILE,
    Checkpoint,
    T,
    listing,
    shortened,
)
from nanovllm.quantization.shards import WeightSource

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
_UNSUPPORTED_FILES = {  # unsupported files, with what to do instead
    "*.bin": "convert them to safetensors",
    "*.pth": "convert them to safetensors",
    "*.gguf": "pass the path of such a file as the model",
    "adapter_config.json": "merge the adapter into its base model first (peft's merge_and_unload)",
}


class SafetensorsCheckpoint(Checkpoint):
    """A folder in Hugging Face format with *.safetensors files."""

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
        content: dict[str, Any] = with_floats(read_json(self.path / CONFIG_FILE))
        return content

    def generation(self) -> dict[str, Any]:
        """The content of generation_config.json; empty if there is none."""
        file = self.path / GENERATION_FILE
        content: dict[str, Any] = with_floats(read_json(file)) if file.is_file() else {}
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
                check_size(path, MAX_VOCABULARY_BYTES)
                with path.open("rb") as file:
                    check_no_pointer(path, file.read(len(LFS_POINTER)))
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
                    check_no_pointer(path, file.read(len(LFS_POINTER)))
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
