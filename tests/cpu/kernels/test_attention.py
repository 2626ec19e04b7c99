"""The choice of device, attention backend and block size, and what a layer's spec makes of attention."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import inside
import pytest
import torch
from attention_cases import Heads, fused_queries, make_cache
from op_gate import Setting, write_config
from test_needs import GPU

from nanovllm import LLM, SamplingParams, demo_model_path
from nanovllm.attention.backends import TritonBackend, resolve_block_size, select
from nanovllm.attention.base import AttentionMetadata
from nanovllm.attention.reference import ReferenceBackend
from nanovllm.attention.rotary import AttentionSpec
from nanovllm.config import Config
from nanovllm.cpu import isa
from nanovllm.device import Device
from nanovllm.device_facts import CPU_KV_CACHE_BYTES
from nanovllm.engine.startup import open_model
from nanovllm.families.llama import LLAMA
from nanovllm.families.norms import HeadsNorm
from nanovllm.flash_attn.backend import FlashAttnBackend
from nanovllm.kernels import attention_reference
from nanovllm.kernels.paged import KVCache
from nanovllm.layers.stream import Step
from nanovllm.layers.weights import allocate
from nanovllm.models import decoder
from nanovllm.models.config import HFConfig, ModelConfig, ModelFamily
from nanovllm.models.decoder import Attention, Build, RotaryEmbedding
from nanovllm.models.registry import get_family, register_model
from nanovllm.parallel.group import TPGroup
from nanovllm.quantization.base import Normed
from nanovllm.quantization.config import QuantConfig
from nanovllm.quantization.shards import WeightOptions

CPU = Device("cpu")
SPECS = (AttentionSpec(4, 2, 64),)


def test_auto_on_a_cpu_has_its_kernels_or_is_the_reference_even_with_the_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nanovllm.cpu.isa.level", lambda: "generic")
    assert select("auto", CPU, torch.float32, SPECS, torch.float32).name == "cpu"
    monkeypatch.setattr("nanovllm.cpu.isa.level", lambda: "torch")
    assert select("auto", CPU, torch.float32, SPECS, torch.float32).name == "reference"
    with pytest.raises(ValueError, match=r"'cpu' cannot run here: pip install \"nanovllm\[cpu\]\""):
        select("cpu", CPU, torch.float32, SPECS, torch.float32)


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
    """The new keys and values are stored first, in the slots that the step has for its group."""
    seen: list[tuple[object, ...]] = []
    turned = torch.zeros(3, 4, 16)
    sizes = {"vocab_size": 8, "hidden_size": 64, "intermediate_size": 16, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = get_family("LlamaForCausalLM").model_config("X", sizes | heads)
    options = WeightOptions(torch.float32, torch.device("cpu"))
    layer = Attention(config, 0, Build(TPGroup(), ReferenceBackend(), partial(RotaryEmbedding, 9)))
    allocate(layer, options, QuantConfig())
    layer.cache = KVCache(torch.zeros(1), torch.zeros(2), torch.ones(3), torch.ones(4))
    monkeypatch.setattr(decoder, "qk_norm_rope_store", lambda *inputs: seen.append(inputs) or turned)
    monkeypatch.setattr(ReferenceBackend, "forward", lambda _, *inputs: seen.append(inputs) or turned)
    meta = SimpleNamespace(slot_mapping=torch.zeros(3), copies=None)
    groups = [None, meta]
    layer.group = 1
    step: Any = Step(torch.arange(3), SimpleNamespace(of_group=groups.__getitem__))
    layer(Normed.computed(torch.zeros(3, 64), torch.zeros(3, 64)), step)
    (q, k, v, rotation, cache, slots), attended = seen
    assert [x.shape for x in (q, k, v)] == [(3, 4, 16), (3, 2, 16), (3, 2, 16)]
    assert (rotation.positions, rotation.cos_sin) == (step.positions, layer.rotary.cos_sin)
    assert (cache, slots) == (layer.cache, meta.slot_mapping)
    assert attended == (turned, layer.cache, meta, layer.spec, None)
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
    fastest = torch.bfloat16 if isa.has_bf16() else torch.float32
    assert Device("cpu").resolve_dtype("auto", "bfloat16") == fastest
    assert Device("cpu").resolve_dtype("auto", "float16") == torch.float32
    assert Device("cpu").resolve_dtype("bfloat16", "float32") == torch.bfloat16


@pytest.mark.parametrize("asked", ["auto", "float32"])
def test_a_start_says_which_dtype_it_chose(asked: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="nanovllm"):
        opened = open_model(Config(demo_model_path(), device="cpu", dtype=asked))
    kept, chosen = opened.model_config.dtype, "bfloat16" if isa.has_bf16() else "float32"
    said = f"dtype: {chosen} on this CPU (the checkpoint's is {kept})"
    assert kept == "bfloat16" and (said in caplog.messages) == (asked == "auto")


def brute_force(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, sinks: torch.Tensor | None
) -> torch.Tensor:
    """The last len(q) tokens [n, heads, dim] over k and v [context, kv_heads, dim], one score at a time."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for row, head in product(range(len(q)), range(spec.num_heads)):
        last, kv_head = len(k) - len(q) + row, head * spec.num_kv_heads // spec.num_heads
        first = 0 if spec.window is None else max(0, last - spec.window + 1)
        scores = [float(q[row, head] @ k[j, kv_head]) * spec.scale for j in range(first, last + 1)]
        if spec.softcap is not None:
            scores = [spec.softcap * math.tanh(score / spec.softcap) for score in scores]
        weights = [math.exp(score) for score in scores]
        total = sum(weights) + (0 if sinks is None else math.exp(float(sinks[head])))
        for j, weight in enumerate(weights, first):
            out[row, head] += weight / total * v[j, kv_head]
    return out


