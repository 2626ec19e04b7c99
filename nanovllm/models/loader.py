"""Finds a checkpoint, reads its config, and loads its weights, all or nothing.

Checks every file's header before it copies the first weight. Each rank reads only its own slices.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nanovllm.attention.backends import ReferenceBackend
from nanovllm.distributed.group import TPGroup
from nanovllm.errors import ModelLoadError
from nanovllm.layers.weights import WeightOptions
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.files import (
    CONFIG_FILE,
    GENERATION_FILE,
    INDEX_FILE,
    LFS_POINTER,
    check_no_pointer,
    listing,
    read_json,
    regular_files,
    shortened,
    weight_files,
)
from nanovllm.models.registry import get_family, supported_architectures
from nanovllm.quantization.shards import FLOATS, WeightSlice

TOKENIZER_PATTERNS = ["*.json", "*.jinja", "*.model", "*.txt"]
HUB_IGNORED = ["*/*", "consolidated*"]  # other formats of the same weights
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
TIED_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
UNSUPPORTED_FILES = {  # unsupported files, with what to do instead
    "*.bin": "convert them to safetensors",
    "*.pth": "convert them to safetensors",
    "*.gguf": "pass the safetensors checkpoint that they were made from",
    "adapter_config.json": "merge the adapter into its base model first (peft's merge_and_unload)",
}
LAYER = re.compile(r"model\.layers\.(\d+)\.")
ROTARY = ".rotary_emb.inv_freq"  # in old checkpoints; computed from the config


@dataclass(frozen=True)
class Hub:
    """Options for the Hugging Face hub; None means the default of huggingface_hub."""

    revision: str | None = None  # a branch, tag or commit
    download_dir: str | None = None
    token: str | bool | None = None
    code: bool = False  # whether to download Python files too


def resolve_model_path(name: str | Path, hub: Hub = Hub(), kind: str = "model") -> Path:
    """Return the folder of a model: `name` itself, or the download of the hub id `name`.

    kind: "model", or "tokenizer" for a folder without weights. Raises ValueError if `name` is neither a
    folder nor a hub id, or a folder with a revision; ModelLoadError if the download fails.
    """
    path = Path(os.path.expanduser(name))
    try:
        is_folder = path.is_dir()
    except OSError as error:  # its name is too long, for example
        raise ValueError(f"{kind} {str(name)!r} cannot be opened: {error.strerror}") from None
    if is_folder:
        if hub.revision not in (None, "main"):
            option = "revision" if kind == "model" else "tokenizer_revision"
            raise ValueError(
                f"{option}={hub.revision!r} is for a hub id, and {kind} {str(name)!r} is a folder, which has "
                "no revisions; leave it out"
            )
        return path
    if path.exists():
        if path.suffix == ".gguf":
            raise ValueError(
                f"{kind} {str(name)!r} is a GGUF file, which is not read; pass the folder or hub id of the "
                "safetensors checkpoint that it was made from"
            )
        what = "its files" if kind == "tokenizer" else f"{CONFIG_FILE} and the *.safetensors weights"
        raise ValueError(f"{kind} {str(name)!r} is a file; pass the folder that holds {what}")
    if not HUB_ID.fullmatch(str(name)):
        raise ValueError(
            f"{kind} folder {str(path)!r} does not exist, and it is not a hub id (organisation/name)"
        )
    patterns = [*TOKENIZER_PATTERNS, *(["*.safetensors"] if kind == "model" else [])]
    import huggingface_hub  # here, because most models are folders and this takes half a second

    try:
        found = huggingface_hub.snapshot_download(
            str(name),
            revision=hub.revision,
            cache_dir=hub.download_dir,
            token=hub.token,
            allow_patterns=[*patterns, *(["*.py"] if hub.code else [])],
            ignore_patterns=HUB_IGNORED,
        )
    except Exception as error:  # errors of the hub client, its HTTP library or the system
        fix = "" if "/" in str(name) else "; a hub id mostly has an organisation, such as Qwen/Qwen3-0.6B"
        raise ModelLoadError(
            f"{kind} {str(name)!r} is not a folder here{fix}, and the Hugging Face hub did not deliver it "
            f"({type(error).__name__}: {error}). Check the spelling and the network (with HF_HUB_OFFLINE=1 "
            "only models downloaded before are found), or download it on another machine with "
            f"`hf download {name} --local-dir FOLDER` and pass the folder"
        ) from error
    return Path(found)


def load_generation_config(folder: str | Path) -> dict[str, Any]:
    """Read generation_config.json of a model folder; empty if there is none.

    Raises ModelLoadError if it is unreadable.
    """
    file = Path(folder) / GENERATION_FILE
    return read_json(file) if file.is_file() else {}


def load_model_config(
    folder: str | Path,
    generation: dict[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """Read config.json of a model folder.

    generation: the content of generation_config.json; None reads the folder's. overrides: values that replace
    those of config.json.

    Raises ModelLoadError if config.json is missing or unreadable, ValueError if there is no such folder or
    the model is not supported.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"model folder {str(folder)!r} does not exist")
    if not (folder / CONFIG_FILE).is_file():
        raise ModelLoadError(
            f"{folder} has no {CONFIG_FILE}, as a model folder in Hugging Face format has{_unread(folder)}"
        )
    raw = read_json(folder / CONFIG_FILE) | dict(overrides or {})
    if generation is None:
        generation = load_generation_config(folder)
    architectures = raw.get("architectures")
    if (
        not isinstance(architectures, list)
        or len(architectures) != 1
        or not isinstance(architectures[0], str)
    ):
        raise ValueError(
            f"{folder / CONFIG_FILE}: architectures must name one model, not {shortened(architectures)}; "
            f"supported: {', '.join(supported_architectures())}"
        )
    try:
        return get_family(architectures[0], raw).model_config(architectures[0], raw, generation)
    except ValueError as error:
        changed = f" (with hf_overrides={dict(overrides)!r})" if overrides else ""
        raise ValueError(f"{folder}: {shortened(error)}{changed}") from None


