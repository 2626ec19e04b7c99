"""Experts in 4 bits: what their files mean, ranks, updates, and the kernels, interpreted on a CPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import int4_expert_cases
import pytest
import torch
from checked_llm import make_tiny
from digests import digest, make_digest
from engine_cases import make_prompts, tokens
from moe_cases import Sizes, exact_experts
from safetensors.torch import load_file, save_file
from tensors import BF16, F16, F32, assert_near
from test_int4 import build
from test_models import PROMPT, forward, load
from tiny_models import edit_json, write_tiny_model

from nanovllm import ModelLoadError, SamplingParams
from nanovllm.formats.dummy import init_dummy_weights
from nanovllm.formats.int4.configs import from_awq
from nanovllm.formats.int4.kernels.experts import choose_int4_experts
from nanovllm.formats.int4.kernels.layout import MXFP4, check_mxfp4_scales
from nanovllm.formats.mxfp4.method import say_dequantised
from nanovllm.kernels.compat import INTERPRET
from nanovllm.models.registry import load_model_config
from nanovllm.models.weights import check_weights, weight_bytes
from nanovllm.moe.experts import UnquantizedExpertsMethod
from nanovllm.moe.kernels.grouped_matmul import ExpertChoice, ExpertTile
from nanovllm.moe.kernels.routing import Routing
from nanovllm.moe.kernels.tiles import PLAIN_MLP
from nanovllm.parallel.group import TPGroup
from nanovllm.quantization.base import Normed
from tools.write_int4 import dequantised, random_order, rounded, write_int4
from tools.write_mxfp4 import write_mxfp4, write_rounded

interpreted = pytest.mark.skipif(
    not INTERPRET, reason="kernels are compiled here; tests/gpu runs these cases"
)
SIZES: dict[str, Any] = {
    **{"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 64, "num_experts": 5},
    **{"num_hidden_layers": 2, "intermediate_size": 64},
}
EXPERT = "model.layers.1.mlp.experts.3"
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
TILE = ExpertTile(64, 128, 2, swap=True)
CHOICE = ExpertChoice(16, TILE, TILE)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("plain"), "qwen3_moe", **SIZES)


def write_dequantised(source: Path, target: Path, **options: Any) -> Path:
    """What `write_int4` writes, in float32."""
    write_int4(source, target, "awq", group=options.get("group", 64))  # copies the other files
    tensors, group = load_file(source / "model.safetensors"), options.get("group", 64)
    for name, tensor in tensors.items():
        if re.search(r"(_proj|_linear|\.w[123])\.weight$", name):
            order = random_order(tensor.shape[1], group) if options.get("act_order") else None
            parts = rounded(tensor, group, options.get("symmetric", False), order, F16)
            tensors[name] = dequantised(*parts, group, order)
    save_file(tensors, target / "model.safetensors")
    edit_json(target / "config.json", remove=("quantization_config",))
    return target


# -- files --------------------------------------------------------------------------------------------------

FORMATS: dict[str, dict[str, Any]] = {
    "awq": {"format": "awq"},
    "awq 32": {"format": "awq", "group": 32},
    "gptq": {"format": "gptq", "symmetric": True},
    "gptq act-order": {"format": "gptq", "group": 32, "act_order": True},
    "w4a16": {"format": "compressed-tensors", "symmetric": True},
    "w4a16 whole rows": {"format": "compressed-tensors", "group": -1},
    "w4a16 act-order": {"format": "compressed-tensors", "group": 32, "act_order": True},
}


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_a_file_is_its_dequantised_weights(plain: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """In float32, bit for bit."""
    options = {"group": 64} | options
    exact = load(write_dequantised(plain, tmp_path / "exact", **options))
    folder = write_int4(plain, tmp_path / "int4", options.pop("format"), **options)
    assert f"{EXPERT}.gate_proj.weight" not in load_file(folder / "model.safetensors")
    check_weights(load_model_config(folder), folder)
    model = load(folder)
    assert digest(model) == digest(exact)
    assert torch.equal(forward(model, PROMPT), forward(exact, PROMPT))


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_other_families(tmp_path: Path, family: str) -> None:
    sizes = SIZES | {"intermediate_size": 96, "shared_expert_intermediate_size": 32}
    sizes = {key: value for key, value in sizes.items() if "shared" not in key or family == "qwen2_moe"}
    source = write_tiny_model(tmp_path / "plain", family, **sizes)
    exact = load(write_dequantised(source, tmp_path / "exact", group=32))
    for format in ("awq", "gptq", "compressed-tensors"):
        model = load(write_int4(source, tmp_path / format, format, group=32))
        assert digest(model) == digest(exact)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights keep 4 bits on a CPU too, where plain torch multiplies them."""
    monkeypatch.setattr("nanovllm.formats.int4.loading.keeps_bits", lambda options: True)


