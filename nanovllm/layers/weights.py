"""WeightLayer: a module that declares its weights. `allocate` gives all layers of a model their memory, which
tensors of a checkpoint fill in any order, any number of times.

A layer declares which part of which tensor this rank owns. Nothing here opens a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from nanovllm.kernels.kinds import Kinds
from nanovllm.kernels.matmul import is_aligned
from nanovllm.quantization.base import Kind, LinearMethod
from nanovllm.quantization.config import QuantConfig
from nanovllm.quantization.shards import WeightMethod, WeightOptions, WeightShard, WeightSource

# A rank's part of the rows or columns of a weight: how many there are in all, its first, and how many it has.
Part = tuple[int, int, int]


class WeightLayer(nn.Module):
    """Has no memory before `allocate`. Then its parameters are uninitialised until each of `shards` is
    loaded."""

    method: LinearMethod  # of the weight that was declared with a kind
    options: WeightOptions
    deterministic_needs_alignment = True  # without a method; see `LinearMethod`

    def __init__(self) -> None:
        super().__init__()
        self.shards: dict[WeightShard, WeightMethod | None] = {}  # to be loaded, and by which method
        self._declared: list[tuple[tuple[int, ...], list[WeightShard], Kind | None]] = []

    def declare(self, shape: tuple[int, ...], shards: list[WeightShard], kind: Kind | None = None) -> None:
        """Declare a parameter of `shape`, of which this rank fills `shards`.

        kind: of a weight [N, K], which `method` stores; None: the parameter is in the model's dtype.
        """
        self._declared.append((shape, shards, kind))

    def allocate(self, path: str, options: WeightOptions, quant: QuantConfig) -> None:
        """Create the parameters. path: of this layer in its model. Raises ValueError that names the weight,
        such as for a part that a rank cannot hold."""
        self.options = options
        for shape, shards, kind in self._declared:
            if kind is not None:
                names = [shard.module_name(path) for shard in shards]
                self.method, *others = (quant.method(name, kind) for name in names)
                same = type(self.method), vars(self.method)
                if any((type(other), vars(other)) != same for other in others):
                    raise ValueError(f"{', '.join(names)} are one product; quantise them in the same way")
                self.method = self.method.on(shape, options, kind)
                _check_kind(names[0], kind, type(self.method))
                with named(", ".join(names)):
                    created = self.method.create(self, shape, shards, options)
                self.shards |= dict.fromkeys(created, self.method)
            else:
                data = torch.empty(shape, dtype=options.dtype, device=options.device)
                self.register_parameter(shards[0].param, nn.Parameter(data, requires_grad=False))
                self.shards |= dict.fromkeys(shards)

    def load(self, shard: WeightShard, source: WeightSource) -> None:
        """Copy this rank's part of `source`, a whole checkpoint tensor that `shard` fits, to its place.

        If `source` is a slice of a file, only that part is read. Values are cast to the parameter's dtype.
        Can be called again at any time; call `finish_loading` before the layer is used.
        """
        if (method := self.shards[shard]) is not None:
            method.load(shard, source)
        else:
            shard.copy(source, self.get_parameter(shard.param))


class LinearLayer(WeightLayer):
    """A weight [N, K], multiplied by a `LinearMethod`, and an optional bias [N]; both are given as shards."""

    bias: torch.Tensor | None

    def __init__(
        self, shape: tuple[int, int], weight: list[WeightShard], bias: list[WeightShard] | None
    ) -> None:
        super().__init__()
        self.declare(shape, weight, "linear")
        self.register_parameter("bias", None)
        if bias is not None:
            self.declare(shape[:1], bias)


class VocabLayer(WeightLayer):
    """A weight [padded vocabulary / ranks, hidden_size]: the embedding or the LM head."""

    def __init__(self, vocab_size: int, rank: int, ranks: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.rows = -(-vocab_size // ranks)
        self.first_id = min(rank * self.rows, vocab_size)

    def declare_rows(self, rows: int, hidden_size: int, kind: Kind) -> None:
        owned = min(self.rows, self.vocab_size - self.first_id)
        shard = WeightShard("weight", None, (self.vocab_size, hidden_size), 0, self.first_id, owned, 0)
        self.declare((rows, hidden_size), [shard], kind)


@contextmanager
def named(what: str) -> Iterator[None]:
    """Put `what`, whose weight it is, before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


_NEEDED: Kinds[Kind, tuple[str, ...]] = Kinds(  # methods of `LinearMethod` that a weight needs
    "kind of weight",
    {"linear": (), "lm_head": (), "embedding": ("embed",), "tied_embedding": ("embed", "first_rows")},
)


