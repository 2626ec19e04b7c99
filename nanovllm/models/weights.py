"""Fills a model's weights from a checkpoint, all or nothing.

A checker compares names, shapes and dtypes before anything is loaded. Each rank reads only its own slices.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nanovllm.attention.reference import ReferenceBackend
from nanovllm.errors import ModelLoadError
from nanovllm.layers.stream import Group
from nanovllm.layers.weights import allocate, finish_loading, weight_slots
from nanovllm.models.config import Mixture, ModelConfig
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.registry import CONFIG_FILE, listing, open_checkpoint
from nanovllm.quantization.shards import BARE, WeightOptions, WeightShard, WeightSource

TIED_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_TIE = " (hf_overrides={'tie_word_embeddings': True} takes the embedding)"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# In old checkpoints; computed from the config.
_ROTARY = re.compile(r"\.rotary_emb(_local)?\.(original_)?(inv_freq|cos_cached|sin_cached)$")
logger = logging.getLogger("nanovllm")


class WeightChecker:
    """Compares tensors with those that a checkpoint of `model` must hold. Changes no weight."""

    def __init__(self, model: DecoderForCausalLM) -> None:
        self._shards = {name: shard for name, (_, shard) in weight_slots(model).items()}
        self._modules = {name.rpartition(".")[0] for name in self._shards}
        self._tied = model.config.tie_word_embeddings
        self._config = model.config

    def check(self, tensors: Mapping[str, WeightSource], folder: Path) -> dict[str, WeightSource]:
        """Return those of a whole checkpoint's tensors that are loaded. Raises ModelLoadError that names all
        that are missing, unexpected, misshaped or of a wrong dtype."""
        both = [(name, shard, tensors[name]) for name, shard in self._shards.items() if name in tensors]
        problems = {
            "missing": [name + _TIE * (name == TIED_HEAD) for name in self._shards if name not in tensors],
            "unexpected": [
                f"{name}{self._why(name)}" for name, each in tensors.items() if self._unexpected(name, each)
            ],
            "wrong shape": [
                f"{name} is {is_}" for name, shard, tensor in both if (is_ := shard.wrong_shape(tensor))
            ],
            "of a dtype that does not fit its quantization_config": [
                f"{name} is {is_}" for name, shard, tensor in both if (is_ := shard.wrong_dtype(tensor))
            ],
        }
        if not any(problems.values()):
            problems["with wrong values"] = [
                f"{name} has {is_}" for name, shard, tensor in both if (is_ := shard.wrong_value(tensor))
            ]
        found = [f"{len(names)} {kind}: {listing(names)}" for kind, names in problems.items() if names]
        if found:
            raise ModelLoadError(f"{folder}: the weights do not match {CONFIG_FILE}. " + ". ".join(found))
        return {name: source for name, source in tensors.items() if name in self._shards}

    def _shard(self, name: str) -> WeightShard | None:
        """What a tensor of this name must fit; None if the model has no such tensor."""
        return self._shards.get(EMBEDDING if self._tied and name == TIED_HEAD else name)

    def _unexpected(self, name: str, source: WeightSource) -> bool:
        """Whether this is a tensor that the model does not have, and that might change its results."""
        return not self.knows(name) and (not self._is_bias(name) or bool(source[...].any()))  # NaN counts

    def knows(self, name: str | None) -> bool:
        """Whether it is the name of a tensor that the model has, or that it leaves out (None)."""
        return name is None or self._is_unneeded(name) or self._shard(name) is not None

    def _is_unneeded(self, name: str) -> bool:
        """Whether no value of a tensor of this name changes the model's results."""
        return _ROTARY.search(f".{name}") is not None or self._config.quant.leaves_out(name)

    def _is_bias(self, name: str) -> bool:
        """Whether it is that of a module that has none here. Older GPTQ files have such zeros."""
        module, _, param = name.rpartition(".")
        return param == "bias" and module in self._modules

    def _why(self, name: str) -> str:
        return " (a bias that is not zero)" if self._is_bias(name) else ""