def check_weights(config: ModelConfig, folder: str | Path) -> None:
    """Check the headers of the *.safetensors files in `folder` against `config`, without reading weights.

    Raises ModelLoadError like `load_weights`, so that a wrong checkpoint is found before a device is used.
    """
    with ExitStack() as stack:
        tensors = _open_checkpoint(Path(folder), stack)
        _check_layers(
            config, tensors, Path(folder)
        )  # first, because the model is as large as the config says
        _checked_tensors(_unallocated(config, TPGroup(), torch.float32), tensors, Path(folder))


def weight_bytes(config: ModelConfig, tp: TPGroup, dtype: torch.dtype) -> int:
    """Return the size of a rank's weights in bytes; padding makes it the same on every rank.

    Computed from one layer, because all are alike. Raises ValueError if `tp` cannot split the model.
    """
    model = _unallocated(replace(config, num_layers=1), tp, dtype)
    one, layer = (sum(each.nbytes for each in part.parameters()) for part in (model, model.model.layers))
    return one + (config.num_layers - 1) * layer


def _unallocated(config: ModelConfig, tp: TPGroup, dtype: torch.dtype) -> DecoderForCausalLM:
    """The model with shapes but without memory."""
    options = WeightOptions(dtype, torch.device("meta"))
    return DecoderForCausalLM(config, tp, ReferenceBackend(), 1, options)


def load_weights(
    model: DecoderForCausalLM,
    folder: str | Path,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Fill every parameter of `model`, each exactly once, from the *.safetensors files in `folder`.

    Can be called again, with the same or other weights. check: called between tensors; may raise to give up.
    Raises ModelLoadError that names all missing, unexpected, misshaped and non-float tensors; the model is
    then unchanged.
    """
    slots = model.weight_slots()
    with ExitStack() as stack:
        found = _open_checkpoint(Path(folder), stack)
        _check_layers(model.config, found, Path(folder))
        tensors, tied_head = _checked_tensors(model, found, Path(folder))
        if tied_head is not None and not torch.equal(tied_head[:], tensors[EMBEDDING][:]):
            raise ModelLoadError(
                f"{folder}: {TIED_HEAD} differs from {EMBEDDING}, but {CONFIG_FILE} says they are the same; "
                "set tie_word_embeddings to false there to use both"
            )
        for name, source in tensors.items():
            check()
            layer, shard = slots[name]
            layer.load_weight(shard.param, source, shard.shard_id)
    model.finish_loading()


def init_dummy_weights(
    model: DecoderForCausalLM,
    seed: int,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Fill `model` with random weights, normal(0, 0.02) and 1 for norms, created on its device.

    Each tensor depends only on the seed and its name. Whole tensors are drawn and then split, so any number
    of ranks gets the same model. check: as in `load_weights`.
    """
    for name, (layer, shard) in model.weight_slots().items():
        check()
        parameter = layer.get_parameter(shard.param)
        dtype = parameter.dtype if parameter.dtype in FLOATS else torch.float32
        whole = torch.empty(shard.shape, dtype=dtype, device=parameter.device)
        if shard.dummy is not None:
            whole.fill_(shard.dummy)
        else:
            generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode(), seed % 2**32))
            whole.normal_(0.0, 0.02, generator=generator)
        layer.load_weight(shard.param, whole, shard.shard_id)
    model.finish_loading()