def method_of(model: Any) -> Any:
    return model.model.layers[1].mlp.experts.experts_method


def held(method: Any) -> Sequence[Any]:
    """The weights of experts, `gate_up` and `down`: of 4 bits, or floats."""
    floats = method if isinstance(method, UnquantizedExpertsMethod) else method.dense
    return (method.gate_up, method.down) if floats is None else floats.dense()


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("name", ["awq 32", "gptq", "gptq act-order", "w4a16", "w4a16 whole rows"])
def test_4_bits_in_memory(plain: Path, tmp_path: Path, name: str) -> None:
    """The weights are those of the file, rounded; with desc_act they are dequantised."""
    options = {"group": 64} | FORMATS[name]
    folder = write_int4(plain, tmp_path / "int4", options.pop("format"), scale_dtype=BF16, **options)
    exact = load_file(plain / "model.safetensors")
    method = method_of(build(folder, BF16))
    assert (method.dense is not None) == ("act-order" in name)
    gate_up, down = held(method)
    for index in range(5):
        parts = dict(zip(("gate_proj", "up_proj"), gate_up[index].chunk(2), strict=True))
        for projection, found in (parts | {"down_proj": down[index]}).items():
            weight = exact[f"model.layers.1.mlp.experts.{index}.{projection}.weight"]
            group = options["group"]
            order = random_order(weight.shape[1], group) if "act_order" in options else None
            made = rounded(weight, group, options.get("symmetric", False), order, BF16)
            assert torch.equal(found, dequantised(*made, group, order).to(BF16))
    if method.dense is None:
        words = sum(each.nbytes for each in (method.gate_up.words, method.down.words))
        assert words == 5 * (128 * 128 + 128 * 128) // 2  # down has 64 inputs, in blocks of 128


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("format", ["awq", "compressed-tensors"])
def test_answers_of_4_bits(plain: Path, tmp_path: Path, format: str) -> None:
    """Those of the dequantised weights."""
    method = method_of(build(write_int4(plain, tmp_path / "int4", format, group=32), F16))
    x, logits = torch.randn(5, 128).to(F16), torch.randn(5, 5)
    out = method.apply(Normed.computed(x, x), Routing(logits, 3, True), PLAIN_MLP)
    weights = [
        torch.stack([each[index].double() for index in range(5)]) for each in (method.gate_up, method.down)
    ]
    assert_near(out, exact_experts(x, *weights, Routing(logits, 3, True).chosen()))


# -- MXFP4 --------------------------------------------------------------------------------------------------


