"""The choice of device, attention backend and block size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_needs import GPU

from nanovllm.attention.backends import ReferenceBackend, TritonBackend, resolve_block_size, select
from nanovllm.attention.base import AttentionSpec
from nanovllm.device import CPU_KV_CACHE_BYTES, Device
from nanovllm.distributed.group import TPGroup
from nanovllm.kernels.cache import KVCache
from nanovllm.layers.stream import Step
from nanovllm.layers.weights import WeightOptions
from nanovllm.models import decoder
from nanovllm.models.decoder import Attention, Build
from nanovllm.models.registry import get_family
from nanovllm.quantization.base import Normed

CPU = Device("cpu")
SPECS = (AttentionSpec(4, 2, 64),)


def test_auto_on_a_cpu_is_the_reference_even_with_the_interpreter() -> None:
    assert select("auto", CPU, torch.float32, SPECS, torch.float32).name == "reference"


def test_an_unavailable_backend_says_why() -> None:
    with pytest.raises(ValueError, match="'flash_attn' cannot run here: it needs a CUDA device"):
        select("flash_attn", CPU, torch.bfloat16, SPECS, torch.bfloat16)
    with pytest.raises(ValueError, match="no such backend"):
        select("flashinfer", CPU, torch.float32, SPECS, torch.float32)


@pytest.mark.parametrize("backend", ["auto", "triton", "reference"])
def test_an_fp8_cache_is_refused_where_nothing_rounds_to_it(backend: str) -> None:
    """Every backend refuses it."""
    fp8, older = torch.float8_e4m3fn, GPU((8, 0))
    with pytest.raises(ValueError, match=r"'fp8' needs .* 8.9 or newer .* GPU has 8.0; use .*'auto'"):
        select(backend, older, torch.bfloat16, SPECS, fp8)
    assert select("reference", older, torch.bfloat16, SPECS, torch.bfloat16).name == "reference"
    assert select("auto", CPU, torch.float32, SPECS, fp8).name == "reference"


def test_block_sizes_are_checked_against_the_backend() -> None:
    assert resolve_block_size(None, TritonBackend()) == TritonBackend.default_block_size
    assert resolve_block_size(48, TritonBackend()) == 48
    assert resolve_block_size(7, ReferenceBackend()) == 7
    with pytest.raises(ValueError, match=r"kvcache_block_size=100 must be a multiple of 16 .* 'triton'"):
        resolve_block_size(100, TritonBackend())


def test_a_layer_gives_its_backend_the_cache_and_its_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new keys and values are stored first, in the step's slots."""
    seen: list[tuple[object, ...]] = []
    turned = torch.zeros(3, 4, 16)
    sizes = {"vocab_size": 8, "hidden_size": 64, "intermediate_size": 16, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = get_family("LlamaForCausalLM").model_config("X", sizes | heads)
    options = WeightOptions(torch.float32, torch.device("cpu"))
    layer = Attention(config, 0, Build(TPGroup(), ReferenceBackend(), lambda *_: torch.zeros(9, 16), options))
    layer.cache = KVCache(torch.zeros(1), torch.zeros(2), torch.ones(3), torch.ones(4))
    monkeypatch.setattr(decoder, "qk_norm_rope_store", lambda *inputs: seen.append(inputs) or turned)
    monkeypatch.setattr(ReferenceBackend, "forward", lambda _, *inputs: seen.append(inputs) or turned)
    step: Any = Step(torch.arange(3), SimpleNamespace(slot_mapping=torch.zeros(3)))
    layer(Normed.computed(torch.zeros(3, 64), torch.zeros(3, 64)), step)
    (q, k, v, rotation, cache, slots), attended = seen
    assert [x.shape for x in (q, k, v)] == [(3, 4, 16), (3, 2, 16), (3, 2, 16)]
    assert (rotation.positions, rotation.cos_sin) == (step.positions, layer.cos_sin)
    assert (cache, slots) == (layer.cache, step.meta.slot_mapping)
    assert attended == (turned, layer.cache, step.meta, layer.spec)
    assert layer.spec.scale == 0.25


def test_a_host_that_does_not_report_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> int:
        raise ValueError(f"unrecognized configuration name {name}")

    assert 0 < CPU.kv_cache_budget(0.9, 0, 0)[0] <= CPU_KV_CACHE_BYTES
    monkeypatch.setattr("os.sysconf", unknown)
    assert CPU.kv_cache_budget(0.9, 0, 0) == (CPU_KV_CACHE_BYTES, 0)


def test_devices_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="torch sees"):
        Device("cuda:99")
    assert Device("cpu").resolve_dtype("auto", "bfloat16") == torch.float32
    assert Device("cpu").resolve_dtype("bfloat16", "float32") == torch.bfloat16
