"""Weights of 4 bits: AWQ, GPTQ and compressed-tensors files are read exactly, split, or refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import int4_cases
import pytest
import torch
from checked_llm import BLOCK, make_tiny
from digests import digest, make_digest
from engine_cases import tokens
from safetensors.torch import load_file, save_file
from tensors import BF16, F16
from test_models import PROMPT, forward, load
from tiny_models import VOCAB_SIZE, edit_json, write_tiny_model

from nanovllm import LLM, SamplingParams
from nanovllm.attention.reference import ReferenceBackend
from nanovllm.formats.dummy import init_dummy_weights
from nanovllm.formats.int4.kernels.layout import dequantise_reference
from nanovllm.formats.int4.layouts import Int4Format, awq, gptq, pack_quantized
from nanovllm.layers.weights import allocate
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.registry import load_model_config
from nanovllm.models.weights import check_weights, load_weights, weight_bytes
from nanovllm.parallel.group import TPGroup
from nanovllm.quantization.base import Normed
from nanovllm.quantization.shards import WeightOptions
from tools.write_int4 import dequantised, random_order, rounded, write_int4

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [[random.Random(n).randrange(2, VOCAB_SIZE) for _ in range(n)] for n in (2 * BLOCK + 3, 5)]
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 104}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("dense"), "qwen2", **SIZES)


def write_dequantised(source: Path, target: Path, **options: Any) -> Path:
    """What `write_int4` writes, in float32."""
    group, head = options.get("group", 128), options.get("head", False)
    write_int4(source, target, "awq", group=group)  # copies the other files
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight") or (head and name == "lm_head.weight"):
            order = random_order(tensor.shape[1], group) if options.get("act_order") else None
            parts = rounded(tensor, group, options.get("symmetric", False), order, F16)
            tensors[name] = dequantised(*parts, group, order)
    save_file(tensors, target / "model.safetensors")
    edit_json(target / "config.json", remove=("quantization_config",))
    return target


# -- formats ------------------------------------------------------------------------------------------------


def nibble(words: torch.Tensor, at: tuple[int, ...], number: int) -> int:
    return (int(words[at]) >> 4 * number) & 15


def test_where_codes_are_in_files() -> None:
    """Element by element, as AutoAWQ, GPTQModel and compressed-tensors define it."""
    words = torch.randint(-(2**31), 2**31, (48, 48), dtype=torch.int32)
    rows, columns = range(5, 43), range(3, 45)
    formats: dict[str, tuple[Int4Format, Any]] = {
        "awq": (awq(32, True), lambda n, k: nibble(words, (k, n // 8), (0, 4, 1, 5, 2, 6, 3, 7)[n % 8])),
        "gptq": (gptq(32, False, 2), lambda n, k: nibble(words, (k // 8, n), k % 8)),
        "packed": (pack_quantized(32, True, False), lambda n, k: nibble(words, (n, k // 8), k % 8)),
    }
    for name, (format, element) in formats.items():
        wanted = torch.tensor([[element(n, k) for k in columns] for n in rows])
        assert torch.equal(format.read_codes(words, rows, columns).long(), wanted), name
    zeros: dict[str, tuple[Int4Format, Any]] = {
        "awq": (awq(32, True), lambda n, g: nibble(words, (g, n // 8), (0, 4, 1, 5, 2, 6, 3, 7)[n % 8])),
        "gptq": (gptq(32, False, 2), lambda n, g: nibble(words, (g, n // 8), n % 8)),
        "packed": (pack_quantized(32, True, False), lambda n, g: nibble(words, (n // 8, g), n % 8)),
    }
    for name, (format, element) in zeros.items():
        wanted = torch.tensor([[element(n, g) for n in rows] for g in columns])
        assert torch.equal(format.read_zeros(words, rows, columns).long(), wanted), name
        scales = torch.rand(48, 48)
        part = scales[5:43, 3:45].T if name == "packed" else scales[3:45, 5:43]
        assert torch.equal(format.read_scales(scales, rows, columns), part)


def test_zero_points_of_the_first_gptq_format_are_less_by_one() -> None:
    zeros = torch.randint(1, 16, (16,))
    word = sum(int(zero - 1) << 4 * place for place, zero in enumerate(zeros[:8]))
    other = sum(int(zero - 1) << 4 * place for place, zero in enumerate(zeros[8:]))
    words = torch.tensor([[word, other]]).to(torch.int32)
    assert torch.equal(gptq(32, False, 1).read_zeros(words, range(16), range(1))[0].long(), zeros)
    carried = torch.tensor([[0x87654320 - 0x11111111]]).to(torch.int32)  # a zero point of 0 borrows
    read = gptq(32, False, 1).read_zeros(carried, range(8), range(1))
    assert read[0].tolist() == [0, 2, 3, 4, 5, 6, 7, 8]


FORMATS: dict[str, dict[str, Any]] = {
    "awq": {"format": "awq"},
    "awq 32": {"format": "awq", "group": 32},
    "awq without zero points": {"format": "awq", "group": 64, "symmetric": True},
    "gptq": {"format": "gptq", "symmetric": True},
    "gptq whole rows": {"format": "gptq", "group": -1},
    "gptq v2 with its head": {"format": "gptq_v2", "group": 64, "head": True},
    "gptq act-order": {"format": "gptq", "group": 32, "act_order": True},
    "w4a16": {"format": "compressed-tensors", "symmetric": True},
    "w4a16 zero points": {"format": "compressed-tensors", "group": 32},
    "w4a16 whole rows": {"format": "compressed-tensors", "group": -1},
    "w4a16 act-order": {"format": "compressed-tensors", "group": 64, "act_order": True},
}


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_a_file_is_its_dequantised_weights(dense: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """In float32, bit for bit; and with 4 bits in memory, the same weights."""
    options = dict(options)
    exact = load(write_dequantised(dense, tmp_path / "exact", **options))
    folder = write_int4(dense, tmp_path / "int4", options.pop("format"), **options)
    check_weights(load_model_config(folder), folder)
    model = load(folder)
    assert digest(model) == digest(exact)
    assert torch.equal(forward(model, PROMPT), forward(exact, PROMPT))


def build(folder: Path, dtype: torch.dtype, tp: TPGroup | None = None, **more: bool) -> DecoderForCausalLM:
    config = load_model_config(folder)
    model = DecoderForCausalLM(config, tp or TPGroup(), ReferenceBackend(), 64)
    allocate(model, WeightOptions(dtype, torch.device("cpu"), **more), config.quant)
    load_weights(model, folder)
    return model


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights keep 4 bits on a CPU too, where plain torch multiplies them."""
    monkeypatch.setattr("nanovllm.formats.int4.loading.keeps_bits", lambda options: True)


