"""UpdateChecker: compares the tensors of an update with those of the model. Changes no weight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import torch

from nanovllm.models.registry import CONFIG_FILE
from nanovllm.models.weights import EMBEDDING, TIED_HEAD, WeightChecker, unpacked

_INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)  # of quantised weights


class UpdateChecker(WeightChecker):
    """Compares tensors one by one, as they come."""

    def accept(self, tensors: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each (name, tensor) of an update to load, after checking it: all or some of a checkpoint's,
        in any order. Raises TypeError or ValueError that names the tensor."""
        seen: set[str] = set()
        tied: dict[str, list[float]] = {}  # hashes of the LM head and its embedding
        for name, tensor in self._named(tensors):
            if name in seen:
                raise ValueError(f"{name} comes twice in one update")
            if self._shard(name) is None and not self._unexpected(name, tensor):
                continue
            self._check(name, tensor)
            seen.add(name)
            if self._tied and name in (TIED_HEAD, EMBEDDING):
                tied[name] = _hashes(tensor.detach())
                if any(values != tied[name] for values in tied.values()):
                    raise ValueError(
                        f"{TIED_HEAD} differs from {EMBEDDING}, but the model's config says that they are "
                        "the same (tie_word_embeddings)"
                    )
            if name in self._shards:
                yield name, tensor.detach()
        if TIED_HEAD in tied and EMBEDDING not in tied:
            raise ValueError(
                f"{TIED_HEAD} is {EMBEDDING} in this model (tie_word_embeddings); pass {EMBEDDING} too"
            )

    def _named(self, tensors: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """The pairs of an update, named as in a checkpoint."""
        for index, pair in enumerate(tensors):
            yield from unpacked(self._config, [named_tensor(index, pair)])

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        shard = self._shard(name)
        if shard is None and self._is_bias(name):
            raise ValueError(f"{name} is a bias that is not zero, and this module has none in {CONFIG_FILE}")
        if shard is None:
            near = get_close_matches(name, self._shards, n=1)
            hint = (
                f"did you mean {near[0]!r}?" if near else f"names are a checkpoint's, such as {EMBEDDING!r}"
            )
            raise ValueError(f"this model has no tensor {name!r}; {hint}")
        check_dense(name, tensor)
        if wrong := shard.wrong_dtype(tensor, update=True):
            accepted = shard.dtypes + shard.update_dtypes
            *others, last = (str(dtype).removeprefix("torch.") for dtype in accepted)
            raise ValueError(f"{name} is {wrong}; pass it as {', '.join(others)} or {last}")
        if wrong := shard.wrong_shape(tensor):
            raise ValueError(f"{name} has shape {wrong}")
        if wrong := shard.wrong_value(tensor):
            raise ValueError(f"{name} has {wrong}")


def _hashes(tensor: torch.Tensor) -> list[float]:
    """What tied tensors are compared by: hashes of rows, because the first tensor may be freed by now."""
    hashes = torch.hash_tensor(tensor, dim=1).view(torch.int64)
    return [*hashes.tolist(), *map(float, torch.aminmax(tensor))]


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """ValueError unless the tensor is whole, dense and of numbers; a shard knows which dtypes it accepts."""
    if not tensor.is_floating_point() and tensor.dtype not in _INTEGERS:
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
