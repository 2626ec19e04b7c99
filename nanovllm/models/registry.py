"""What leads to a model: folders and hub ids; Checkpoint, what its files hold; and the tables of both.

Families and formats of files are doors. Opens no file before a checkpoint is asked.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from nanovllm import doors
from nanovllm.doors import Table
from nanovllm.models.config import ModelConfig, ModelFamily
from nanovllm.quantization.shards import WeightSource

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
MODELOPT_FILE = "hf_quant_config.json"
MODULES_FILE = "modules.json"  # of sentence-transformers, with the folders of modules
_MAX_MESSAGE = 4000  # characters of an error that quotes a file
_MAX_LISTED = 40  # names of one kind in an error message
_NO_HEAD = re.compile(r"(Text)?(Model|For(Sequence|Token)Classification)$|(?<=^Qwen2)For\w*RewardModel$")
SAMPLES = 16  # of a weight file, for its fingerprint, 64 KiB each
T = TypeVar("T")


class Checkpoint(ABC):
    """What a model's files hold: its config, its tokenizer and its tensors. A format of files is a subclass.

    Opens no file before it is asked. Every method may raise ModelLoadError that names the file.
    """

    absent: frozenset[str] = frozenset()  # tensors that an index lists and no file has, once opened
    states_ends = True  # whether its files list all tokens that end an answer

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    @abstractmethod
    def reads(cls, path: Path) -> bool:
        """Whether files at `path` are of this format, as far as their names say."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The content of config.json, or what the files say instead."""

    @abstractmethod
    def generation(self) -> dict[str, Any]:
        """The content of generation_config.json; empty if there is none."""

    def modelopt(self) -> dict[str, Any]:
        """The content of the file in which ModelOpt says how it has quantised; empty if there is none."""
        return {}

    @abstractmethod
    def tokenizer(self, read: Callable[[Path], T]) -> T:
        """Check the tokenizer's files, and return what `read` makes of a folder with them."""

    @abstractmethod
    def tensors(self) -> AbstractContextManager[Mapping[str, WeightSource]]:
        """All tensors by their names in transformers; opens every file, which checks its header and length.
        Within the context, indexing a tensor reads it."""

    @abstractmethod
    def files(self) -> tuple[list[Path], list[Path]]:
        """The small files and the weight files that loading reads."""

    def fingerprint(self) -> str:
        """A hash of small files as a whole, and of each weight file's name, size and SAMPLES pieces of it."""
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


_FAMILIES: Table[ModelFamily] = Table(doors.FAMILIES)
FORMATS: Table[type[Checkpoint]] = Table(doors.CHECKPOINTS)  # the first that reads a path takes it
_ELSEWHERE: Table[Callable[[str, Hub, str], Path]] = Table(doors.MODELS)  # asked if it is not here


def register_model(architecture: str, family: ModelFamily) -> None:
    """Load models with the name `architecture` in config.json's `architectures` as `family`."""
    if not isinstance(family, ModelFamily):
        raise TypeError(f"family must be a ModelFamily, not {family!r}")
    _FAMILIES[architecture] = family


def supported_architectures() -> list[str]:
    """Return the names that `get_family` knows, sorted."""
    return sorted(_FAMILIES)


def with_head(architecture: str) -> str:
    """The language model whose decoder `architecture` has, as Qwen3ForCausalLM of Qwen3Model; else itself."""
    whole = _NO_HEAD.sub("ForCausalLM", architecture)
    return whole if whole in _FAMILIES else architecture


def get_family(architecture: str, raw: Mapping[str, Any] | None = None) -> ModelFamily:
    """Return the family of `architecture`; ValueError with the supported names if there is none.

    raw: the content of config.json, for the error.
    """
    architecture = with_head(architecture)
    if architecture not in _FAMILIES:
        raise ValueError(
            f"architecture {architecture!r} is not supported{_kind(architecture, raw or {})}; "
            f"supported: {', '.join(supported_architectures())}. Use a model of one of these; if this one "
            "computes its layers like one of them, register_model of nanovllm.models.registry adds it"
        )
    return _FAMILIES[architecture]


def _kind(architecture: str, raw: Mapping[str, Any]) -> str:
    """What kind of model it is, if that is the reason why it is not supported."""
    if "moe" in architecture.lower() or {"num_experts", "num_local_experts", "n_routed_experts"} & raw.keys():
        return ", because it is a mixture of experts of another kind"
    if {"vision_config", "audio_config"} & raw.keys() or "ConditionalGeneration" in architecture:
        return ", because it reads images or sound, or has an encoder"
    return ""


