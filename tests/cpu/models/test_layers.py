"""Single layers and the groups of ranks that share them: shards against the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from threads import in_threads

from nanovllm.families.norms import NoNorm
from nanovllm.kernels.activation import Activation, silu_and_mul
from nanovllm.layers.linear import (
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from nanovllm.layers.stream import RMSNorm, Step, Stream
from nanovllm.layers.weights import WeightLayer, allocate, finish_loading, weight_slots
from nanovllm.moe.replicated import ReplicatedLinear
from nanovllm.parallel.group import TPGroup
from nanovllm.parallel.halves import HalvedStream
from nanovllm.parallel.kernels.all_reduce import EMPTY, TURNS
from nanovllm.parallel.peer_memory import PeerMemory, PendingSum
from nanovllm.quantization.base import Kind, LinearMethod, Normed
from nanovllm.quantization.config import QuantConfig
from nanovllm.quantization.shards import WeightOptions
from nanovllm.quantization.unquantized import UnquantizedLinearMethod

Tensors = dict[tuple[str, str | None], torch.Tensor]
OPTIONS = WeightOptions(torch.float32, torch.device("cpu"))


class PartialGroup(TPGroup):
    """A rank whose collectives return its own part, so that a test can combine the parts."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def normed(x: torch.Tensor) -> Normed:
    return Normed.computed(x, x)


def fill(layer: WeightLayer, tensors: Tensors) -> WeightLayer:
    """Allocate a layer, load each tensor once, in file order, and check that it has all its weights."""
    allocate(layer, OPTIONS, QuantConfig())
    shards = {(shard.param, shard.module): shard for shard in layer.shards}
    for key, tensor in tensors.items():
        layer.load(shards[key], tensor)
    assert shards.keys() == tensors.keys()
    finish_loading(layer)
    return layer


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_column_parallel_outputs_concatenate(ranks: int, bias: bool) -> None:
    weight, b, x = randn(12, 8), randn(12), randn(5, 8)
    tensors: Tensors = {("weight", "up"): weight} | ({("bias", "up"): b} if bias else {})
    parts = []
    for rank in range(ranks):
        layer = MergedColumnParallelLinear(8, {"up": 12}, PartialGroup(rank, ranks), bias)
        parts.append(fill(layer, tensors)(normed(x)))
    torch.testing.assert_close(torch.cat(parts, -1), x @ weight.T + (b if bias else 0))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_row_parallel_outputs_sum(ranks: int, bias: bool) -> None:
    weight, b, x = randn(6, 8), randn(6), randn(5, 8)
    tensors: Tensors = {("weight", None): weight} | ({("bias", None): b} if bias else {})
    total = torch.zeros(5, 6)
    for rank in range(ranks):
        layer = RowParallelLinear(8, 6, PartialGroup(rank, ranks), bias)
        total += fill(layer, tensors)(x.chunk(ranks, -1)[rank]).tensor()
    torch.testing.assert_close(total, x @ weight.T + (b if bias else 0))


def test_replicated_linear() -> None:
    weight, bias, x = randn(6, 8), randn(6), randn(5, 8)
    layer = fill(ReplicatedLinear(8, 6, True), {("weight", None): weight, ("bias", None): bias})
    torch.testing.assert_close(layer(x), x @ weight.T + bias)


