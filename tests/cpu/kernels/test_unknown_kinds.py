"""A kind of something that a kernel or its twin does not know, such as a new activation, is refused by name.

Each test adds a new member as somebody would who has taught one place only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import inside_kinds
import pytest
import torch
from moe_cases import Sizes, make_experts
from tensors import BF16, F16, F32, FP8, randn
from tiny_models import write_tiny_model

from nanovllm.attention.backends import cache_dtype
from nanovllm.attention.rotary import ROPES, RopeConfig, rope_table
from nanovllm.cpu import isa
from nanovllm.cpu.integers import IntegerConfig
from nanovllm.cpu.kernels.int_layout import IntFormat
from nanovllm.cpu.kernels.matmul import packed_shape
from nanovllm.cuda_graphs.capture import EMPTY_BATCH
from nanovllm.formats.config_json.values import rope_from
from nanovllm.formats.fp8.kernels.grouped import Fp8Experts
from nanovllm.formats.fp8.kernels.matmul import Fp8Weight
from nanovllm.formats.fp8.kernels.values import Fp8Rows
from nanovllm.formats.fp8.loading import Part, Stored, quantise_weight
from nanovllm.formats.int4.kernels.layout import Int4Experts, Int4Weight, dequantise_reference, pack_scales
from nanovllm.formats.int4.kernels.values import first_scale, triton_dtype
from nanovllm.formats.int4.layouts import Int4Shard, awq
from nanovllm.formats.int4.method import Int4LinearMethod
from nanovllm.kernels.activation import Activation, silu_and_mul_reference, silu_and_mul_triton
from nanovllm.kernels.attention_reference import (
    paged_decode_attention_reference,
    paged_prefill_attention_reference,
)
from nanovllm.kernels.compat import INTERPRET, cpu_kernel, jit, tl
from nanovllm.kernels.decode_attention import paged_decode_attention_triton
from nanovllm.kernels.kinds import Kinds
from nanovllm.kernels.paged import KVCache
from nanovllm.kernels.prefill_attention import paged_prefill_attention_triton
from nanovllm.kernels.rotary import Rotation, qk_norm_rope_store_reference, qk_norm_rope_store_triton
from nanovllm.models.decoder import Attention, Build
from nanovllm.models.registry import load_model_config
from nanovllm.moe.kernels.gemv import expert_gemv_triton
from nanovllm.moe.kernels.grouped_matmul import choose_experts, experts_triton
from nanovllm.moe.kernels.reference import experts_reference
from nanovllm.moe.kernels.tiles import Chosen, ExpertMLP, tiles_reference
from nanovllm.quantization.shards import WeightShard
from nanovllm.quantization.unquantized import UnquantizedLinearMethod
from nanovllm.runner.model_runner import ModelRunner

E = TypeVar("E", bound=Enum)
needs_cpu_kernels = pytest.mark.skipif(not isa.has_kernels(), reason="no kernels for CPUs here")
interpreted = pytest.mark.skipif(not INTERPRET, reason="kernels are compiled here; tests/gpu has these cases")


def new_member(kinds: type[E]) -> E:
    """A member of an enum that no table has."""
    made = object.__new__(kinds)
    return inside_kinds.named(made, "NEW", "new")


def refused(call: Callable[[], object], name: str = "NEW|new") -> None:
    """The call raises an error that names the kind."""
    with pytest.raises(Exception, match=name) as caught:
        call()
    assert type(caught.value).__name__ in ("ValueError", "KeyError", "AssertionError", "InterpreterError"), (
        caught.type
    )


def test_a_table_names_an_unknown_kind_and_what_it_knows() -> None:
    table = Kinds("animal", {"cat": 4, "bird": 2})
    assert table["cat"] == 4 and dict(table) == {"cat": 4, "bird": 2}
    with pytest.raises(ValueError, match=r"no code here for the animal 'snake'; known here: 'cat', 'bird'"):
        table["snake"]


# -- activations --------------------------------------------------------------------------------------------


def test_an_activation_without_a_function_is_refused() -> None:
    new = new_member(Activation)
    for call in (lambda: new.kind, lambda: new.number, lambda: new.and_mul(torch.ones(1, 4))):
        refused(call)


@pytest.fixture
def mlp(monkeypatch: pytest.MonkeyPatch) -> ExpertMLP:
    """One with an activation that has a name and a number, but no function anywhere."""
    new = new_member(Activation)
    monkeypatch.setitem(inside_kinds.KIND_OF, new, "new")
    monkeypatch.setitem(inside_kinds.ACTIVATION_KINDS, "new", 4)
    return ExpertMLP(new)


def test_twins_of_activations_refuse_a_new_one(mlp: ExpertMLP) -> None:
    x = randn(2, 64)
    refused(lambda: silu_and_mul_reference(x, "new"))
    refused(lambda: mlp.activation.and_mul(x))
    x, gate_up, down, _ = make_experts(4, Sizes(), F32, "cpu")
    chosen = Chosen(torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1))
    refused(lambda: experts_reference(x, gate_up, down, chosen, mlp))


@needs_cpu_kernels
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_kernels_for_cpus_refuse_a_new_activation(mlp: ExpertMLP, dtype: torch.dtype) -> None:
    kernel = cpu_kernel("activation.silu_and_mul")
    refused(lambda: kernel(randn(2, 64, dtype=dtype), mlp.activation.kind))


@interpreted
def test_triton_kernels_refuse_a_new_activation(mlp: ExpertMLP) -> None:
    kind = "KIND of activation"
    refused(lambda: silu_and_mul_triton(randn(2, 64), "new"), kind)
    x, gate_up, down, _ = make_experts(4, Sizes(), F32, "cpu")
    chosen = Chosen(torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1))
    refused(lambda: expert_gemv_triton(x, gate_up, down, chosen, mlp), kind)
    choice = choose_experts(4, len(down), F32, x.device)
    tiles = tiles_reference(chosen, len(down), choice.rows)
    refused(lambda: experts_triton(x, gate_up, down, tiles, choice, mlp), kind)


# -- rope and norms -----------------------------------------------------------------------------------------


def test_a_new_rope_type_is_refused() -> None:
    with pytest.raises(ValueError, match="rope type 'new' is not supported; supported: default, linear"):
        rope_from({"rope_type": "new"}, 10000.0, 64)
    config = RopeConfig("new", original_max_position=64)
    for call in (
        lambda: config.max_position(64),
        lambda: rope_table(config, 16, 8),
        lambda: config.longest_fixed,
    ):
        refused(call)


def test_known_rope_types_have_all() -> None:
    for kind in ROPES:
        factors = (1.0,) * 8
        config = RopeConfig(kind, original_max_position=64, short_factor=factors, long_factor=factors)
        assert config.max_position(64) == 64 and config.kind.attention_factor(config) > 0
        assert rope_table(config, 16, 8).isfinite().all()


def test_a_new_norm_of_queries_is_refused(tmp_path: Any) -> None:
    config = load_model_config(write_tiny_model(tmp_path))
    specs = tuple(replace(spec, qk_norm=cast(Any, "new")) for spec in config.attention)
    build = Build(cast(Any, SimpleNamespace(rank=0, size=1)), cast(Any, None), cast(Any, lambda *_: None))
    refused(lambda: Attention(replace(config, attention=specs), 0, build))


# -- caches and dtypes --------------------------------------------------------------------------------------

CACHES = {
    "int8": (torch.int8, False),
    "float8_e5m2": (torch.float8_e5m2, True),
    "float8_e4m3fn needs scales": (FP8, False),
    "takes no scales": (F32, True),
}
Q, K = torch.ones(2, 2, 16), torch.ones(2, 1, 16)
TABLE, LENGTHS = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
STARTS, SLOTS = torch.tensor([0, 2], dtype=torch.int32), torch.arange(2, dtype=torch.int32)
ROTATION = Rotation(torch.arange(2), torch.ones(2, 16))


def cache_of(dtype: torch.dtype, scaled: bool) -> KVCache:
    """One block of 16 cells."""
    k, v = torch.zeros(1, 16, 1, 16).to(dtype), torch.zeros(1, 16, 1, 16).to(dtype)
    return KVCache(k, v, *[torch.ones(1)] * 2) if scaled else KVCache(k, v)


@pytest.mark.parametrize("what", CACHES)
def test_twins_refuse_a_cache_that_they_do_not_read(what: str) -> None:
    cache = cache_of(*CACHES[what])
    refused(lambda: paged_decode_attention_reference(Q[:1], cache, TABLE, LENGTHS, 2, 1.0), what)
    refused(
        lambda: paged_prefill_attention_reference(Q, cache, TABLE, STARTS, LENGTHS, 2, 1.0),
        what,
    )
    refused(lambda: qk_norm_rope_store_reference(Q, K, K, ROTATION, cache, SLOTS), what)


@interpreted
@pytest.mark.parametrize("what", CACHES)
def test_triton_kernels_refuse_a_cache_that_they_do_not_read(what: str) -> None:
    cache = cache_of(*CACHES[what])
    refused(lambda: paged_decode_attention_triton(Q[:1], cache, TABLE, LENGTHS, 2, 1.0), what)
    refused(
        lambda: paged_prefill_attention_triton(Q, cache, TABLE, STARTS, LENGTHS, 2, 1.0),
        what,
    )
    refused(lambda: qk_norm_rope_store_triton(Q, K, K, ROTATION, cache, SLOTS), what)


@needs_cpu_kernels
@pytest.mark.parametrize("dtype", [torch.int8, FP8, BF16])
def test_kernels_for_cpus_refuse_a_cache_of_another_dtype(dtype: torch.dtype) -> None:
    cache, name = cache_of(dtype, False), str(dtype)
    decode, prefill, store = (
        cpu_kernel(each)
        for each in (
            "decode_attention.paged_decode_attention",
            "prefill_attention.paged_prefill_attention",
            "rotary.qk_norm_rope_store",
        )
    )
    refused(lambda: decode(Q[:1], cache, TABLE, LENGTHS, 2, 1.0), name)
    refused(lambda: prefill(Q, cache, TABLE, STARTS, LENGTHS, 2, 1.0), name)
    refused(lambda: store(Q, K, K, ROTATION, cache, SLOTS), name)


def test_a_new_dtype_of_the_cache_is_not_that_of_the_model() -> None:
    assert (cache_dtype("auto", BF16), cache_dtype("fp8", BF16)) == (BF16, FP8)
    refused(lambda: cache_dtype("new", BF16))


@needs_cpu_kernels
def test_kernels_for_cpus_refuse_a_new_dtype() -> None:
    wide, name = torch.ones(2, 16, dtype=torch.float64), "float64"
    weight = torch.ones(16, dtype=torch.float64)
    refused(lambda: cpu_kernel("rms_norm.rms_norm")(randn(2, 16), weight, 1e-6), name)
    refused(lambda: cpu_kernel("matmul.matmul")(wide, torch.ones(1, 16, 64), 64), name)
    refused(lambda: cpu_kernel("matmul.embed")(SLOTS.long(), torch.ones(1, 16, 64), torch.int8), "int8")
    refused(lambda: packed_shape((64, 16), torch.int8), "int8")


@needs_cpu_kernels
def test_a_new_instruction_set_is_refused() -> None:
    from nanovllm.cpu.kernels import emitting, tiles

    tables = inside_kinds.cpu_tables()
    with isa.compiling_for("new"):
        refused(tiles.most_rows)
        refused(lambda: tiles.groups_of(1))
        refused(inside_kinds.accumulators)
        refused(emitting.converts_halves)
        refused(lambda: inside_kinds.pairs(None, None, None))
        refused(lambda: inside_kinds.byte_pairs(None, None, None))
    for table in tables:
        assert table.keys() == isa.NEEDS.keys()


def test_rows_of_another_size_are_not_sent() -> None:
    refused(lambda: inside_kinds.bits(torch.ones(2, dtype=torch.int8)), "int8")


# -- quantised weights --------------------------------------------------------------------------------------


def test_a_new_way_to_store_fp8_is_refused() -> None:
    new, shard = new_member(Stored), WeightShard.whole("weight", (256, 256))
    part = Part(shard, new, lambda rows, first: None)
    for call in (
        lambda: new.in_blocks,
        lambda: new.group,
        lambda: new.scales(shard),
        lambda: quantise_weight(torch.ones(256, 256), new),
        lambda: part.load("weight", torch.ones(256, 256), torch.device("cpu")),
        lambda: inside_kinds.scales_of_rows(part, torch.ones(256, 1), 0, range(256)),
    ):
        refused(call)
    known = Part(shard, Stored.ROWS, lambda rows, first: None)
    refused(lambda: known.load("new", torch.ones(256, 1), torch.device("cpu")))


@pytest.mark.parametrize("stored", Stored)
def test_known_ways_to_store_fp8_have_scales(stored: Stored) -> None:
    scales = stored.scales(WeightShard.whole("weight", (200, 300)))
    shape = {Stored.TENSOR: (1,), Stored.BLOCKS: (2, 3), Stored.SCALED_BLOCKS: (2, 3)}.get(stored, (200, 1))
    assert scales.shape == shape
    assert scales.param == ("weight_scale_inv" if stored is Stored.BLOCKS else "weight_scale")


def test_scales_of_fp8_for_other_groups_are_refused() -> None:
    codes = torch.zeros(256, 256, dtype=FP8)
    three, wrong = torch.ones(1, 2, 3), "dimensions here, not 3"
    refused(lambda: Fp8Rows(codes, three).group, wrong)
    refused(lambda: Fp8Weight(codes, three).group, wrong)
    refused(lambda: Fp8Experts(codes[None], torch.ones(1)).group, "not 1")
    refused(lambda: Fp8Weight(codes, torch.ones(4, 2)).group_rows, "256 rows of FP8")


def test_new_kinds_of_weights_of_4_bits_are_refused() -> None:
    refused(lambda: triton_dtype(F32), "float32")
    refused(lambda: pack_scales(torch.ones(1, 8), 8), "float32")
    words = torch.zeros(1, 8, 32, dtype=torch.int16)
    weight = Int4Weight(words, torch.zeros(1, 8, dtype=torch.int32), 128, -1)
    refused(lambda: dequantise_reference(words, weight, BF16), "-1")


@pytest.mark.parametrize("group", [8, -1, 100])
def test_a_new_group_of_4_bits_is_refused(group: int) -> None:
    refused(lambda: Int4Experts.empty(1, 8, 128, group, torch.device("cpu")), str(group))


@jit()
def _first_scale_kernel(out_ptr: tl.tensor, GROUP: tl.constexpr) -> None:
    tl.store(out_ptr, first_scale(tl.program_id(0), GROUP, 128))


@interpreted
@pytest.mark.parametrize("group", [8, -1, 100])
def test_kernels_refuse_a_new_group_of_4_bits(group: int) -> None:
    out = torch.zeros(1, dtype=torch.int32)
    for known in (0, 16, 32, 64, 128, 256):
        _first_scale_kernel[(1,)](out, GROUP=known)
    with pytest.raises(Exception, match="AssertionError"):
        _first_scale_kernel[(1,)](out, GROUP=group)


def test_a_new_tensor_of_4_bits_is_refused() -> None:
    new, weight = cast(Any, "new"), WeightShard.whole("weight", (32, 128))
    shard = Int4Shard("new", None, (32, 1), 0, 0, 32, 0, role=new, weight=weight, format=awq(128, True))
    refused(lambda: shard.wrong_value(torch.ones(1)))
    refused(lambda: inside_kinds.shard(awq(128, True), weight, new, "new", (32, 1)))
    method = Int4LinearMethod(awq(128, True))
    inside_kinds.waits_for_shards(method, awq(128, True))
    refused(lambda: method.load(shard, torch.ones(32, 1)))


def test_a_new_format_of_integers_is_refused() -> None:
    refused(lambda: IntFormat("Q2_0", 2, 2, 1), "2 bits")
    refused(lambda: IntFormat("Q4_3", 4, 0, 3), "3 numbers")
    refused(lambda: IntFormat("Q4_4", 4, 0, 2, shared=3), "that 3 groups share")


def test_a_new_kind_of_weight_is_refused() -> None:
    new = cast(Any, "new")
    refused(lambda: inside_kinds.check_kind("model.x", new, UnquantizedLinearMethod))
    refused(lambda: IntegerConfig("int4", "Q4_0").method("model.x", new))


def test_a_new_kind_of_step_is_refused() -> None:
    batch = replace(EMPTY_BATCH, kind=cast(Any, "new"))
    runner: Any = SimpleNamespace(layout=SimpleNamespace(own_numbers=False))
    runner.kv_cache = torch.empty(0, 0, 16)
    refused(lambda: ModelRunner.launch(runner, batch))
