"""MoE: a mixture of experts in place of an MLP. Owns the router; its experts' weights belong to their method.

Each rank holds a part of the width of every expert, or some experts whole; all route alike, and sum as after
an MLP.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from nanovllm.formats.config_json.reading import MAX_ELEMENTS
from nanovllm.kernels.activation import Activation
from nanovllm.layers.stream import Group, Step
from nanovllm.layers.weights import Part, WeightLayer, named, split_evenly
from nanovllm.models.config import Mixture
from nanovllm.moe.elsewhere import elsewhere
from nanovllm.moe.experts import UnquantizedExpertsMethod
from nanovllm.moe.kernels.placement import ExpertPlacement
from nanovllm.moe.kernels.routing import Routing
from nanovllm.moe.kernels.tiles import ExpertMLP
from nanovllm.moe.method import ROW_BYTES, ExpertsMethod, ExpertWeights
from nanovllm.moe.replicated import ReplicatedLinear
from nanovllm.quantization.base import Normed, Product
from nanovllm.quantization.config import QuantConfig
from nanovllm.quantization.shards import FileNames, PackedRows, WeightOptions, WeightShard, WeightSource

_MAX_EXPERTS = 4096


@dataclass(frozen=True)
class MoESpec(Mixture):
    """The experts of a model, and which of its layers have them."""

    num_experts: int
    top_k: int
    width: int  # of an expert
    normalised: bool = True  # the weights of a row's experts add up to 1
    shared_width: int | None = None  # of the expert that every row goes to; None: there is none
    step: int = 1  # every so many layers, the last of them has experts
    dense: frozenset[int] = frozenset()  # other layers without experts
    activation: Activation = Activation.SILU
    bias: bool = False  # of the router and of the experts
    block: str = "mlp"  # the names in a checkpoint
    router: str = "gate"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "shared_expert"
    shared_gate: bool = True  # whether a gate weighs the shared expert
    factor: float = 1.0  # of the sum of a row's experts
    by_rank: bool = False  # ranks hold whole experts, not parts of the width of all

    def __post_init__(self) -> None:
        if self.num_experts > _MAX_EXPERTS:
            raise ValueError(f"config.json: {self.num_experts} experts are more than {_MAX_EXPERTS}")
        if self.top_k > self.num_experts:
            raise ValueError(
                f"config.json: num_experts_per_tok {self.top_k} is more than the {self.num_experts} experts"
            )

    def check_size(self, hidden_size: int) -> None:
        """ValueError if a weight is so large that no memory holds it."""
        largest = max(self.num_experts * self.width, self.shared_width or 0)  # width of one weight
        if 2 * largest * hidden_size > MAX_ELEMENTS:
            raise ValueError(
                f"config.json: {self.num_experts} experts of width {self.width}, or a shared one of "
                f"width {self.shared_width}, give weights that no memory holds"
            )

    def check_gpu(self, hidden_size: int, dtype: torch.dtype) -> None:
        """ValueError if the kernels of a GPU cannot read the rows of the weights."""
        multiple = ROW_BYTES // dtype.itemsize
        if hidden_size % multiple:
            also = " or dtype='float32'" if hidden_size % (ROW_BYTES // 4) == 0 else ""
            raise ValueError(
                f"hidden_size {hidden_size} of config.json is not a multiple of {multiple}, which a mixture "
                f"of experts in {str(dtype).removeprefix('torch.')} needs on a GPU; use device='cpu'{also}"
            )

    def router_of(self, hidden_size: int) -> nn.Module:
        """What makes logits of rows; the softmax of the largest ones weighs the chosen experts."""
        return ReplicatedLinear(hidden_size, self.num_experts, self.bias)

    def has_experts(self, layer: int) -> bool:
        return layer not in self.dense and (layer + 1) % self.step == 0

    def kinds(self, num_layers: int) -> list[tuple[MoESpec, int]]:
        num_dense = num_layers - num_layers // self.step
        num_dense += sum(layer in range(num_layers) and (layer + 1) % self.step == 0 for layer in self.dense)
        counts = {frozenset[int](): num_layers - num_dense, frozenset([0]): num_dense}
        return [(replace(self, step=1, dense=dense), count) for dense, count in counts.items() if count]

    def widths(self, dense_width: int) -> list[int]:
        dense = [dense_width] if self.dense or self.step > 1 else []
        routed = [] if self.by_rank else [self.width]
        return [*routed, *dense, *([] if self.shared_width is None else [self.shared_width])]

    def placed(self, tp: Group) -> ExpertPlacement:
        """The experts that a rank holds, or of which it holds a part."""
        if self.by_rank:
            return ExpertPlacement.of_rank(self.num_experts, tp.rank, tp.size)
        return ExpertPlacement.all(self.num_experts)

    def record(self, layers: Sequence[nn.Module], max_tokens: int, device: torch.device) -> torch.Tensor:
        record = torch.zeros((max_tokens, len(layers), self.top_k), dtype=torch.int16, device=device)
        for index, layer in enumerate(layers):
            for block in layer.children():
                if isinstance(block, MoE):
                    block.record = record[:, index]
        return record


class _FileExpert:
    """See `rows_of_expert`; indexing reads only a range of the file."""

    def __init__(self, source: Any, index: int, rows: range, transposed: bool) -> None:
        self._source, self._index, self._rows, self._transposed = source, index, rows, transposed

    def get_shape(self) -> list[int]:
        _, first, *others = self._source.get_shape()
        return [len(self._rows), *([first] if self._transposed else others)]

    def get_dtype(self) -> str:
        dtype: str = self._source.get_dtype()
        return dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        """index: slices without steps, or ... for all."""
        first, *others = index if isinstance(index, tuple) else (index,)
        rows = self._rows[slice(None) if first is ... else first]
        skipped = rows.start % rows.step
        own, start = slice(self._index, self._index + 1), rows.start - skipped
        read = slice(start, start + rows.step * len(rows))
        if self._transposed:
            [columns] = others or [slice(None)]
            return self._source[own, columns, read][0].T[skipped :: rows.step]  # type: ignore[no-any-return]
        return self._source[(own, read, *others)][0][skipped :: rows.step]  # type: ignore[no-any-return]


def rows_of_expert(source: WeightSource, index: int, rows: range, transposed: bool = False) -> WeightSource:
    """These rows of an expert's part of a tensor of all experts; nothing of a file is read yet. transposed:
    they are columns there."""
    if not isinstance(source, torch.Tensor):
        return _FileExpert(source, index, rows, transposed)
    whole = source[index].T if transposed else source[index]
    return whole[rows.start : rows.stop : rows.step]


@dataclass(frozen=True)
class ExpertNames(FileNames):
    """Names of files whose experts have tensors of their own. From transformers 5 on a state_dict holds all
    experts of a layer as one, and every block is called mlp."""

    spec: MoESpec = field(kw_only=True)

    def tensors(
        self, full_name: str, tensor: WeightSource, packed_rows: PackedRows
    ) -> Iterator[tuple[str, WeightSource]]:
        for name, each in super().tensors(full_name, tensor, packed_rows):
            yield from self.parts(name, each)

    def parts(self, name: str, tensor: WeightSource) -> Iterable[tuple[str, WeightSource]]:
        """The tensors of single experts that a tensor is, or itself."""
        shape = tensor.shape if isinstance(tensor, torch.Tensor) else tensor.get_shape()
        module, _, last = name.replace(".mlp.", f".{self.spec.block}.").rpartition(".")
        gate, up, down = self.spec.projections
        names = {"gate_up_proj": (gate, up), "down_proj": (down,)}.get(last)
        if names is None or not module.endswith(".experts") or len(shape) != 3:
            return [(f"{module}.{last}", tensor)]
        count = shape[1] // len(names)
        parts = [(part, range(place * count, (place + 1) * count)) for place, part in enumerate(names)]
        return [
            (f"{module}.{index}.{part}.weight", rows_of_expert(tensor, index, rows))
            for index in range(shape[0])
            for part, rows in parts
        ]


class _Biases(WeightLayer):
    """The biases of one product of a rank's experts, `bias` [E, N]."""

    bias: torch.Tensor

    def __init__(self, placement: ExpertPlacement, rows: dict[str, Part]) -> None:
        """rows: by projection its length, and the start and length of this rank's part."""
        super().__init__()
        shards: list[WeightShard] = []
        self._others: list[WeightShard] = []
        offset = 0
        for projection, (total, start, length) in rows.items():
            for experts, found in ((placement.own, shards), (placement.others, self._others)):
                found += [
                    WeightShard(
                        "bias", f"{expert}.{projection}", (total,), 0, start, length, offset, index=index
                    )
                    for index, expert in enumerate(experts)
                ]
            offset += length
        self.declare((placement.count, offset), shards)

    def allocate(self, path: str, options: WeightOptions, quant: QuantConfig) -> None:
        super().allocate(path, options, quant)
        self.shards |= elsewhere(self._others)


