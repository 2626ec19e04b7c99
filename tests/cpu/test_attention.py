"""The choice of device, attention backend and block size."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from test_needs import GPU

from nanovllm.attention.backends import ReferenceBackend, TritonBackend, resolve_block_size, select
from nanovllm.device import CPU_KV_CACHE_BYTES, Device
from nanovllm.kernels.cache import KVCache
from nanovllm.layers.attention import Attention

CPU = Device("cpu")


def test_auto_on_a_cpu_is_the_reference_even_with_the_interpreter() -> None:
    assert select("auto", CPU, torch.float32, 64, torch.float32).name == "reference"


def test_an_unavailable_backend_says_why() -> None:
    with pytest.raises(ValueError, match="'flash_attn' cannot run here: it needs a CUDA device"):
        select("flash_attn", CPU, torch.bfloat16, 64, torch.bfloat16)
    with pytest.raises(ValueError, match="no such backend"):
        select("flashinfer", CPU, torch.float32, 64, torch.float32)


@pytest.mark.parametrize("backend", ["auto", "triton", "reference"])
def test_an_fp8_cache_is_refused_where_nothing_rounds_to_it(backend: str) -> None:
    """Every backend refuses it."""
    fp8, older = torch.float8_e4m3fn, GPU((8, 0))
    with pytest.raises(ValueError, match=r"'fp8' needs .* 8.9 or newer .* GPU has 8.0; use .*'auto'"):
        select(backend, older, torch.bfloat16, 64, fp8)
    assert select("reference", older, torch.bfloat16, 64, torch.bfloat16).name == "reference"
    assert select("auto", CPU, torch.float32, 64, fp8).name == "reference"


def test_block_sizes_are_checked_against_the_backend() -> None:
    assert resolve_block_size(None, TritonBackend()) == TritonBackend.default_block_size
    assert resolve_block_size(48, TritonBackend()) == 48
    assert resolve_block_size(7, ReferenceBackend()) == 7
    with pytest.raises(ValueError, match=r"kvcache_block_size=100 must be a multiple of 16 .* 'triton'"):
        resolve_block_size(100, TritonBackend())


def test_a_layer_gives_its_backend_the_cache_and_its_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    stored: list[object] = []
    monkeypatch.setattr(ReferenceBackend, "forward", lambda _, *arguments: seen.extend(arguments))
    layer = Attention(4, 2, 16, ReferenceBackend())
    layer.cache = KVCache(torch.zeros(1), torch.zeros(2), torch.ones(3), torch.ones(4))
    q, meta = torch.zeros(5), SimpleNamespace(slot_mapping=torch.zeros(6))
    monkeypatch.setattr(
        "nanovllm.layers.attention.qk_norm_rope_store", lambda *inputs: stored.extend(inputs) or q
    )
    k, v, rotation = (object() for _ in range(3))
    layer(q, k, v, rotation, meta)
    wanted = [q, k, v, rotation, layer.cache, meta.slot_mapping]
    assert all(given is one for given, one in zip(stored, wanted, strict=True))
    wanted = [q, layer.cache, meta, 0.25]
    assert all(given is one for given, one in zip(seen, wanted, strict=True) if not isinstance(one, float))


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