@pytest.mark.parametrize("ranks", [1, 2])
def test_merged_column_parallel_and_swiglu(ranks: int) -> None:
    gate, up, x = randn(8, 6), randn(8, 6) * 2, randn(5, 6)
    parts = []
    for rank in range(ranks):
        layer = MergedColumnParallelLinear(6, {"gate": 8, "up": 8}, PartialGroup(rank, ranks))
        fill(layer, {("weight", "up"): up, ("weight", "gate"): gate})
        parts.append(layer(normed(x), Activation.SILU))
        assert torch.equal(parts[-1], silu_and_mul(layer(normed(x))))
    expected = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
    torch.testing.assert_close(torch.cat(parts, -1), expected)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"), [(4, 2, 1), (4, 2, 2), (8, 2, 4), (8, 2, 8), (6, 1, 3)]
)
def test_qkv_is_split_by_whole_heads(heads: int, kv_heads: int, ranks: int) -> None:
    head_dim, hidden = 4, 10
    q, k, v = (
        randn(heads * head_dim, hidden),
        randn(kv_heads * head_dim, hidden),
        randn(kv_heads * head_dim, hidden) * 2,
    )
    bias = {"q_proj": q[:, 0], "k_proj": k[:, 0], "v_proj": v[:, 0]}
    x = randn(3, hidden)
    for rank in range(ranks):
        layer = QKVParallelLinear(hidden, head_dim, heads, kv_heads, PartialGroup(rank, ranks), True)
        shards: Tensors = {("weight", "q_proj"): q, ("weight", "k_proj"): k, ("weight", "v_proj"): v}
        fill(layer, shards | {("bias", name): tensor for name, tensor in bias.items()})
        out_q, out_k, out_v = layer(normed(x)).split(layer.output_sizes, -1)
        for head in range(layer.num_heads):  # each query head is on the rank of the KV head that it reads
            whole = rank * layer.num_heads + head
            rows = slice(whole * head_dim, (whole + 1) * head_dim)
            torch.testing.assert_close(
                out_q.chunk(layer.num_heads, -1)[head], x @ q[rows].T + bias["q_proj"][rows]
            )
            local_kv = head // (layer.num_heads // layer.num_kv_heads)
            whole_kv = whole // (heads // kv_heads)
            rows = slice(whole_kv * head_dim, (whole_kv + 1) * head_dim)
            for out, weight, name in ((out_k, k, "k_proj"), (out_v, v, "v_proj")):
                part = out.chunk(layer.num_kv_heads, -1)[local_kv]
                torch.testing.assert_close(part, x @ weight[rows].T + bias[name][rows])


def test_sizes_that_cannot_be_split_are_refused() -> None:
    group = TPGroup(0, 4)
    with pytest.raises(
        ValueError, match="output size 6 cannot be split over 4 ranks; sizes that can: 1, 2, 3, 6"
    ):
        MergedColumnParallelLinear(8, {"up": 6}, group)
    with pytest.raises(ValueError, match="output size 10 cannot be split over 4"):
        MergedColumnParallelLinear(8, {"gate": 8, "up": 10}, group)
    with pytest.raises(
        ValueError, match="input size 9 cannot be split over 4 ranks; sizes that can: 1, 3, 9"
    ):
        RowParallelLinear(9, 8, group)
    with pytest.raises(
        ValueError, match=r"14 query heads and 2 KV heads .* over 4 ranks; sizes that can: 1, 2, 14"
    ):
        QKVParallelLinear(8, 4, 14, 2, group)
    with pytest.raises(
        ValueError, match=r"12 query heads and 4 KV heads .* over 3 ranks; sizes that can: 1, 2, 4, 12"
    ):
        QKVParallelLinear(8, 4, 12, 4, TPGroup(0, 3))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_vocabulary_shards_and_their_padding(ranks: int, tied: bool) -> None:
    vocab, hidden = 5, 6  # over 4 ranks: 2, 2, 1 and 0 rows
    table, head_weight = randn(vocab, hidden), randn(vocab, hidden) * 3
    ids, states = torch.tensor([4, 0, 3, 3, 2, 1]), randn(3, hidden)
    embedded, logits = torch.zeros(len(ids), hidden), []
    for rank in range(ranks):
        group = PartialGroup(rank, ranks)
        embedding = VocabParallelEmbedding(vocab, hidden, group)
        fill(embedding, {("weight", None): table})
        embedded += embedding(ids)
        head = ParallelLMHead(vocab, hidden, group, embedding if tied else None)
        fill(head, {} if tied else {("weight", None): head_weight})
        logits.append(head(states))
    torch.testing.assert_close(embedded, table[ids])
    expected = states @ (table if tied else head_weight).T
    whole = torch.cat(logits, -1)
    torch.testing.assert_close(whole[:, :vocab], expected)
    assert (whole[:, vocab:] == 0).all()


def test_each_rank_reads_only_its_slice_of_a_file(tmp_path: Path) -> None:
    weight = randn(8, 12)
    save_file({"w": weight}, tmp_path / "w.safetensors")

    class Spy:
        def __init__(self, inner: Any) -> None:
            self.inner, self.read = inner, 0

        def get_shape(self) -> list[int]:
            shape: list[int] = self.inner.get_shape()
            return shape

        def __getitem__(self, index: Any) -> torch.Tensor:
            part: torch.Tensor = self.inner[index]
            self.read += part.numel()
            return part

    makers: dict[str, Callable[[TPGroup], WeightLayer]] = {
        "column": lambda tp: MergedColumnParallelLinear(12, {"up": 8}, tp),
        "row": lambda tp: RowParallelLinear(12, 8, tp),
        "vocabulary": lambda tp: VocabParallelEmbedding(8, 12, tp),
    }
    with safe_open(tmp_path / "w.safetensors", framework="pt") as file:
        for name, make in makers.items():
            for rank in range(4):
                spy = Spy(file.get_slice("w"))
                layer = make(TPGroup(rank, 4))
                allocate(layer, OPTIONS, QuantConfig())
                layer.load(next(iter(layer.shards)), spy)
                assert spy.read == 8 * 12 // 4, name
                expected = weight.chunk(4, dim=1 if name == "row" else 0)[rank]
                assert torch.equal(layer.method.dense()[: len(expected)], expected)