def unpacked(config: ModelConfig, pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The tensors of files by the model's names; see `FileNames.tensors`."""
    for name, tensor in pairs:
        yield from config.names.tensors(name, tensor, config.quant.packed_rows)


def _by_name(config: ModelConfig, stored: Mapping[str, WeightSource]) -> dict[str, WeightSource]:
    """The tensors of a checkpoint by the model's names. ModelLoadError if two have one name."""
    found: dict[str, WeightSource] = {}
    for stored_name, source in stored.items():
        for name, tensor in unpacked(config, [(stored_name, source)]):
            if name in found:
                raise ModelLoadError(
                    f"{stored_name} is {name}, of which the files have another tensor; use one"
                )
            found[name] = tensor
    return found


def find_head(config: ModelConfig, folder: str | Path) -> ModelConfig:
    """The config, with `has_head` as the files in `folder` say. Those of a bare decoder, whose names lack
    "model.", may have no LM head; elsewhere a head that is missing is an error of the files."""
    if config.tie_word_embeddings:
        return config
    with open_checkpoint(folder).tensors() as found:
        names = {name: config.names.named(name) for name in found}
    has_head = any((name or "").startswith("lm_head.") for name in names.values())
    is_bare = any(name is not None and name == f"{BARE}{stored}" for stored, name in names.items())
    return replace(config, has_head=has_head or (config.has_head and not is_bare))


def _check_layers(config: ModelConfig, tensors: Mapping[str, WeightSource], folder: Path) -> None:
    """Raise ModelLoadError if the checkpoint has fewer layers than its config says: a model of so many layers
    takes long to build, even without memory."""
    layers = {match[1] for match in map(_LAYER.match, tensors) if match}
    if config.num_layers > len(layers):
        has = f"{len(layers)} layers" if layers else f"no model.layers.N, but {listing(tensors) or 'nothing'}"
        raise ModelLoadError(
            f"{folder}: {CONFIG_FILE} says num_hidden_layers={config.num_layers}, and the weights have "
            f"{has}; use the files of one model"
        )


def check_weights(config: ModelConfig, folder: str | Path) -> None:
    """Check the headers of the weight files in `folder` against `config`, without reading weights.

    Raises ModelLoadError like `load_weights`, so that a wrong checkpoint is found before a device is used.
    """
    checkpoint = open_checkpoint(folder)
    with checkpoint.tensors() as found:
        tensors = _by_name(config, found)
        _check_layers(config, tensors, Path(folder))  # first: the model is as large as the config says
        checker = WeightChecker(_unallocated(config, Group(), torch.float32))
        checker.check(tensors, Path(folder))
        absent = sorted(name for name in checkpoint.absent if not checker.knows(config.names.named(name)))
        if absent:
            logger.warning(
                "%s: its index lists tensors that no file has, and that %s does not need: %s",
                *(folder, config.architecture, listing(absent)),
            )


def weight_bytes(config: ModelConfig, tp: Group, dtype: torch.dtype) -> int:
    """Return the size of a rank's weights in bytes; padding makes it the same on every rank.

    Computed from one layer of each kind. Raises ValueError if `tp` cannot split the model.
    """
    whole: list[tuple[Mixture | None, int]] = [(None, config.num_layers)]
    kinds = whole if config.moe is None else config.moe.kinds(config.num_layers)
    layers = rest = 0
    for moe, count in kinds:
        model = _unallocated(replace(config, num_layers=1, moe=moe), tp, dtype)
        one, layer = (sum(each.nbytes for each in part.parameters()) for part in (model, model.model.layers))
        layers, rest = layers + count * layer, one - layer
    return rest + layers


def _unallocated(config: ModelConfig, tp: Group, dtype: torch.dtype) -> DecoderForCausalLM:
    """The model with shapes but without memory."""
    model = DecoderForCausalLM(config, tp, ReferenceBackend(), 1)
    allocate(model, WeightOptions(dtype, torch.device("meta")), config.quant)
    return model


def load_weights(
    model: DecoderForCausalLM, folder: str | Path, check: Callable[[], None] = lambda: None
) -> None:
    """Fill every parameter of `model`, each exactly once, from the checkpoint in `folder`.

    Can be called again, with the same or other weights. check: called between tensors; may raise to give up.
    Raises ModelLoadError that names all missing, unexpected, misshaped and non-float tensors; the model is
    then unchanged.
    """
    slots = weight_slots(model)
    with open_checkpoint(folder).tensors() as stored:
        found = _by_name(model.config, stored)
        _check_layers(model.config, found, Path(folder))
        tensors = WeightChecker(model).check(found, Path(folder))
        has_head = model.config.tie_word_embeddings and TIED_HEAD in found
        if has_head and not torch.equal(found[TIED_HEAD][:], found[EMBEDDING][:]):
            raise ModelLoadError(
                f"{folder}: {TIED_HEAD} differs from {EMBEDDING}, but {CONFIG_FILE} says they are the same; "
                "to use both, set tie_word_embeddings to false there or by hf_overrides"
            )
        for name, source in tensors.items():
            check()
            layer, shard = slots[name]
            try:
                layer.load(shard, source)
            except ValueError as error:
                raise ModelLoadError(f"{folder}: {name}: {error}") from None
    finish_loading(model)