SPEC = AttentionSpec(4, 2, 8)
VARIANTS = {
    "window": replace(SPEC, window=5),
    "window of one": replace(SPEC, window=1),
    "window beyond": replace(SPEC, window=99),
    "softcap": replace(SPEC, softcap=1.5),
    "sinks": replace(SPEC, sinks=True),
    "scale": replace(SPEC, scale=0.9),
    "all": replace(SPEC, scale=0.9, window=7, softcap=1.5, sinks=True),
}


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_reference_computes_what_a_spec_says(
    name: str, decode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode, whole prompts and later chunks of prompts, with NaN in each cell that no token may read."""
    spec, contexts, queries = VARIANTS[name], [9, 3, 14], [1, 1, 1] if decode else [9, 2, 6]
    monkeypatch.setattr(attention_reference, "GATHERED_CELLS", 20)  # several gathers
    heads = Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim, page=4)
    cache = make_cache(contexts, heads, "cpu")
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if spec.sinks else None
    q = fused_queries(sum(queries), heads, "cpu")
    bounds = torch.tensor([0, *accumulate(queries)], dtype=torch.int32)
    ranges = () if decode else (bounds, bounds, max(queries))
    slots = torch.zeros(0)
    meta = AttentionMetadata(slots, cache.contexts, cache.tables, max(contexts), *ranges)
    backend = ReferenceBackend()
    for _ in range(2):  # the second layer of the step
        found = backend.forward(q, cache.kv, meta, spec, sinks)
        for row, rows in enumerate(q.split(queries)):
            expected = brute_force(
                rows.double(), cache.keys[row].double(), cache.values[row].double(), spec, sinks
            )
            torch.testing.assert_close(
                found[bounds[row] : bounds[row + 1]].double(), expected, atol=1e-5, rtol=1e-5
            )
    other = backend.forward(q, cache.kv, meta, SPEC)  # a plain layer of the same step
    assert torch.equal(other, ReferenceBackend().forward(q, cache.kv, meta, SPEC))


def test_a_spoilt_key_spoils_only_the_queries_whose_window_has_it() -> None:
    spec = replace(SPEC, window=3)
    heads = Heads(4, 2, 8, page=4)
    cache = make_cache([9], heads, "cpu")
    cache.kv.k.flatten(0, 1)[cache.tables[0, 0] * 4 + 2, 0] = math.nan  # position 2, the first KV head
    bounds = torch.tensor([0, 9], dtype=torch.int32)
    meta = AttentionMetadata(bounds, cache.contexts, cache.tables, 9, bounds, bounds, 9)
    found = ReferenceBackend().forward(fused_queries(9, heads, "cpu"), cache.kv, meta, spec)
    assert found.isnan().all(2).nonzero().tolist() == [[row, head] for row in (2, 3, 4) for head in (0, 1)]
    assert found.isnan().sum() == 6 * 8


class FakeFlashAttn(ModuleType):
    """The package, built without what its `lacks` names; calls are kept in `seen`."""

    __version__ = "2.8.3"

    def __init__(self, lacks: str = "") -> None:
        super().__init__("flash_attn")
        self.lacks, self.seen = lacks, []

    def flash_attn_with_kvcache(self, q: torch.Tensor, *cache: torch.Tensor, **options: Any) -> torch.Tensor:
        self.seen.append(options)
        if self.lacks == "head_dim" and q.shape[-1] > 128:
            raise RuntimeError("This build does not support head_dim 256.")
        if self.lacks == "kernel" and q.shape[-1] > 128:
            return torch.full_like(q, torch.nan)
        if self.lacks == "softcap" in options:
            raise TypeError("unexpected keyword argument 'softcap'")
        longest = options.get("max_seqlen_k") or options["block_table"].shape[1] * cache[0].shape[1]
        if self.lacks == "window_size" in options and options["window_size"][0] < longest:
            raise RuntimeError("This flash attention build does not support local attention.")
        return q

    flash_attn_varlen_func = flash_attn_with_kvcache


@pytest.mark.parametrize("name", ["triton", "flash_attn", "auto"])
@pytest.mark.parametrize(
    ("field", "lacks"),
    [
        ({"window": 7}, "window_size"),
        ({"window": 300}, "window_size"),
        ({"softcap": 30.0}, "softcap"),
        ({"sinks": True}, ""),
        ({"kv_from": 0}, ""),
        ({"head_dim": 256}, "head_dim"),
        ({"head_dim": 256}, "kernel"),
    ],
)
def test_what_a_backend_cannot_compute_is_refused_by_name(
    name: str, field: dict[str, Any], lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the model is built, with the layer, the field and its value, and what can. What flash-attn can
    is found by trying. "auto" takes Triton."""
    specs, asked = (SPEC, replace(SPEC, **field)), next(iter(field.items()))
    gpu, inside_of = GPU((9, 0)), monkeypatch.setitem
    inside.look_for_flash_attn_again(monkeypatch)
    zeros, ones, tensor = torch.zeros, torch.ones, torch.tensor
    for make in (zeros, ones, tensor):
        fake = lambda *args, make=make, device=None, **options: make(*args, **options)  # noqa: E731
        monkeypatch.setattr(torch, make.__name__, fake)
    for backend in (TritonBackend, FlashAttnBackend):
        monkeypatch.setattr(backend, "unavailable", classmethod(lambda *_: None))
    inside_of(sys.modules, "flash_attn", package := FakeFlashAttn(lacks))
    if name != "flash_attn":
        assert select(name, gpu, torch.bfloat16, specs, torch.bfloat16).name == "triton"
        return
    if lacks or field == {"sinks": True}:
        message = f"attention_backend='flash_attn' cannot run here: layer 1 has .*{asked[0]}={asked[1]}"
        with pytest.raises(ValueError, match=message + r".*; supported by \['triton', 'reference'\]"):
            select(name, gpu, torch.bfloat16, specs, torch.bfloat16)
        inside_of(sys.modules, "flash_attn", package := FakeFlashAttn())
    if field != {"sinks": True}:
        backend = select(name, gpu, torch.bfloat16, specs, torch.bfloat16)
        assert backend.name == "flash_attn"
        assert any("window_size" in each for each in package.seen) == ("window" in field)
        seen = (6 if "window" not in field else field["window"] - 1), 0
        assert {each.get("window_size", seen) for each in package.seen} <= {seen}


def test_head_dims_are_refused_with_their_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonBackend, "unavailable", classmethod(lambda *_: None))
    message = "it supports head_dim up to 512 in steps of 8, and head_dim is 260 in layer 0"
    with pytest.raises(ValueError, match=message):
        select("triton", CPU, torch.float32, (AttentionSpec(4, 2, 260),), torch.float32)