class Experts(WeightLayer):
    """The experts of a layer: gated MLPs. A rank has a part of each, or its own ones whole."""

    experts_method: ExpertsMethod

    def __init__(self, hidden_size: int, spec: MoESpec, tp: Group) -> None:
        super().__init__()
        self._placement = placement = spec.placed(tp)
        width = spec.width if spec.by_rank else split_evenly("expert width", spec.width, tp.size)
        self._part: Part = spec.width, 0 if spec.by_rank else tp.rank * width, width  # of an expert here
        self._hidden_size, self._projections = hidden_size, spec.projections
        self.gate_up_bias: _Biases | None = None
        self.down_bias: _Biases | None = None
        self._activation = spec.activation
        # The bias of down is added once to the ranks' sum: by the rank that has the expert, or by rank 0.
        self._adds_bias = spec.by_rank or tp.rank == 0
        if spec.bias:
            gate, up, down = spec.projections
            self.gate_up_bias = _Biases(placement, dict.fromkeys((gate, up), self._part))
            self.down_bias = _Biases(placement, {down: (hidden_size, 0, hidden_size)})

    def _weights(self, experts: Sequence[int]) -> tuple[ExpertWeights, ExpertWeights]:
        """Both weights of these experts of the model, which are numbered from 0 on."""
        (whole, start, width), hidden_size, count = self._part, self._hidden_size, len(experts)
        gate, up, down = self._projections

        def shards(projection: str, shape: tuple[int, int], dim: int, offset: int = 0) -> list[WeightShard]:
            modules = [f"experts.{expert}.{projection}" for expert in experts]
            return [
                WeightShard("weight", module, shape, dim, start, width, offset, index=index)
                for index, module in enumerate(modules)
            ]

        rows = shards(gate, (whole, hidden_size), 0) + shards(up, (whole, hidden_size), 0, width)
        columns = shards(down, (hidden_size, whole), 1)
        return (
            ExpertWeights((count, 2 * width, hidden_size), rows),
            ExpertWeights((count, hidden_size, width), columns),
        )

    def allocate(self, path: str, options: WeightOptions, quant: QuantConfig) -> None:
        super().allocate(path, options, quant)
        method, placement = _method_of(quant, path), self._placement
        self.experts_method = method
        with named(path):
            created = method.create(self, *self._weights(placement.own), options)
        self.shards |= dict.fromkeys(created, method)
        if not placement.is_all:  # their names, from a method without memory
            nowhere = replace(options, device=torch.device("meta"))
            others = _method_of(quant, path).create(nn.Module(), *self._weights(placement.others), nowhere)
            self.shards |= elsewhere(others)

    def forward(self, x: Normed, routing: Routing) -> torch.Tensor:
        """See `ExpertsMethod.apply`; of the experts of other ranks nothing is computed."""
        routing = routing.held(self._placement)
        first, second = self.gate_up_bias, self.down_bias
        mlp = ExpertMLP(
            self._activation,
            None if first is None else first.bias,
            None if second is None or not self._adds_bias else second.bias,
        )
        return self.experts_method.apply(x, routing, mlp)


