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
from safetensors.torch import load_file, save_file
from tensors import BF16, F16
from test_models import PROMPT, forward, load
from tiny_models import VOCAB_SIZE, edit_json, write_tiny_model

from nanovllm import ModelLoadError, SamplingParams
from nanovllm.attention.backends import ReferenceBackend
from nanovllm.distributed.group import TPGroup
from nanovllm.kernels.compat import INTERPRET
from nanovllm.kernels.int4_layout import dequantise_reference
from nanovllm.kernels.int4_matmul import Int4Tile
from nanovllm.layers.weights import allocate
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.registry import load_model_config
from nanovllm.models.weights import check_weights, init_dummy_weights, load_weights, weight_bytes
from nanovllm.quantization.base import Normed, WeightOptions
from nanovllm.quantization.int4_configs import from_awq, from_compressed_tensors, from_gptq
from nanovllm.quantization.int4_formats import Int4Format, awq, gptq, pack_quantized
from tools.write_int4 import dequantised, random_order, rounded, write_int4

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [[random.Random(n).randrange(2, VOCAB_SIZE) for _ in range(n)] for n in (2 * BLOCK + 3, 5)]
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 104}
interpreted = pytest.mark.skipif(
    not INTERPRET, reason="kernels are compiled here; tests/gpu runs these cases"
)


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
    monkeypatch.setattr("nanovllm.quantization.int4.keeps_bits", lambda options: True)


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
@pytest.mark.parametrize("group", [32, 64, -1])
@pytest.mark.parametrize("format", ["awq", "gptq", "compressed-tensors"])
def test_ranks_hold_parts_of_the_weights(tmp_path: Path, format: str, group: int) -> None:
    """A group of 64 that two ranks share has its scale on both."""
    sizes = {"hidden_size": 64, "intermediate_size": 192}
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
    with pytest.raises(ValueError, match=r"GPTQ with desc_act .* use tensor_parallel_size=1"):
        weight_bytes(load_model_config(folder), TPGroup(0, 2), BF16)
    source = write_tiny_model(tmp_path / "small", hidden_size=64, intermediate_size=96)
    folder = write_int4(source, tmp_path / "groups", "awq", group=32)
    with pytest.raises(ValueError, match=r"96 inputs in groups of 32 .* parts of 48: .* could be 1, 3"):
        weight_bytes(load_model_config(folder), TPGroup(0, 2), BF16)


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


def test_an_update_has_all_tensors_of_a_weight(dense: Path, tmp_path: Path) -> None:
    folder = write_int4(dense, tmp_path / "int4", "awq")
    with make_digest(folder) as llm:
        before = llm.on_ranks("digest")
        name = "model.layers.0.mlp.up_proj"
        scales = load_file(folder / "model.safetensors")[f"{name}.scales"]
        with pytest.raises(
            ValueError, match="up_proj: scales came without qweight, qzeros; pass all of them"
        ):
            llm.update_weights({f"{name}.scales": scales})
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert llm.on_ranks("digest") == before


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


# -- bad input ----------------------------------------------------------------------------------------------

UP = "model.layers.1.mlp.up_proj"
BAD_TENSORS: dict[str, tuple[str, Any, str]] = {
    "scales that are missing": ("awq", lambda t: t.pop(f"{UP}.scales"), rf"1 missing: {UP}.scales"),
    "zero": (
        "awq",
        lambda t: t[f"{UP}.scales"].zero_(),
        rf"{UP}.scales has 0.0, which must be finite and above 0",
    ),
    "NaN": ("gptq", lambda t: t[f"{UP}.scales"][1].fill_(torch.nan), rf"{UP}.scales has nan"),
    "negative": ("gptq", lambda t: t[f"{UP}.scales"][0].neg_(), rf"{UP}.scales has -0.0\d+"),
    "another shape": (
        "awq",
        lambda t: t.update({f"{UP}.scales": torch.ones(1, 256)}),
        rf"{UP}.scales is \(1, 256\)",
    ),
    "floats": ("awq", lambda t: t.update({f"{UP}.qweight": torch.ones(128, 32)}), rf"{UP}.qweight is F32"),
    "bf16 weights": (
        "gptq",
        lambda t: t.update({f"{UP}.weight": torch.ones(256, 128)}),
        rf"unexpected: {UP}.weight",
    ),
    "groups": (
        "gptq",
        lambda t: t[f"{UP}.g_idx"].add_(1),
        rf"{UP}.g_idx has 2, which must be a group from 0 to 1",
    ),
    "uneven": (
        "gptq",
        lambda t: t[f"{UP}.g_idx"][:1].add_(1),
        rf"{UP}.g_idx has group 0 63 times, which must be 64",
    ),
    "order": (
        "gptq",
        lambda t: t[f"{UP}.g_idx"].copy_(t[f"{UP}.g_idx"].flip(0)),
        rf"{UP}.g_idx has groups that are no",
    ),
    "w4a16's shape": (
        "compressed-tensors",
        lambda t: t[f"{UP}.weight_shape"].add_(8),
        rf"{UP}.weight_shape has 264",
    ),
}