def test_a_spec_and_a_config_check_their_values() -> None:
    for field, message in (
        ({"window": 0}, "window=0 must be positive, or None"),
        ({"softcap": -1.0}, "softcap=-1.0 must be positive, or None"),
        ({"num_kv_heads": 3}, "num_heads=4 is no multiple of num_kv_heads=3"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(SPEC, **field)
    config = get_family("LlamaForCausalLM").model_config("X", {})
    for second, message in (
        (
            replace(SPEC, head_dim=16, kv_from=0),
            "layer 1 has head_dim=16, and layer 0, whose keys and values it reads, has 8",
        ),
        (
            replace(SPEC, num_kv_heads=4, kv_from=0),
            "layer 1 has num_kv_heads=4, and layer 0, whose keys and values it reads, has 2",
        ),
        (
            replace(SPEC, kv_from=1),
            "layer 1 has kv_from=1, which must be an earlier layer with keys and values",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            replace(config, attention=(SPEC, second))
    shared = replace(SPEC, kv_from=0)
    with pytest.raises(ValueError, match="layer 2 has kv_from=1, which must be an earlier layer with keys"):
        replace(config, attention=(SPEC, shared, replace(SPEC, kv_from=1)))
    assert replace(config, attention=(SPEC, shared)).spec(3) == shared


class Mixed(ModelFamily):
    """Layers whose attention differs; the last two have no keys and values of their own."""

    def read(self, hf: HFConfig) -> ModelConfig:
        config = super().read(hf)
        plain = config.spec(0)
        window, shared = replace(plain, window=3, sinks=True), replace(plain, kv_from=1, rope=None)
        specs = plain, window, replace(plain, softcap=2.0, qk_norm="all"), shared, replace(shared, window=4)
        return replace(config, attention=specs)


def test_layers_that_differ_share_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of prompts, other block sizes and pressure change no token; three of five layers cache."""
    inside.keep_families(monkeypatch)
    register_model("Mixed", Mixed(LLAMA.defaults))
    folder = write_config(tmp_path, Setting("llama", {"architectures": ["Mixed"], "num_hidden_layers": 5}))
    prompts = [[2 + 7 * i + j for j in range(4 + 5 * i)] for i in range(3)]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    common = {"device": "cpu", "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 64}
    answers = []
    for options in (
        {"kvcache_block_size": 16, "num_kvcache_blocks": 32},
        {"kvcache_block_size": 4, "num_kvcache_blocks": 9, "max_num_batched_tokens": 5, "max_num_seqs": 3},
    ):
        with LLM(str(folder), **common, **options) as llm:
            assert inside.runner(llm).kv_cache.shape[1] == 3
            layers = inside.model(llm).attention_layers
            assert (
                layers[4].cache.k.data_ptr() == layers[1].cache.k.data_ptr() != layers[0].cache.k.data_ptr()
            )
            assert layers[1].sinks is not None and layers[0].sinks is None
            answers.append([each["token_ids"] for each in llm.generate(prompts, params, use_tqdm=False)])
    assert answers[0] == answers[1]


@torch.inference_mode()
def test_a_norm_over_all_heads() -> None:
    """qk_norm="all", against plain torch in float64: one root mean square for all heads of a token."""
    torch.manual_seed(1)
    sizes = {"vocab_size": 8, "hidden_size": 24, "intermediate_size": 16, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-3, "rope_theta": 100.0}
    config = replace(LLAMA, qk_norm="all").model_config("X", sizes | heads)
    layer = Attention(config, 0, Build(TPGroup(), ReferenceBackend(), partial(RotaryEmbedding, 9)))
    allocate(layer, WeightOptions(torch.float32, torch.device("cpu")), QuantConfig())
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    layer.cache = KVCache(torch.zeros(1, 5, 2, 8), torch.zeros(1, 5, 2, 8))
    x, count = torch.randn(5, 24), 5
    ends, bounds = torch.tensor([count]), torch.tensor([0, count])
    table = torch.tensor([[0]])
    meta = AttentionMetadata(torch.arange(count), ends, table, count, bounds, bounds, count)
    found = layer(Normed.computed(x, x), Step(torch.arange(count), meta)).tensor()

    def normed(rows: torch.Tensor, norm: object) -> torch.Tensor:
        assert isinstance(norm, HeadsNorm) and norm.weight.shape == rows.shape[1:]
        return rows / (rows.square().mean(1, keepdim=True) + 1e-3).sqrt() * norm.weight.double()

    def rotated(rows: torch.Tensor) -> torch.Tensor:
        pairs = torch.complex(*rows.unflatten(1, (-1, 2, 4)).unbind(2))
        angles = torch.arange(count)[:, None] * 100.0 ** (-torch.arange(4).double() / 4)
        turned = pairs * torch.polar(torch.ones(()).double(), angles)[:, None]
        return torch.cat([turned.real, turned.imag], 2)

    q, k, v = (x.double() @ layer.qkv_proj.method.dense().double().T).split([32, 16, 16], dim=1)
    q, k, v = rotated(normed(q, layer.q_norm)), rotated(normed(k, layer.k_norm)), v.unflatten(1, (2, 8))
    spec = AttentionSpec(4, 2, 8)
    expected = brute_force(q, k, v, spec, None).flatten(1) @ layer.o_proj.method.dense().double().T
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