def _method_of(quant: QuantConfig, path: str) -> ExpertsMethod:
    method = quant.experts(path) or UnquantizedExpertsMethod()
    assert isinstance(method, ExpertsMethod)
    return method


class MoE(nn.Module):
    """A router, which sends each row to `top_k` experts and weighs their results, and a shared expert."""

    def __init__(self, hidden_size: int, spec: MoESpec, tp: Group, shared: nn.Module | None = None) -> None:
        """shared: the MLP that every row goes to, if the spec has one."""
        super().__init__()
        self.spec = spec
        self.record: torch.Tensor | None = None  # [most rows, top_k] int16: where it writes rows' experts
        self.add_module(spec.router, spec.router_of(hidden_size))
        self.experts = Experts(hidden_size, spec, tp)
        self._shared = [] if shared is None else [shared]  # in a list, so that its name is the files'
        if shared is not None:
            self.add_module(spec.shared, shared)
            if spec.shared_gate:
                self.shared_expert_gate = ReplicatedLinear(hidden_size, 1)

    def forward(self, x: Normed, step: Step) -> torch.Tensor:
        """x [T, hidden_size] -> a term of the stream, of the same shape. Tokens are independent."""
        rows = x.tensor()
        # Only steps of a graph have padding, and these are decode steps, where no row was dropped before.
        slots = step.meta.slot_mapping if step.meta.cu_seqlens_q is None else None
        logits = self.get_submodule(self.spec.router)(rows)
        routing = Routing(logits, self.spec.top_k, self.spec.normalised, slots)
        term: torch.Tensor = self.experts(x, routing)
        if self.record is not None:
            self.record[: len(rows)] = routing.chosen().ids
        if self.spec.factor != 1.0:
            term = term * self.spec.factor
        for shared in self._shared:
            product: Product = shared(x, step)
            if self.spec.shared_gate:
                share = self.shared_expert_gate(rows).sigmoid()
                term = torch.addcmul(term, share, product.tensor())  # the sum is rounded once
            else:
                term = term + product.tensor()
        return term