def _check_layers(config: ModelConfig, tensors: Mapping[str, WeightSlice], folder: Path) -> None:
    """Raise ModelLoadError if the checkpoint has fewer layers than its config says: a model of so many layers
    takes long to build, even without memory."""
    layers = {match[1] for match in map(LAYER.match, tensors) if match}
    if config.num_layers > len(layers):
        has = f"{len(layers)} layers" if layers else f"no model.layers.N, but {listing(tensors) or 'nothing'}"
        raise ModelLoadError(
            f"{folder}: {CONFIG_FILE} says num_hidden_layers={config.num_layers}, and the weights have "
            f"{has}; use the files of one model"
        )


def _checked_tensors(
    model: DecoderForCausalLM, found: Mapping[str, WeightSlice], folder: Path
) -> tuple[dict[str, WeightSlice], WeightSlice | None]:
    """Check that a checkpoint holds the tensors of `model`; return these, and a tied head if there is one."""
    tensors: dict[str, Any] = dict(found)
    tied_head = tensors.pop(TIED_HEAD, None) if model.config.tie_word_embeddings else None
    for name in [name for name in tensors if name.endswith(ROTARY)]:
        del tensors[name]
    shards = {name: shard for name, (_, shard) in model.weight_slots().items()}
    both = [(name, shard, tensors[name]) for name, shard in shards.items() if name in tensors]
    problems = {
        "missing": [name for name in shards if name not in tensors],
        "unexpected": [name for name in tensors if name not in shards],
        "wrong shape": [
            f"{name} is {is_}" for name, shard, tensor in both if (is_ := shard.wrong_shape(tensor))
        ],
        "not floating point (quantised checkpoints are not supported)": [
            f"{name} is {is_}" for name, shard, tensor in both if (is_ := shard.wrong_dtype(tensor))
        ],
    }
    wrong = [f"{len(names)} {kind}: {listing(names)}" for kind, names in problems.items() if names]
    if wrong:
        raise ModelLoadError(f"{folder}: the weights do not match {CONFIG_FILE}. " + ". ".join(wrong))
    return tensors, tied_head


def _open_checkpoint(folder: Path, stack: ExitStack) -> dict[str, WeightSlice]:
    """Open every weight file, which checks its header and length, and return the tensors by name."""
    tensors: dict[str, WeightSlice] = {}
    owners: dict[str, str] = {}
    files = weight_files(folder)
    if not files:
        raise ModelLoadError(f"{folder} holds no *.safetensors weights{_unread(folder)}")
    for file_name, indexed in files.items():
        path = folder / file_name
        try:
            opened = stack.enter_context(safe_open(path, framework="pt"))
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
        except (OSError, SafetensorError) as error:
            with suppress(OSError), path.open("rb") as file:
                check_no_pointer(path, file.read(len(LFS_POINTER)))
            raise ModelLoadError(
                f"{path} cannot be read, is it complete? {type(error).__name__}: {shortened(error)}"
            ) from error
        absent = sorted(indexed - slices.keys())
        if absent:
            raise ModelLoadError(f"{path} lacks tensors that {INDEX_FILE} lists for it: {listing(absent)}")
        twice = sorted(slices.keys() & owners.keys())
        if twice:
            raise ModelLoadError(f"{path} has tensors that {owners[twice[0]]} has too: {listing(twice)}")
        owners.update(dict.fromkeys(slices, file_name))
        tensors.update(slices)
    return tensors


def _unread(folder: Path) -> str:
    """A hint about unsupported files in `folder`; an empty string if there are none."""
    for pattern, fix in UNSUPPORTED_FILES.items():
        if names := [path.name for path in regular_files(folder, [pattern])]:
            return f"; it has {listing(names)}, which is not read: {fix}"
    return ""