def test_a_layer_has_no_memory_before_it_is_allocated() -> None:
    model = torch.nn.ModuleDict({"qkv_proj": QKVParallelLinear(2**40, 4, 2, 2, TPGroup(), True)})
    assert not list(model.parameters()) and not weight_slots(model)
    allocate(model, WeightOptions(torch.float32, torch.device("meta")), QuantConfig())
    names = [f"{part}_proj.{param}" for param in ("weight", "bias") for part in "qkv"]
    assert list(weight_slots(model)) == names
    assert {name: tuple(each.shape) for name, each in model.named_parameters()} == {
        "qkv_proj.weight": (24, 2**40),
        "qkv_proj.bias": (24,),
    }


class OtherMethod(UnquantizedLinearMethod):
    def __init__(self, bits: int) -> None:
        self.bits = bits


@dataclass(frozen=True)
class OtherQuant(QuantConfig):
    """Says which method the modules of each name get."""

    bits: Mapping[str, int]

    def method(self, path: str, kind: Kind) -> LinearMethod:
        assert kind == "linear"
        return OtherMethod(self.bits[path]) if path in self.bits else super().method(path, kind)


@pytest.mark.parametrize("bits", [{"q_proj": 4}, {"q_proj": 4, "k_proj": 4, "v_proj": 8}])
def test_parts_of_one_product_are_quantised_in_the_same_way(bits: dict[str, int]) -> None:
    """They are asked for by the checkpoint's names."""
    model = torch.nn.ModuleDict({"qkv_proj": QKVParallelLinear(8, 4, 2, 2, TPGroup())})
    with pytest.raises(ValueError, match=r"q_proj, k_proj, v_proj are one product; quantise them"):
        allocate(model, OPTIONS, OtherQuant(bits))
    allocate(model, OPTIONS, OtherQuant(dict.fromkeys(["q_proj", "k_proj", "v_proj"], 4)))
    assert vars(model["qkv_proj"].method)["bits"] == 4


def test_rms_norm_with_and_without_residual() -> None:
    weight, x, residual = randn(16), randn(3, 16), randn(3, 16) * 2
    layer = fill(RMSNorm(16, 1e-6), {("weight", None): weight})
    for added, stream in ((x, Stream(x)), (x + residual, Stream(x, residual))):
        for first in ("tensor", "total"):
            found = layer(stream)
            assert not found.is_computed
            if first == "tensor":
                found.tensor()
            torch.testing.assert_close(found.total, added)
            wanted = torch.nn.functional.rms_norm(added, (16,), weight, 1e-6)
            torch.testing.assert_close(found.tensor(), wanted)