def values(method: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weight [N, K] of a method that keeps 4 bits, its columns in the order of x."""
    weight = dequantise_reference(method.weight.words, method.weight, dtype)
    if method.order is None:
        return weight
    return torch.empty_like(weight).index_copy_(1, method.order.long(), weight)


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("name", ["awq 32", "gptq act-order", "w4a16 zero points", "gptq whole rows"])
def test_products_of_4_bits(dense: Path, tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    options = dict(FORMATS[name])
    folder = write_int4(dense, tmp_path / "int4", options.pop("format"), scale_dtype=dtype, **options)
    model = build(folder, dtype, fuse=True)
    exact = load_file(dense / "model.safetensors")
    for layer in (model.model.layers[1].mlp.gate_up_proj, model.model.layers[1].self_attn.qkv_proj):
        method, k = layer.method, SIZES["hidden_size"]
        weight = values(method, dtype)
        names = (
            ("gate", "up") if "mlp" in str(layer.shards) or len(layer.output_sizes) == 2 else ("q", "k", "v")
        )
        room = "mlp" if len(names) == 2 else "self_attn"
        group = options.get("group", 128)
        order = random_order(k, group) if options.get("act_order") else None
        for part, name in zip(weight.split(layer.output_sizes), names, strict=True):
            source = exact[f"model.layers.1.{room}.{name}_proj.weight"]
            parts = rounded(source, group, options.get("symmetric", False), order, dtype)
            assert torch.equal(part, dequantised(*parts, group, order).to(dtype))
        x, bias = torch.randn(5, k).to(dtype), torch.randn(len(weight)).to(dtype)
        wanted = x.double() @ weight.double().T
        int4_cases.assert_near(method.apply(x), wanted)
        int4_cases.assert_near(method.apply(x[:, None], bias)[:, 0], wanted + bias.double())
        normed = Normed(x, None, torch.ones(k, dtype=dtype), 1e-6)
        rows = normed.tensor().double() @ weight.double().T
        int4_cases.assert_near(method.apply_to_normed(normed), rows)
        residual = torch.randn(5, len(weight)).to(dtype)
        total, none = method.apply_and_add(x, residual.clone())
        assert none is None
        int4_cases.assert_near(total, wanted + residual.double())


# -- ranks --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize(
    ("group", "sizes"),
    [
        *((group, {"hidden_size": 64, "intermediate_size": 192}) for group in (32, 64, -1)),
        (128, {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}),
        (128, {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32}),
    ],
)
@pytest.mark.parametrize("format", ["awq", "gptq", "compressed-tensors"])
def test_ranks_hold_parts_of_the_weights(
    tmp_path: Path, format: str, group: int, sizes: dict[str, int]
) -> None:
    """A group of 64 or 128 that two ranks share has its scale on both."""
    source = write_tiny_model(tmp_path / "dense", **sizes)
    folder = write_int4(source, tmp_path / "int4", format, group=group)
    whole, *parts = (build(folder, F16, TPGroup(rank, size)) for rank, size in ((0, 1), (0, 2), (1, 2)))
    layers = [each.model.layers[0] for each in (whole, *parts)]
    down, *halves = (values(layer.mlp.down_proj.method, F16) for layer in layers)
    assert torch.equal(torch.cat(halves, 1), down)
    gate, *halves = (values(layer.mlp.gate_up_proj.method, F16).chunk(2) for layer in layers)
    assert torch.equal(torch.cat([half[1] for half in halves]), gate[1])
    qkv, *halves = (
        values(layer.self_attn.qkv_proj.method, F16).split(layer.self_attn.qkv_proj.output_sizes)
        for layer in layers
    )
    for index in range(3):
        assert torch.equal(torch.cat([half[index] for half in halves]), qkv[index])


def test_what_ranks_cannot_split(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "dense", **SIZES)
    folder = write_int4(source, tmp_path / "order", "gptq", group=32, act_order=True)
    with pytest.raises(
        ValueError, match=r"layers\.0\.self_attn\.o_proj: GPTQ with desc_act .* use tensor_parallel_size=1"
    ):
        weight_bytes(load_model_config(folder), TPGroup(0, 2), BF16)
    source = write_tiny_model(tmp_path / "small", hidden_size=64, intermediate_size=96)
    folder = write_int4(source, tmp_path / "groups", "awq", group=32)
    named = r"^model\.layers\.0\.mlp\.down_proj: 96 inputs in groups of 32 .* parts of 48: .* could be 1, 3"
    with pytest.raises(ValueError, match=named):
        weight_bytes(load_model_config(folder), TPGroup(0, 2), BF16)
    with pytest.raises(ValueError, match=named):
        make_tiny(folder, tensor_parallel_size=2)


@pytest.mark.parametrize("format", ["awq", "gptq", "compressed-tensors"])
def test_two_ranks_answer_as_one(tmp_path: Path, format: str) -> None:
    source = write_tiny_model(tmp_path / "dense", **SIZES)
    folder = write_int4(source, tmp_path / "int4", format, group=64)
    with make_tiny(write_dequantised(source, tmp_path / "exact", group=64)) as llm:
        wanted = [each["token_ids"] for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    for ranks in (1, 2):
        with make_tiny(folder, tensor_parallel_size=ranks) as llm:
            assert [each["token_ids"] for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == wanted


# -- new weights --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_updates_and_sleep(tmp_path: Path, ranks: int) -> None:
    first, second = (
        write_int4(
            write_tiny_model(tmp_path / f"dense{seed}", seed=seed, **SIZES),
            tmp_path / str(seed),
            "gptq",
            group=64,
        )
        for seed in range(2)
    )
    new = load_file(second / "model.safetensors")
    with make_digest(second, tensor_parallel_size=ranks) as llm:
        wanted = llm.on_ranks("digest")
    with make_digest(first, tensor_parallel_size=ranks) as llm:
        before = llm.on_ranks("digest")
        for sleeping in (1, 2):
            llm.sleep(sleeping)
            llm.wake_up()
            assert llm.on_ranks("digest") == before
        llm.update_weights(new.items())
        assert llm.on_ranks("digest") == wanted
        llm.update_weights(reversed(list(load_file(first / "model.safetensors").items())))
        assert llm.on_ranks("digest") == before
        name = "model.layers.0.mlp.up_proj"
        llm.update_weights({key: new[key] for key in new if name in key})
        changed = llm.on_ranks("digest")
        assert changed != before
        for tensors, message in (
            (
                {f"{name}.weight": torch.zeros(256, 128)},
                rf"no tensor '{name}.weight'; did you mean '{name}.q",
            ),
            (
                {f"{name}.scales": new[f"{name}.scales"] * float("nan")},
                rf"{name}.scales has nan, which must be",
            ),
            ({f"{name}.qweight": new[f"{name}.qweight"].float()}, rf"{name}.qweight is torch.float32; pass"),
            ({f"{name}.g_idx": new[f"{name}.g_idx"] + 1}, rf"{name}.g_idx has 2, which must be a group"),
        ):
            with pytest.raises(ValueError, match=message):
                llm.update_weights(tensors)
        assert llm.on_ranks("digest") == changed


@pytest.mark.parametrize("sizes", [{}, {"tensor_parallel_size": 2}, {"data_parallel_size": 2}], ids=str)
def test_an_update_has_all_tensors_of_a_weight(dense: Path, tmp_path: Path, sizes: dict[str, int]) -> None:
    """Else the module keeps its weights, those that came whole are new, and the engine goes on."""
    folder = write_int4(dense, tmp_path / "int4", "awq")
    room = {"num_kvcache_blocks": 40, "max_num_seqs": 4, "max_model_len": 128}
    many = "data_parallel_size" in sizes  # whose weights no test reaches
    made: Any = LLM(folder, device="cpu", skip_tokenizer_init=True, **room, **sizes) if many else None
    with made or make_digest(folder, **sizes) as llm:
        weights = None if many else llm.on_ranks("digest")
        before = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        name, tensors = "model.layers.0.mlp.up_proj", load_file(folder / "model.safetensors")
        some = {f"{name}.scales": tensors[f"{name}.scales"]}
        some |= {f"{name.replace('.0.', '.1.')}.qweight": tensors[f"{name}.qweight"]}
        for _ in range(2):
            with pytest.raises(
                ValueError, match="up_proj: scales came without qweight, qzeros; pass all of them"
            ):
                llm.update_weights(some)
            assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == tokens(before)
            assert many or llm.on_ranks("digest") == weights
        llm.update_weights(tensors)
        assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == tokens(before)


@pytest.mark.parametrize("name", FORMATS)
def test_dummy_weights(dense: Path, tmp_path: Path, name: str) -> None:
    options = dict(FORMATS[name])
    folder = write_int4(dense, tmp_path, options.pop("format"), **options)
    model = load(folder)
    init_dummy_weights(model, 0)
    weight = model.model.layers[1].mlp.down_proj.method
    assert forward(model, PROMPT).isfinite().all() and isinstance(weight, object)
    first, second = (layer.mlp.down_proj.get_parameter("weight") for layer in model.model.layers)
    assert 0.01 < first.std() < 0.03 and not torch.equal(first, second)
    assert abs(first.mean()) < 5 * first.std() / first.numel() ** 0.5  # no part that all weights share
