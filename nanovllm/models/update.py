"""WeightUpdate: checks tensors that are to replace those of a checkpoint, before they are loaded.

Knows names, shapes and dtypes. Changes no weight, and knows no rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import torch

from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.loader import EMBEDDING, ROTARY, TIED_HEAD


class WeightUpdate:
    """The tensors of one update: all or some of a checkpoint's, in any order."""

    def __init__(self, model: DecoderForCausalLM) -> None:
        self._slots = model.weight_slots()
        self._tied = model.config.tie_word_embeddings
        self._seen: set[str] = set()
        self._tied_values: dict[str, list[float]] = {}

    def accept(self, tensors: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each (name, tensor) to load, after checking it. Raises TypeError or ValueError that names the
        tensor."""
        for index, pair in enumerate(tensors):
            name, tensor = named_tensor(index, pair)
            if name.endswith(ROTARY):
                continue  # computed from the config, as in a load of a checkpoint
            self._check(name, tensor)
            self._seen.add(name)
            if self._tied and name in (TIED_HEAD, EMBEDDING):
                self._check_tied(name, tensor)
            if name in self._slots:
                yield name, tensor.detach()
        if TIED_HEAD in self._tied_values and EMBEDDING not in self._tied_values:
            raise ValueError(
                f"{TIED_HEAD} is {EMBEDDING} in this model (tie_word_embeddings); pass {EMBEDDING} too"
            )

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        if name not in self._slots and not (self._tied and name == TIED_HEAD):
            near = get_close_matches(name, self._slots, n=1)
            hint = (
                f"did you mean {near[0]!r}?" if near else f"names are a checkpoint's, such as {EMBEDDING!r}"
            )
            raise ValueError(f"this model has no tensor {name!r}; {hint}")
        if name in self._seen:
            raise ValueError(f"{name} comes twice in one update")
        check_dense(name, tensor)
        _, shard = self._slots[EMBEDDING if name == TIED_HEAD and self._tied else name]
        if wrong := shard.wrong_dtype(tensor):
            *others, last = (str(dtype).removeprefix("torch.") for dtype in shard.dtypes)
            raise ValueError(f"{name} is {wrong}; pass it as {', '.join(others)} or {last}")
        if wrong := shard.wrong_shape(tensor):
            raise ValueError(f"{name} has shape {wrong}")

    def _check_tied(self, name: str, tensor: torch.Tensor) -> None:
        """Check that the tied tensors are equal, by hashes of rows: the first one may be freed by now."""
        tensor = tensor.detach()
        hashes = torch.hash_tensor(tensor, dim=1).view(torch.int64)
        self._tied_values[name] = [*hashes.tolist(), *map(float, torch.aminmax(tensor))]
        if any(values != self._tied_values[name] for values in self._tied_values.values()):
            raise ValueError(
                f"{TIED_HEAD} differs from {EMBEDDING}, but the model's config says that they are the same "
                "(tie_word_embeddings)"
            )


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """ValueError unless the tensor is whole, dense and of floats; a shard knows which floats it accepts."""
    if not tensor.is_floating_point():
        raise ValueError(f"{name} is {tensor.dtype}; pass it as bfloat16, float16, float32 or float64")
    if tensor.is_meta or tensor.layout is not torch.strided or hasattr(tensor, "full_tensor"):
        raise ValueError(
            f"{name} is a {type(tensor).__name__} of layout {tensor.layout} on {tensor.device}; pass a "
            "whole, dense tensor (of a DTensor: full_tensor())"
        )


def named_pairs(tensors: Any) -> Iterable[Any]:
    """The pairs of a dict, or the iterable itself; TypeError for anything else."""
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    if not isinstance(pairs, Iterable):
        raise TypeError(f"named_tensors must be a dict or pairs (name, tensor), not {type(tensors).__name__}")
    return pairs


def named_tensor(index: int, pair: Any) -> tuple[str, torch.Tensor]:
    """Return element `index` of an update; TypeError unless it is (name, tensor)."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
        raise TypeError(
            f"element {index} of the tensors must be (name, tensor), not {type(pair).__name__}; pass a "
            "dict of them, such as model.state_dict(), or pairs"
        )
    name, tensor = pair
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
    return name, tensor