class CountingGroup(PartialGroup):
    """Two ranks with equal parts, so that a sum is twice a part."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.sums: list[tuple[int, bool]] = []  # rows, and whether the whole stream is wanted

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def start_sum(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, whole: bool
    ) -> PendingSum:
        self.sums.append((len(x), whole))
        total = 2 * x + residual
        return PendingSum(lambda: (torch.nn.functional.rms_norm(total, total.shape[-1:], weight, eps), total))


@pytest.mark.parametrize(("after", "before"), [(False, True), (True, True), (True, False), (False, False)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stream_adds_blocks(ranks: int, after: bool, before: bool) -> None:
    """x + block(norm(x)) for a product and for a plain term, whole and in halves, with rows kept, with a norm
    after the block, and without the one before it."""
    group = CountingGroup() if ranks == 2 else TPGroup()
    norms = [fill(RMSNorm(8, 1e-6, group), {("weight", None): randn(8) + i}) for i in range(4)]
    last = norms[3] if after else None
    weight, bias, x, keep = randn(8, 8) / 3, randn(8), randn(6, 8), torch.tensor([1, 4])
    linear = RowParallelLinear(8, 8, TPGroup(), True)
    fill(linear, {("weight", None): weight, ("bias", None): bias})
    blocks = [lambda x, step: linear(x.tensor()), lambda x, step: x.tensor() * 3]

    def norm(x: torch.Tensor, index: int) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (8,), norms[index].weight, 1e-6)

    expected = x * ranks
    for index in range(3):
        inner = norm(expected, index) if before else expected
        term = inner @ weight.T + bias if index != 1 else inner * 3
        term = norm(term * ranks, 3) if after else term * ranks
        expected = expected + term

    def run(stream: Any, step: Step) -> torch.Tensor:
        for index in range(3):
            kept = keep if index == 2 else None
            stream = stream.add(
                norms[index] if before else NoNorm(group), blocks[index % 2], step, kept, last
            )
        total: torch.Tensor = norms[0](stream).total
        return total

    torch.testing.assert_close(run(Stream(x), Step(torch.arange(6), None)), expected[keep])
    halves = tuple(Step(positions, None) for positions in torch.arange(6).split([2, 4]))
    if isinstance(group, CountingGroup):
        streams = map(Stream, x.split([2, 4]))
        found = run(HalvedStream(streams, halves, group.start_sum), Step(torch.arange(6), None))
        torch.testing.assert_close(found, expected[keep])
        assert group.sums == ([] if after or not before else [(2, False), (4, False), (2, True), (4, True)])


def test_a_group_of_one_communicates_nothing_and_a_wrong_rank_is_refused() -> None:
    x = randn(2, 3)
    assert TPGroup().all_reduce(x) is x
    mine, whole = TPGroup().whole_rows(x, 3)
    assert mine == slice(0, 2)
    assert torch.equal(whole, x)
    ids = torch.arange(2)
    assert TPGroup().join_rows(ids, mine, x) is ids
    with pytest.raises(ValueError, match=r"rank must be in \[0, 2\), not 2"):
        TPGroup(2, 2)
    with pytest.raises(RuntimeError, match="rank 1 of 2 has no process group"):
        TPGroup(1, 2).all_reduce(x)


def test_collectives_of_two_ranks() -> None:
    store = dist.HashStore()

    def run(rank: int) -> tuple[Any, ...]:
        group = TPGroup(rank, 2, dist.ProcessGroupGloo(store, rank, 2))
        x = torch.arange(4.0).view(2, 2) + 10 * rank
        pending = group.start_sum(x.clone(), torch.ones(2, 2), torch.tensor([1.0, 2.0]), 1e-6, whole=False)
        pending.advance()
        normed, total = pending.finish()
        mine, whole = group.whole_rows(x.clone(), 3)
        ids = group.join_rows(torch.arange(5, 7)[mine], mine, x)
        return (mine, whole.tolist(), ids.tolist()), group.all_reduce(x), normed, total

    results = in_threads(2, run)
    assert results[0][0] == (slice(0, 2), [[0, 1, 10], [2, 3, 12]], [5, 6])  # rank 0 draws all rows
    assert results[1][0] == (slice(0, 0), [], [5, 6])
    for rank in range(2):
        assert results[rank][1].tolist() == [[10, 12], [14, 16]]
        assert results[rank][3].tolist() == [[11, 13], [15, 17]]
        torch.testing.assert_close(
            results[rank][2],
            torch.nn.functional.rms_norm(results[rank][3], (2,), torch.tensor([1.0, 2.0]), 1e-6),
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n", [16, 13])
@pytest.mark.parametrize("size", [2, 4])
def test_buffers_of_sums_fill_their_memory(size: int, n: int, dtype: torch.dtype) -> None:
    class FakeDevice:
        def side_stream(self) -> None:
            return None

        def host_buffer(self, length: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(length, dtype=dtype)

    device: Any = FakeDevice()
    max_rows = 7
    buffer = torch.ones(PeerMemory.numel(max_rows, n, size, dtype.itemsize), dtype=dtype)
    starts = [2**20 * (rank + 1) for rank in range(size)]
    peers = PeerMemory(1, size, device, buffer, SimpleNamespace(buffer_ptrs=starts), max_rows, n).peers
    assert peers.row_bytes % 16 == 0 and 0 <= peers.row_bytes - n * dtype.itemsize < 16
    assert peers.slots.tolist() == starts
    slots = TURNS * (size - 1) * max_rows * peers.row_bytes
    sums = 0 if peers.sums is None else TURNS * max_rows * peers.row_bytes
    assert (peers.sums is None) == (size == 2)  # which never take two shots
    assert peers.sums is None or peers.sums.tolist() == [start + slots for start in starts]
    assert buffer.nbytes == slots + sums
    assert (buffer.view(torch.int16) == EMPTY).all()
    assert peers.turns.tolist() == [0] * max_rows
