"""Whole experts by rank: the logits of one rank for all families and formats, and the kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import moe_cases
import pytest
import torch
from gguf_files import random_blocks
from moe_cases import Sizes
from rank_threads import assert_same, config_of, loaded, on_ranks
from tensors import BF16, F32
from test_models import PROMPT, forward
from tiny_models import (
    transformers_logits,
    write_tiny_model,
)

from nanovllm.kernels.compat import INTERPRET
from nanovllm.layers.stream import Group
from nanovllm.models.weights import weight_bytes
from nanovllm.moe.kernels.grouped_matmul import choose_experts
from nanovllm.moe.kernels.placement import ExpertPlacement
from tools.write_fp8 import write_fp8
from tools.write_gguf import write_gguf
from tools.write_int4 import write_int4
from tools.write_mxfp4 import write_mxfp4
from tools.write_nvfp4 import write_nvfp4

interpreted = pytest.mark.skipif(
    not INTERPRET, reason="kernels are compiled here; tests/gpu runs these cases"
)
RANKS = (2, 4)


def by_rank(folder: Path, ranks: int, **options: Any) -> torch.Tensor:
    """Logits of PROMPT on ranks with whole experts."""
    config = config_of(folder, tensor_parallel_size=ranks, enable_expert_parallel=True, **options)
    assert config.moe is not None and config.moe.by_rank  # type: ignore[attr-defined]
    return on_ranks(ranks, lambda tp: loaded(config, folder, tp), PROMPT)


# -- placement ----------------------------------------------------------------------------------------------


def test_placement() -> None:
    """vLLM's linear placement: neighbours, the first ranks with one more."""
    for total, ranks, counts in ((8, 2, [4, 4]), (10, 4, [3, 3, 2, 2]), (3, 2, [2, 1]), (5, 5, [1] * 5)):
        found = [ExpertPlacement.of_rank(total, rank, ranks) for rank in range(ranks)]
        assert [each.count for each in found] == counts
        assert [expert for each in found for expert in each.own] == [*range(total)]
        for each in found:
            assert sorted([*each.own, *each.others]) == [*range(total)] and not each.is_all
    assert ExpertPlacement.of_rank(7, 0, 1) == ExpertPlacement.all(7) and ExpertPlacement.all(7).is_all
    with pytest.raises(ValueError, match="3 experts are fewer than 4 ranks"):
        ExpertPlacement.of_rank(3, 0, 4)


# -- families -----------------------------------------------------------------------------------------------

FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral", "gpt_oss", "glm4_moe", "minimax_m2", "laguna", "mellum")
FAMILIES += ("gemma4-experts", "qwen3_next", "qwen3_5_moe", "lfm2_moe")
# Heads that 4 ranks can split.
HEADS: dict[str, dict[str, Any]] = {"laguna": {"num_attention_heads_per_layer": [4, 8, 8]}}
_STATES = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
HEADS |= {"qwen3_next": _STATES, "qwen3_5_moe": _STATES}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_families(tmp_path: Path, family: str, ranks: int) -> None:
    """Shared experts, routers with groups and corrections, biases, factors of experts, states. 10 experts do
    not divide among 4 ranks."""
    folder = write_tiny_model(tmp_path, family, **HEADS.get(family, {}))
    assert_same(by_rank(folder, ranks), transformers_logits(folder, PROMPT))


# -- formats ------------------------------------------------------------------------------------------------

# Each rank's part of the dense weights is whole groups and blocks.
SIZES: dict[str, Any] = {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 64, "num_experts": 5}
SIZES |= {"intermediate_size": 128, "vocab_size": 104}
Write = Callable[[Path, Path], Path]


def in_gguf(stored_as: str) -> Write:
    def write(source: Path, target: Path) -> Path:
        target.mkdir()
        encode: Any = stored_as if stored_as in ("BF16", "Q8_0") else random_blocks(stored_as)
        return write_gguf(source, target / "model.gguf", encode)

    return write


INT4 = {"awq": ("awq", {}), "gptq": ("gptq", {"symmetric": True}), "w4a16": ("compressed-tensors", {})}
FILES: dict[str, Write] = {
    **{
        f"fp8 {kind}": lambda a, b, kind=kind: write_fp8(a, b, kind)
        for kind in ("channel", "tensor", "block")
    },
    **{
        name: lambda a, b, format=format, more=more: write_int4(a, b, format, group=32, **more)
        for name, (format, more) in INT4.items()
    },
    **{
        kind: lambda a, b, kind=kind: write_nvfp4(a, b, kind)[0]
        for kind in ("modelopt", "nvfp4", "mxfp8", "int8", "modelopt-fp8")
    },
    **{f"gguf {kind}": in_gguf(kind) for kind in ("BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4_NL")},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("plain"), "qwen3_moe", **SIZES)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", FILES)