@pytest.fixture
def packed_mxfp4(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `packed`."""
    monkeypatch.setattr("nanovllm.formats.mxfp4.method.keeps_bits", lambda options: True)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint in MXFP4, and its dequantised weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    floats = write_tiny_model(tmp_path_factory.mktemp("floats"), "gpt_oss", **sizes)
    folders = (tmp_path_factory.mktemp(name) for name in ("mxfp4", "rounded"))
    return write_mxfp4(floats, next(folders)), write_rounded(floats, next(folders))


@pytest.mark.usefixtures("packed_mxfp4")
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_weights_as_they_are_stored(
    gpt_oss: tuple[Path, Path], dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """A model in bfloat16 keeps 4 bits: the values of the dequantised checkpoint. Others say so once."""
    say_dequantised.cache_clear()
    model, exact = (build(folder, dtype) for folder in gpt_oss)
    assert caplog.text.count("dtype='bfloat16' and parts of multiples of 32") == (dtype != BF16)
    for layer, wanted in zip(model.model.layers, exact.model.layers, strict=True):
        method, other = layer.mlp.experts.experts_method, wanted.mlp.experts.experts_method
        assert (method.dense is None) == (dtype == BF16)
        for found, values in zip(held(method), held(other), strict=True):
            for index in range(10):
                assert torch.equal(found[index], values[index])
        if dtype == BF16:
            down, gate_up = method.down, method.gate_up
            assert down.words.nbytes == 10 * 64 * 128 // 2  # 96 inputs, in blocks of 128
            assert gate_up.words.nbytes == 10 * 192 * 128 // 2 and gate_up.scales.nbytes == 10 * 192 * 4
    x, logits = torch.randn(5, 64).to(dtype), torch.randn(5, 10)
    made = (each.model.layers[1].mlp.experts.experts_method for each in (model, exact))
    outs = (each.apply(Normed.computed(x, x), Routing(logits, 3, True), PLAIN_MLP) for each in made)
    assert_near(next(outs), next(outs))


@pytest.mark.usefixtures("packed_mxfp4")
def test_ranks_that_share_a_group_dequantise(tmp_path: Path) -> None:
    """Half of 96 inputs of `down` is one and a half groups."""
    for width in (96, 128):
        sizes = {"hidden_size": 64, "intermediate_size": width}
        floats = write_tiny_model(tmp_path / f"floats{width}", "gpt_oss", **sizes)
        folders = write_mxfp4(floats, tmp_path / f"a{width}"), write_rounded(floats, tmp_path / f"b{width}")
        for rank in (0, 1):
            models = [build(folder, BF16, TPGroup(rank, 2)) for folder in folders]
            stored, exact = (each.model.layers[0].mlp.experts.experts_method for each in models)
            assert (stored.dense is None) == (width == 128)
            (gate_up, down), wanted = held(stored), held(exact)
            assert torch.equal(down[7], wanted[1][7]) and down[7].shape == (64, width // 2)
            assert torch.equal(gate_up[7], wanted[0][7]) and gate_up[7].shape == (width, 64)


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize(("format", "group"), [("awq", 64), ("gptq", 32), ("compressed-tensors", -1)])
def test_ranks_hold_parts_of_experts(plain: Path, tmp_path: Path, format: str, group: int) -> None:
    """A group of 64 that two ranks share has its scale on both."""
    folder = write_int4(plain, tmp_path / "int4", format, group=group)
    ranks = (TPGroup(), TPGroup(0, 2), TPGroup(1, 2))
    whole, first, second = (method_of(build(folder, F16, tp)) for tp in ranks)
    for index in range(5):
        halves = [each.gate_up[index].chunk(2) for each in (first, second)]
        both = [torch.cat(each) for each in zip(*halves, strict=True)]
        assert torch.equal(torch.cat(both), whole.gate_up[index])
        assert torch.equal(torch.cat((first.down[index], second.down[index]), 1), whole.down[index])


def test_two_ranks_answer_as_one(plain: Path, tmp_path: Path) -> None:
    prompts = make_prompts()[:3]
    with make_tiny(write_dequantised(plain, tmp_path / "exact", group=64)) as llm:
        wanted = tokens(llm.generate(prompts, SHORT, use_tqdm=False))
    folder = write_int4(plain, tmp_path / "int4", "gptq", group=64)
    with make_tiny(folder, tensor_parallel_size=2) as llm:
        assert tokens(llm.generate(prompts, SHORT, use_tqdm=False)) == wanted


def test_updates_and_sleep(plain: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", "qwen3_moe", seed=1, **SIZES)
    first = write_int4(plain, tmp_path / "first", "awq", group=32)
    second = write_int4(other, tmp_path / "second", "awq", group=32)
    new = load_file(second / "model.safetensors")
    with make_digest(second) as llm:
        wanted = llm.on_ranks("digest")
    with make_digest(first) as llm:
        before = llm.on_ranks("digest")
        llm.sleep(2)
        llm.wake_up()
        assert llm.on_ranks("digest") == before
        llm.update_weights(new.items())
        assert llm.on_ranks("digest") == wanted
        with pytest.raises(ValueError, match=r"experts\.3\.up_proj: scales came without qweight, qzeros"):
            llm.update_weights({f"{EXPERT}.up_proj.scales": new[f"{EXPERT}.up_proj.scales"]})
        with pytest.raises(ValueError, match=rf"{EXPERT}.up_proj.scales has nan, which must be finite"):
            llm.update_weights({f"{EXPERT}.up_proj.scales": new[f"{EXPERT}.up_proj.scales"] * torch.nan})


@pytest.mark.usefixtures("packed")
def test_dummy_weights(plain: Path, tmp_path: Path) -> None:
    folder = write_int4(plain, tmp_path, "awq", group=32)
    model = build(folder, BF16)
    init_dummy_weights(model, 0)
    first, second = method_of(model).gate_up[0], method_of(model).gate_up[1]
    assert 0.01 < first.float().std() < 0.03 and not torch.equal(first, second)


# -- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(f"{EXPERT}.up_proj.scales"), rf"1 missing: {EXPERT}.up_proj.scales"),
        (lambda t: t[f"{EXPERT}.down_proj.scales"].zero_(), rf"{EXPERT}.down_proj.scales has 0.0, which"),
        (
            lambda t: t.update({f"{EXPERT}.up_proj.qweight": torch.ones(64, 64)}),
            rf"{EXPERT}.up_proj.qweight is \(64, 64\)",
        ),
    ],
    ids=["missing", "zero", "shape"],
)
def test_bad_tensors(plain: Path, tmp_path: Path, edit: Any, message: str) -> None:
    folder = write_int4(plain, tmp_path, "awq", group=32)
    found = load_file(folder / "model.safetensors")
    edit(found)
    save_file(found, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message):
        load(folder)


def test_what_ranks_cannot_split(plain: Path, tmp_path: Path) -> None:
    folder = write_int4(plain, tmp_path / "awq", "awq", group=32)
    with pytest.raises(ValueError, match=r"64 inputs in groups of 32 .* parts of 16: .* could be 1, 2$"):
        weight_bytes(load_model_config(folder), TPGroup(0, 4), BF16)
    folder = write_int4(plain, tmp_path / "order", "gptq", group=32, act_order=True)
    with pytest.raises(ValueError, match=r"GPTQ with desc_act .* use tensor_parallel_size=1"):
        weight_bytes(load_model_config(folder), TPGroup(0, 2), BF16)


def test_which_experts_are_quantised(plain: Path, tmp_path: Path) -> None:
    folder = write_int4(plain, tmp_path / "skip", "awq", group=32, skip=("layers.1.mlp.experts",))
    model = load(folder)
    names = [type(layer.mlp.experts.experts_method).__name__ for layer in model.model.layers]
    assert names == ["Int4ExpertsMethod", "UnquantizedExpertsMethod"]
    quant = from_awq({"bits": 4, "modules_to_not_convert": ["gate"]})  # so do AutoAWQ's files of Mixtral
    assert type(quant.experts("model.layers.0.block_sparse_moe.experts")).__name__ == "Int4ExpertsMethod"
    for router in ("mlp.gate", "mlp.shared_expert_gate"):
        method = from_awq({"bits": 4}).method(f"model.layers.0.{router}", "linear")
        assert type(method).__name__ == "UnquantizedLinearMethod"


# -- kernels ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN in padding
@interpreted
@pytest.mark.parametrize(
    ("rows", "sizes", "groups", "dtype"),
    [
        (1, Sizes(5, 3, 160, 32), (32, 32), F16),
        (2, Sizes(3, 2, 192, 64), (64, 64), BF16),
        (2, Sizes(3, 2, 160, 96), (MXFP4, MXFP4), BF16),
        (3, Sizes(10, 3, 160, 96), (MXFP4, MXFP4), BF16),
        (5, Sizes(4, 2, 160, 96, clamped=True), (MXFP4, MXFP4), F16),
        (97, Sizes(10, 3, 256, 128), (256, 128), F16),
        (40, Sizes(10, 3, 192, 96), (64, 32), F16),
    ],
)
def test_kernels(rows: int, sizes: Sizes, groups: tuple[int, int], dtype: torch.dtype) -> None:
    int4_expert_cases.check_experts(rows, sizes, groups, dtype, "cpu", CHOICE)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@interpreted
@pytest.mark.parametrize("only", [(2, 4), (0, 3, 1)])
def test_kernels_with_experts_without_rows(only: tuple[int, ...]) -> None:
    """In the first case every row goes to the same two."""
    sizes = Sizes(5, 2, 160, 32)
    int4_expert_cases.check_experts(30, sizes, (32, 32), F16, "cpu", CHOICE, only)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@interpreted
@pytest.mark.parametrize(("group", "dtype"), [(32, F16), (MXFP4, BF16)])
def test_bits_are_those_of_the_dequantised_weights(group: int, dtype: torch.dtype) -> None:
    int4_expert_cases.check_dequantised(Sizes(5, 3, 160, 96), group, dtype, "cpu", CHOICE)


def test_which_tiles_are_chosen() -> None:
    """Tiles of few rows for few pairs, all transposed, in blocks of the layout; for many pairs weights are
    dequantised first."""
    rows = []
    for pairs in (1, 9, 10, 40, 41, 450):
        choice = choose_int4_experts(pairs * 128, 128, torch.device("cpu"))
        rows.append(choice.rows)
        for tile in (choice.gate_up, choice.down):
            assert tile.swap and tile.k == 128 and tile.columns % 64 == 0 and tile.stages >= 2
    assert rows == [16, 16, 32, 32, 64, 64]
    many = choose_int4_experts(451 * 128, 128, torch.device("cpu"))
    assert not many.gate_up.swap and not many.down.swap


def test_scales_of_mxfp4_that_the_layout_cannot_hold() -> None:
    check_mxfp4_scales(torch.tensor([[0, 1, 128]], dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"a scale is 129, 2 \*\* 2; .* at most 128, .* dtype='float32'"):
        check_mxfp4_scales(torch.tensor([[0, 129]], dtype=torch.uint8))