def _check_kind(name: str, kind: Kind, method: type[LinearMethod]) -> None:
    """Raise ValueError with the weight's name if its method cannot do what a weight of its kind needs."""
    missing = [each for each in _NEEDED[kind] if getattr(method, each) is getattr(LinearMethod, each)]
    if missing:
        raise ValueError(
            f"{name}: {method.__name__} cannot store a weight of kind {kind!r}, as it has no "
            f"{' and no '.join(missing)}; leave this weight unquantised"
        )


def allocate(model: nn.Module, options: WeightOptions, quant: QuantConfig) -> None:
    """Give every layer of a declared `model` its memory. `quant` chooses by name how a weight is stored.

    With `deterministic` in the options, no bit of a token's result depends on the rest of the step, provided
    that the attention backend keeps this. Raises ValueError if the sizes of the weights prevent it.
    """
    for path, layer in _layers(model):
        layer.allocate(path, options, quant)
    for path, layer in _layers(model) if options.deterministic else ():
        if getattr(layer, "method", layer).deterministic_needs_alignment:
            _check_rows(path, layer)


def _check_rows(path: str, layer: WeightLayer) -> None:
    """Raise ValueError with the weight's name if its rows are not aligned."""
    for name, weight in layer.named_parameters(path, recurse=False):
        if weight.dim() > 1 and not is_aligned(weight.flatten(0, -2)):
            raise ValueError(
                f"deterministic=True needs weights whose rows are multiples of 16 bytes; rows of "
                f"{name.removesuffix('.weight')} have {weight.shape[-1]} elements of {layer.options.dtype}"
            )


def weight_slots(model: nn.Module) -> dict[str, tuple[WeightLayer, WeightShard]]:
    """Return {checkpoint name: (layer, shard)} for each tensor that a checkpoint must hold."""
    return {
        f"{shard.module_name(path)}.{shard.param}": (layer, shard)
        for path, layer in _layers(model)
        for shard in layer.shards
    }


def methods(model: nn.Module) -> Iterator[tuple[str, WeightMethod]]:
    """The methods of all layers, each with its layer's path."""
    for path, layer in _layers(model):
        for method in {each for each in layer.shards.values() if each is not None}:
            yield path, method


def finish_loading(model: nn.Module) -> None:
    """Prepare for use after all tensors are loaded; see `WeightMethod.finish_loading`."""
    for path, method in methods(model):
        with named(path):
            method.finish_loading()


def _layers(model: nn.Module) -> list[tuple[str, WeightLayer]]:
    return [(path, each) for path, each in model.named_modules() if isinstance(each, WeightLayer)]


def can_split_heads(num_heads: int, num_kv_heads: int, ranks: int) -> bool:
    """Whether all ranks get the same number of whole heads; KV heads are repeated if there are too few."""
    return num_heads % ranks == 0 and (num_kv_heads % ranks == 0 or ranks % num_kv_heads == 0)


def rows_of_heads(
    head_dim: int, num_heads: int, num_kv_heads: int, rank: int, ranks: int
) -> tuple[Part, Part]:
    """A rank's rows of q_proj, and of k_proj or v_proj. ValueError with the possible numbers of ranks if it
    would cut heads."""
    if not can_split_heads(num_heads, num_kv_heads, ranks):
        sizes = [n for n in range(1, num_heads + 1) if can_split_heads(num_heads, num_kv_heads, n)]
        raise ValueError(
            f"{num_heads} query heads and {num_kv_heads} KV heads cannot be split over {ranks} ranks; "
            f"sizes that can: {', '.join(map(str, sizes))}"
        )
    heads, kv_heads = num_heads // ranks, max(1, num_kv_heads // ranks)
    q = num_heads * head_dim, rank * heads * head_dim, heads * head_dim
    return q, (num_kv_heads * head_dim, rank * num_kv_heads // ranks * head_dim, kv_heads * head_dim)


def packed_rows(input_size: int, rows: dict[str, Part]) -> tuple[list[WeightShard], int]:
    """The shards of weights [N, input_size] of several modules, one below the other; and how many rows."""
    shards, offset = [], 0
    for module, (total, start, length) in rows.items():
        shards.append(WeightShard("weight", module, (total, input_size), 0, start, length, offset))
        offset += length
    return shards, offset


def even_rows(what: str, total: int, rank: int, ranks: int) -> Part:
    """A rank's part of what all ranks share evenly; ValueError as of `split_evenly`."""
    length = split_evenly(what, total, ranks)
    return total, rank * length, length


def split_evenly(what: str, total: int, ranks: int) -> int:
    """Return `total // ranks`; ValueError with the possible sizes if `ranks` does not divide `total`."""
    if total % ranks:
        divisors = ", ".join(str(n) for n in range(1, min(total, 64) + 1) if total % n == 0)
        raise ValueError(f"{what} {total} cannot be split over {ranks} ranks; sizes that can: {divisors}")
    return total // ranks