@pytest.mark.parametrize(("format", "edit", "message"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_bad_tensors(dense: Path, tmp_path: Path, format: str, edit: Any, message: str) -> None:
    folder = write_int4(dense, tmp_path / "int4", format, group=64)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message):
        load(folder)


AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
WEIGHTS: dict[str, Any] = {"num_bits": 4, "strategy": "group", "group_size": 128}
SCHEME: dict[str, Any] = {"targets": ["Linear"], "weights": WEIGHTS}
PACKED: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
BAD_CONFIGS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "awq bits": (from_awq, AWQ | {"bits": 8}, "bits 8 is not supported; supported: 4"),
    "awq version": (
        from_awq,
        AWQ | {"version": "GEMV"},
        "version 'gemv' is not supported; supported: 'gemm'",
    ),
    "awq group": (
        from_awq,
        AWQ | {"group_size": 48},
        "group_size 48 is not supported; supported: 32, 64, 128, -1",
    ),
    "awq names": (from_awq, AWQ | {"modules_to_not_convert": "lm_head"}, "must be a list of names"),
    "gptq bits": (from_gptq, GPTQ | {"bits": 3}, "bits 3 is not"),
    "gptq true": (from_gptq, GPTQ | {"desc_act": 1}, "desc_act 1 is not supported; supported: False, True"),
    "marlin": (
        from_gptq,
        GPTQ | {"checkpoint_format": "marlin"},
        "checkpoint_format 'marlin' is not supported",
    ),
    "dynamic": (
        from_gptq,
        GPTQ | {"dynamic": {"+:up": {"bits": 8}}},
        r"dynamic \{.*\} gives modules settings",
    ),
    "w4a16 bits": (
        from_compressed_tensors,
        PACKED | {"config_groups": {"0": SCHEME | {"weights": WEIGHTS | {"num_bits": 8}}}},
        "num_bits 8 is not",
    ),
    "w4a8": (
        from_compressed_tensors,
        PACKED | {"config_groups": {"0": SCHEME | {"input_activations": {"num_bits": 8}}}},
        "input_activations .* is not supported with 4 bits",
    ),
    "w4a16 format": (
        from_compressed_tensors,
        PACKED | {"format": "int-quantized"},
        "format 'int-quantized' is not",
    ),
    "w4a16 nothing": (
        from_compressed_tensors,
        PACKED,
        "config_groups must be an object of objects, not None",
    ),
    "w4a16 names": (
        from_compressed_tensors,
        PACKED | {"config_groups": {"0": SCHEME}, "ignore": ["re:("]},
        r"'re:\(' is no regular expression",
    ),
}


@pytest.mark.parametrize(("read", "stated", "message"), BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_bad_configs(read: Any, stated: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"config.json: quantization_config.*{message}"):
        read(stated)


def test_which_weights_are_quantised(dense: Path, tmp_path: Path) -> None:
    """Modules that a config names stay as they are; weights of one product must be alike."""
    for format in ("awq", "compressed-tensors"):
        folder = write_int4(dense, tmp_path / format, format, skip=("layers.0.mlp",))
        model = load(folder)
        assert type(model.model.layers[0].mlp.down_proj.method).__name__ == "UnquantizedLinearMethod"
        assert type(model.model.layers[1].mlp.down_proj.method).__name__ == "Int4LinearMethod"
        forward(model, PROMPT)
    edit_json(folder / "config.json", quantization_config=AWQ | {"modules_to_not_convert": ["q_proj"]})
    with pytest.raises(ValueError, match=r"q_proj, .*k_proj, .*v_proj are one product"):
        load(folder)
    head = from_gptq(GPTQ | {"lm_head": True})
    with pytest.raises(ValueError, match="quantises lm_head, which is also the embedding"):
        head.method("model.embed_tokens", "tied_embedding")


def test_sizes_that_a_format_cannot_hold(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "dense")  # 32 and 48 inputs
    folder = write_int4(source, tmp_path / "int4", "awq", group=16)
    edit_json(folder / "config.json", quantization_config=AWQ)
    with pytest.raises(
        ValueError, match="q_proj has 64 outputs and 32 inputs, which AWQ with groups of 128 cannot"
    ):
        check_weights(load_model_config(folder), folder)


# -- kernels ------------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize(("n", "k", "group"), [(70, 160, 32), (40, 192, 64), (33, 256, 128), (16, 384, 384)])
def test_dequantise_kernel(n: int, k: int, group: int, dtype: torch.dtype) -> None:
    int4_cases.check_dequantise(n, k, group, dtype, "cpu")


@interpreted
@pytest.mark.parametrize(
    ("rows", "n", "k", "group", "dtype", "tile"),
    [
        (1, 70, 160, 32, F16, Int4Tile(16, 64)),
        (3, 70, 192, 64, BF16, Int4Tile(16, 64, split=2)),
        (17, 70, 384, 128, F16, Int4Tile(16, 64, after=True, tma=False)),
        (40, 136, 256, 256, BF16, Int4Tile(32, 64, more=16, split=3, after=True)),
        (97, 24, 288, 32, F16, Int4Tile(32, 128, more=16)),
        (5, 24, 128, 64, F16, None),
    ],
)
def test_product_kernel(
    rows: int, n: int, k: int, group: int, dtype: torch.dtype, tile: Int4Tile | None
) -> None:
    int4_cases.check_product(rows, n, k, group, dtype, "cpu", tile)


@interpreted
@pytest.mark.parametrize(
    ("rows", "n", "k", "group", "dtype", "blocks"),
    [(1, 12, 160, 32, F16, 1), (2, 9, 192, 64, BF16, 8), (1, 8, 640, 128, F16, 2)],
)
def test_gemv_kernel(rows: int, n: int, k: int, group: int, dtype: torch.dtype, blocks: int) -> None:
    int4_cases.check_gemv(rows, n, k, group, dtype, "cpu", blocks)
