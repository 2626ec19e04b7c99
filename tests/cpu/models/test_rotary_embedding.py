"""Rotary embeddings: their tables against transformers, and the rotation of pairs of halves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensors import randn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nanovllm.attention.rotary import RopeConfig, rope_table
from nanovllm.formats.config_json.values import rope_from
from nanovllm.kernels.paged import KVCache
from nanovllm.kernels.rotary import Rotation, qk_norm_rope_store

ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.5},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn betas": {"factor": 3.0, "original_max_position_embeddings": 4096, "beta_fast": 16, "beta_slow": 2},
    "yarn untruncated": {"factor": 8.0, "original_max_position_embeddings": 4096, "truncate": False},
    "yarn attention_factor": {
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 0.7,
    },
    "yarn mscale": {
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.8,
        "mscale_all_dim": 0.5,
    },
}
MAX_POSITIONS = 131072


def transformers_rope(
    params: dict[str, Any], theta: float, head_dim: int, stated: int
) -> tuple[LlamaRotaryEmbedding, RopeConfig]:
    params = params | {"rope_theta": theta}
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=stated,
        rope_parameters=dict(params),
    )
    return LlamaRotaryEmbedding(config), rope_from(params, 10000.0, stated)


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 1e6])
@pytest.mark.parametrize("name", ROPES)
def test_rope_table_is_that_of_transformers(name: str, theta: float, head_dim: int) -> None:
    params = {"rope_type": name.split()[0]} | ROPES[name]
    module, config = transformers_rope(params, theta, head_dim, MAX_POSITIONS)
    positions = torch.tensor([0, 1, 2, 77, 4095, 4096, 40001, MAX_POSITIONS - 1])
    cos, sin = module(torch.empty(0), positions[None])
    table = rope_table(config, head_dim, MAX_POSITIONS)
    assert table.dtype == torch.float32
    half = head_dim // 2
    assert torch.equal(table[positions], torch.cat((cos[0, :, :half], sin[0, :, :half]), -1))


@pytest.mark.parametrize("length", [1, 20, 32])
def test_dynamic_rope_is_that_of_transformers_up_to_the_trained_length(length: int) -> None:
    stated = 32
    module, config = transformers_rope({"rope_type": "dynamic", "factor": 2.0}, 10000.0, 16, stated)
    assert config.longest_fixed == stated
    cos, sin = module(torch.empty(0), torch.arange(length)[None])
    expected = torch.cat((cos[0, :, :8], sin[0, :, :8]), -1)
    torch.testing.assert_close(rope_table(config, 16, length), expected, atol=2e-6, rtol=0)
    # One token more, and transformers rotates all positions by other angles.
    longer, _ = module(torch.empty(0), torch.arange(stated + 1)[None])
    plain = rope_table(config, 16, stated)[:, :8]
    assert (longer[0, :stated, :8] - plain).abs().amax(-1)[1:].min() > 1e-5


def test_rope_lengths_and_inferred_values() -> None:
    def read(stated: int, **params: Any) -> RopeConfig:
        return rope_from(params, 10000.0, stated)

    assert read(100, rope_type="default").max_position(100) == 100
    assert read(100, rope_type="linear", factor=4.0).max_position(100) == 400
    assert read(100, type="dynamic", factor=1.5).max_position(100) == 150
    yarn = read(40960, rope_type="yarn", factor=4.0, original_max_position_embeddings=32768)
    assert yarn.max_position(40960) == 131072
    assert (
        read(200, rope_type="yarn", factor=2.0, original_max_position_embeddings=50).max_position(200) == 200
    )
    assert read(200, rope_type="yarn", original_max_position_embeddings=50).factor == 4.0
    llama3 = read(200, rope_type="llama3", factor=8, low_freq_factor=1, high_freq_factor=4)
    assert (llama3.original_max_position, llama3.max_position(200)) == (200, 200)


def test_a_table_rotates_pairs_of_halves() -> None:
    table = rope_table(RopeConfig(theta=100.0), 4, 10)
    q, k = randn(2, 3, 4, seed=9), randn(2, 1, 4, seed=7)
    positions = torch.tensor([3, 9])
    k_cache, v_cache = torch.zeros(2, 1, 3, 1, 4).unbind()  # 3 slots
    v, slots = randn(2, 1, 4, seed=7), torch.tensor([2, 0], dtype=torch.int32)
    q_rotated = qk_norm_rope_store(q, k, v, Rotation(positions, table), KVCache(k_cache, v_cache), slots)
    assert torch.equal(v_cache[0, slots], v)
    assert not v_cache[0, 1].any()
    for x, rotated in ((q, q_rotated), (k, k_cache[0, slots])):
        pairs = torch.complex(x[..., :2], x[..., 2:])
        angles = positions[:, None].double() * torch.tensor([1.0, 0.1]).double()
        expected = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
        torch.testing.assert_close(rotated, torch.cat((expected.real, expected.imag), -1).float())