@dataclass(frozen=True)
class Hub:
    """Options for the Hugging Face hub; None means the default of huggingface_hub."""

    revision: str | None = None  # a branch, tag or commit
    download_dir: str | None = None
    token: str | bool | None = None
    code: bool = False  # whether to download Python files too


def resolve_model_path(name: str | Path, hub: Hub = Hub(), kind: str = "model") -> Path:
    """Return the folder or file of a model: `name` itself, or the download of the hub id `name`.

    kind: "model", or "tokenizer" for a folder without weights. Raises ValueError if `name` is neither here
    nor a hub id, or here and with a revision; ModelLoadError if the download fails.
    """
    path = Path(os.path.expanduser(name))
    try:
        is_model = any(each.reads(path) for each in FORMATS.values())
    except OSError as error:  # its name is too long, for example
        raise ValueError(f"{kind} {str(name)!r} cannot be opened: {error.strerror}") from None
    if is_model:
        if hub.revision not in (None, "main"):
            option = "revision" if kind == "model" else "tokenizer_revision"
            raise ValueError(
                f"{option}={hub.revision!r} is for a hub id, and {kind} {str(name)!r} is a folder or file "
                "here, which has no revisions; leave it out"
            )
        return path
    if path.exists():
        what = "its files" if kind == "tokenizer" else f"{CONFIG_FILE} and the *.safetensors weights"
        raise ValueError(
            f"{kind} {str(name)!r} is a file; pass the folder that holds {what}, or a .gguf file"
        )
    return _ELSEWHERE["hub"](str(name), hub, kind)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The files of the model at `path`; nothing is opened yet."""
    path = Path(path)
    return next((each for each in FORMATS.values() if each.reads(path)), FORMATS["safetensors"])(path)


def load_model_config(
    folder: str | Path,
    generation: dict[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    quantization: str | None = None,
) -> ModelConfig:
    """Read config.json of a model folder.

    generation: the content of generation_config.json; None reads the folder's. overrides: values that replace
    those of config.json. quantization: as in `Config`.

    Raises ModelLoadError if config.json is missing or unreadable, ValueError if there is no such folder or
    the model is not supported.
    """
    checkpoint = open_checkpoint(folder := Path(folder))
    raw, overrides = checkpoint.config(), dict(overrides or {})
    if generation is None:
        generation = checkpoint.generation()
    architectures = overrides.get("architectures", raw.get("architectures"))
    if not isinstance(architectures, list) or [*map(type, architectures)] != [str]:
        raise ValueError(
            f"{folder / CONFIG_FILE}: architectures must name one model, not {shortened(architectures)}; "
            f"supported: {', '.join(supported_architectures())}"
        )
    try:
        family = get_family(architectures[0], raw)
        whole, modelopt = {**raw, **overrides}, {}
        if not any("quantization_config" in x for x in (whole, whole.get("text_config")) if type(x) is dict):
            modelopt = _modelopt(checkpoint)
        only_cache = modelopt.get("quant_algo") is None
        raw = raw if only_cache else {**raw, "quantization_config": {"quant_method": "modelopt", **modelopt}}
        config = family.model_config(architectures[0], raw, generation, quantization, overrides)
        if only_cache and modelopt.get("kv_cache_quant_algo"):
            config = replace(config, quant=config.quant.in_files(cache_scales=True))
    except ValueError as error:
        changed = f" (with hf_overrides={overrides!r})" if overrides else ""
        raise ValueError(f"{folder}: {shortened(error)}{changed}") from None
    is_whole = architectures[0] == with_head(architectures[0])
    return replace(config, has_head=is_whole or (config.tie_word_embeddings and not config.head))


def _modelopt(checkpoint: Checkpoint) -> dict[str, Any]:
    """What ModelOpt says in a file of its own that it has quantised; empty if there is none."""
    content = checkpoint.modelopt()
    stated = content.get("quantization")
    return {"quant_algo": "unknown", **(stated if isinstance(stated, dict) else {})} if content else {}


def shortened(message: object) -> str:
    """An error's message, cut if a file has made it long."""
    text = str(message)
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."


def listing(names: Iterable[str]) -> str:
    """The first names, for an error message, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - _MAX_LISTED} more" if len(listed) > _MAX_LISTED else ""
    return shortened(", ".join(listed[:_MAX_LISTED])) + more