def test_formats(plain: Path, tmp_path: Path, kind: str, ranks: int) -> None:
    sizes = {"head_dim": 256, "hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 1024}
    source = plain
    if kind in ("gguf Q4_K", "gguf Q6_K"):  # in blocks of 256
        source = write_tiny_model(tmp_path / "wide", "qwen3_moe", **SIZES | sizes)
    path = FILES[kind](source, tmp_path / "stored")
    # Products of integers round activations: a difference in the last bit may become a step of 8 bits.
    for options, near in (
        (({"quantization": "dequantize"}, 1e-4), ({}, 1e-2)) if "gguf" in kind else (({}, 1e-4),)
    ):
        one = forward(loaded(config_of(path, **options), path, Group()), PROMPT)
        # Of float32 it is the largest logit whose bits count: 172 with random blocks of Q6_K.
        scale = max(1.0, one.abs().max().item() / 16)
        torch.testing.assert_close(by_rank(path, ranks, **options), one, atol=near * scale, rtol=near)


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_formats_on_the_fly(plain: Path, quantization: str) -> None:
    config = config_of(plain, quantization=quantization)
    one = forward(loaded(config, plain, Group()), PROMPT)
    assert_same(by_rank(plain, 2, quantization=quantization), one)


@pytest.mark.parametrize("ranks", RANKS)
def test_gpt_oss_in_mxfp4(tmp_path: Path, ranks: int) -> None:
    """The bias of down is added once."""
    source = write_tiny_model(tmp_path / "floats", "gpt_oss", hidden_size=64, intermediate_size=96)
    path = write_mxfp4(source, tmp_path / "mxfp4")
    assert_same(by_rank(path, ranks), forward(loaded(config_of(path), path, Group()), PROMPT))


# -- sizes that parts of the width refuse -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["floats", "awq", "nvfp4", "mxfp4", "act-order"])
def test_sizes_that_no_rank_can_split(tmp_path: Path, kind: str) -> None:
    """Groups that no split of the width keeps whole, and inputs in another order for each expert."""
    dense = {"decoder_sparse_step": 1, "moe_intermediate_size": {"floats": 21, "nvfp4": 48}.get(kind, 96)}
    source = write_tiny_model(tmp_path / "floats", "qwen3_moe", **SIZES | dense)
    options: dict[str, Any] = {"group": 32, "skip": ("self_attn",)}
    if kind == "floats":
        path = source
    elif kind == "awq":
        path = write_int4(source, tmp_path / "stored", "awq", **options)
    elif kind == "act-order":
        path = write_int4(source, tmp_path / "stored", "compressed-tensors", act_order=True, **options)
    elif kind == "nvfp4":
        path = write_nvfp4(source, tmp_path / "stored", "nvfp4")[0]
    elif kind == "mxfp4":
        source = write_tiny_model(tmp_path / "oss", "gpt_oss", hidden_size=64, intermediate_size=96)
        path = write_mxfp4(source, tmp_path / "stored")
    else:
        raise AssertionError(kind)
    by_width = config_of(path, tensor_parallel_size=2)
    if kind == "mxfp4":  # parts of the width become floats on a GPU, whole experts keep 4 bits
        whole = config_of(path, tensor_parallel_size=2, enable_expert_parallel=True)
        both = (replace(each, quant=each.quant.on((9, 0))) for each in (by_width, whole))
        floats, bits = (weight_bytes(each, Group(0, 2), BF16) for each in both)
        assert floats > 1.5 * bits
    else:
        with pytest.raises(ValueError, match=r"does not divide|cannot be split"):
            weight_bytes(by_width, Group(0, 2), BF16)
    assert_same(by_rank(path, 2), forward(loaded(config_of(path), path, Group()), PROMPT))


# -- kernels ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN in padding
@interpreted
@pytest.mark.parametrize(
    ("rows", "sizes", "ranks", "tile_rows"),
    [
        (1, Sizes(), 2, 16),
        (19, Sizes(), 4, 4),
        pytest.param(1300, Sizes(12, 8), 2, 64, marks=pytest.mark.full),
    ],
)
def test_routing_of_ranks(rows: int, sizes: Sizes, ranks: int, tile_rows: int) -> None:
    for rank in (0, ranks - 1):
        placement = ExpertPlacement.of_rank(sizes.experts, rank, ranks)
        moe_cases.check_routing(rows, sizes, BF16 if rank else F32, "cpu", tile_rows, placement)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN in padding
@interpreted
@pytest.mark.parametrize(("rows", "swaps"), [(2, False), (20, True)])
def test_experts_of_ranks(rows: int, swaps: bool) -> None:
    choice = moe_cases.SWAPPED if swaps else choose_experts(1, 10, F32, torch.device("cpu"))
    moe_cases.check_parts(rows, Sizes(clamped=rows == 2), 3, F32, "cpu", choice)
