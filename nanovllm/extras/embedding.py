"""EmbeddingDefaults: how sentence-transformers' files in a model's folder make embeddings of hidden states.

Reads modules.json and what it names. Computes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from nanovllm.errors import ModelLoadError
from nanovllm.formats.json_files import read_json, read_json_list
from nanovllm.models.config import ModelConfig
from nanovllm.models.registry import MODULES_FILE, shortened

_logger = logging.getLogger("nanovllm")

PROMPTS_FILE = "config_sentence_transformers.json"
# Each with the key of the most tokens of a text: of versions before 6, and of later ones.
_LENGTHS = (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length"))
_POOLINGS = {"lasttoken": "last", "mean": "mean"}  # their names here
_OLDER_NAMES = {  # keys with true or false, of versions before 6
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True)
class EmbeddingDefaults:
    """What `LLM.embed` does where its caller does not say it."""

    pooling: str = "last"  # or "mean"
    normalize: bool = True
    problem: str | None = None  # why the files' embeddings cannot be computed
    note: str | None = None  # what the files say that is not done
    cut: int | None = None  # sentence-transformers uses so many tokens of a text


def embedding_defaults(folder: Path) -> EmbeddingDefaults:
    """Read the files of a model; without modules.json the last token's hidden state is normalised.

    Raises ModelLoadError for a file that is malformed.
    """
    file = folder / MODULES_FILE
    if not file.is_file():
        return EmbeddingDefaults()
    pooling, normalize, problem = "", False, None
    for module in read_json_list(file):
        kind = str(module.get("type")).rpartition(".")[2] if isinstance(module, dict) else repr(module)
        own = folder / _relative(file, module) / "config.json" if kind in ("Pooling", "Normalize") else None
        settings = {} if own is None or not own.is_file() else read_json(own)
        if kind == "Pooling":
            pooling, found = _pooling(settings)
            problem = problem or (found and f"{own}: {found}")
        elif kind == "Normalize":
            normalize = True
            for key in ("module_input_name", "module_output_name"):
                if settings.get(key) not in (None, "sentence_embedding"):
                    problem = problem or f"{own}: {key} {settings[key]!r} is not supported"
        elif kind not in ("Transformer", "Dropout"):  # dropout does nothing outside training
            problem = problem or f"{file}: a module of type {shortened(repr(kind))} is not supported"
    problem = problem or (None if pooling else f"{file} has no module of type 'Pooling'")
    lower = _optional(folder / _LENGTHS[0][0]).get("do_lower_case")
    problem = problem or (f"{folder / _LENGTHS[0][0]}: do_lower_case is not supported" if lower else None)
    lengths = (_optional(folder / name).get(key) for name, key in _LENGTHS)
    cut = next((each for each in lengths if isinstance(each, int) and each > 0), None)
    return EmbeddingDefaults(pooling or "last", normalize, problem, _note(folder), cut)


def read_embedding_defaults(path: Path, model_config: ModelConfig) -> EmbeddingDefaults:
    """How the files in `path` make embeddings. ValueError if the model can do nothing else, and they ask for
    what is not supported."""
    found = embedding_defaults(path)
    if found.problem and not (model_config.has_head or model_config.head):
        raise ValueError(f"{found.problem}, and this model has no LM head, so it only makes embeddings")
    if found.note:
        _logger.warning("%s", found.note)
    if (found.cut or model_config.longest) < model_config.longest:
        _logger.warning(
            "sentence-transformers' files cut texts off after %d tokens, and embed() does not; pass shorter "
            "texts for the same embeddings",
            found.cut,
        )
    return found


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _relative(file: Path, module: Mapping[str, Any]) -> str:
    """The folder of a module, within that of the model."""
    path = module.get("path", "")
    if not isinstance(path, str) or PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise ModelLoadError(f"{file}: path must be a folder within the model's, not {path!r}")
    return path


def _pooling(settings: Mapping[str, Any]) -> tuple[str, str]:
    """The pooling, and what is not supported of it; empty if all is."""
    stated = settings.get("pooling_mode")
    if stated is None:
        stated = [mode for key, mode in _OLDER_NAMES.items() if settings.get(key)] or ["mean"]
    modes = stated if isinstance(stated, list) else [stated]
    supported = f"supported: {', '.join(map(repr, _POOLINGS))}"
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in _POOLINGS:
        return "last", f"pooling_mode {shortened(repr(stated))} is not supported; {supported}"
    return _POOLINGS[modes[0]], ""


def _note(folder: Path) -> str | None:
    """A warning of a text that sentence-transformers puts before every text."""
    settings = _optional(folder / PROMPTS_FILE)
    name, prompts = settings.get("default_prompt_name"), settings.get("prompts")
    prompt = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    if not prompt:
        return None
    return (
        f"{PROMPTS_FILE} has default_prompt_name {name!r}: sentence-transformers puts its prompt, "
        f"{shortened(repr(prompt))}, before every text, and embed() does not; put it there yourself"
    )
