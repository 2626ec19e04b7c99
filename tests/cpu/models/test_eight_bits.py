"""Weights in MXFP8 and INT8, and ModelOpt's FP8: files are read by their bytes, split, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from digests import digest, make_digest
from odd_files import edit_quantization, edit_tensors, in_floats
from safetensors.torch import load_file
from tensors import BF16, F32
from test_int4 import build
from test_models import PROMPT, forward, load
from tiny_models import transformers_logits, write_tiny_model

from nanovllm import ModelLoadError
from nanovllm.formats.dummy import init_dummy_weights
from nanovllm.formats.int8.method import Int8Format
from nanovllm.formats.mxfp8.method import Mxfp8Format
from nanovllm.models.registry import load_model_config
from nanovllm.models.weights import check_weights, weight_bytes
from nanovllm.parallel.group import TPGroup
from nanovllm.quantization.shards import WeightShard
from tools.write_nvfp4 import Tensors, write_nvfp4

# Widths of 3 and 5 groups of 32.
SIZES: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32, "vocab_size": 104}
UP, DOWN = "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"
KINDS = ("mxfp8", "modelopt-mxfp8", "int8", "modelopt-fp8")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("plain"), "qwen3", **SIZES)


def part_of(n: int, k: int, dim: int, start: int, length: int) -> WeightShard:
    return WeightShard("weight", "up_proj", (n, k), dim, start, length, 0)


def values(format: Any, part: WeightShard, tensors: Tensors) -> torch.Tensor:
    """What a rank reads of a file's tensors."""
    return format.values(part, {each.param: each.read(tensors[each.param]) for each in format.shards(part)})


def test_bytes_of_mxfp8() -> None:
    """Element by element, of the whole weight and of a rank's rows and columns."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (6, 96), dtype=np.uint8)
    codes[codes & 127 == 127] = 0x7E  # no NaN
    scales = rng.integers(110, 130, (6, 3), dtype=np.uint8)
    wanted = np.zeros((6, 96))
    for n in range(6):
        for k in range(96):
            code = int(codes[n, k])
            exponent, fraction = code >> 3 & 15, (code & 7) / 8
            size = fraction * 2.0**-6 if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - 7)
            wanted[n, k] = (-size if code >> 7 else size) * 2.0 ** (int(scales[n, k // 32]) - 127)
    stored = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    tensors = {"weight": stored, "weight_scale": torch.from_numpy(scales)}
    whole = torch.from_numpy(wanted).float()
    assert torch.equal(values(Mxfp8Format(), part_of(6, 96, 0, 0, 6), tensors), whole)
    assert torch.equal(values(Mxfp8Format(), part_of(6, 96, 0, 2, 3), tensors), whole[2:5])
    assert torch.equal(values(Mxfp8Format(), part_of(6, 96, 1, 32, 64), tensors), whole[:, 32:])
    assert torch.equal(whole.bfloat16().float(), whole)  # exact in bfloat16


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("shape", [(6, 1), (6,), (1,), ()], ids=str)
def test_bytes_of_int8(shape: tuple[int, ...], zeros: bool) -> None:
    rng = np.random.default_rng(1)
    codes = rng.integers(-128, 128, (6, 10), dtype=np.int8)
    scales = (torch.from_numpy(np.asarray(rng.random(shape))) + 0.1).bfloat16()
    points = torch.from_numpy(np.asarray(rng.integers(-5, 6, shape, dtype=np.int8)))
    tensors = {"weight": torch.from_numpy(codes), "weight_scale": scales, "weight_zero_point": points}
    wanted = np.zeros((6, 10), np.float32)
    for n in range(6):
        scale = float(scales.flatten()[n if scales.numel() > 1 else 0])
        point = int(points.flatten()[n if scales.numel() > 1 else 0]) if zeros else 0
        for k in range(10):
            wanted[n, k] = (int(codes[n, k]) - point) * scale
    format = Int8Format(rows=scales.numel() > 1, zeros=zeros)
    for part, own in (
        (part_of(6, 10, 0, 0, 6), wanted),
        (part_of(6, 10, 0, 2, 3), wanted[2:5]),
        (part_of(6, 10, 1, 4, 6), wanted[:, 4:]),
    ):
        assert torch.equal(values(format, part, tensors), torch.from_numpy(own))
        for each in format.shards(part):
            assert each.wrong_shape(tensors[each.param]) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_its_weights(plain: Path, tmp_path: Path, kind: str) -> None:
    folder, meant = write_nvfp4(plain, tmp_path / "quantised", kind)
    floats = in_floats(folder, tmp_path / "floats", meant)
    config = load_model_config(folder)
    check_weights(config, folder)
    model = load(folder)
    assert digest(model) == digest(load(floats))
    torch.testing.assert_close(
        forward(model, PROMPT), transformers_logits(floats, PROMPT), rtol=1e-4, atol=1e-4
    )
    name = {"mxfp8": "MXFP8", "int8": "INT8"}.get(kind.removeprefix("modelopt-"), "FP8")
    assert f"{name} " in " ".join(config.quant.on((0, 0)).notes)
    assert config.quant.on((9, 0)).itemsize == (1 if name == "FP8" else None)


@pytest.mark.parametrize("kind", ["mxfp8", "int8"])
def test_experts(tmp_path: Path, kind: str) -> None:
    sizes = {**SIZES, "moe_intermediate_size": 64, "num_experts": 5, "num_hidden_layers": 2}
    source = write_tiny_model(tmp_path / "plain", "qwen3_moe", **sizes)
    folder, meant = write_nvfp4(source, tmp_path / "quantised", kind)
    model, exact = load(folder), load(in_floats(folder, tmp_path / "floats", meant))
    assert digest(model) == digest(exact)
    assert torch.equal(forward(model, PROMPT), forward(exact, PROMPT))


@pytest.mark.parametrize("kind", ["mxfp8", "int8"])
def test_ranks_hold_parts_of_the_weights(tmp_path: Path, kind: str) -> None:
    source = write_tiny_model(tmp_path / "plain", "qwen3", **{**SIZES, "intermediate_size": 192})
    folder, meant = write_nvfp4(source, tmp_path / "quantised", kind)
    floats = in_floats(folder, tmp_path / "floats", meant)
    for rank in (0, 1):
        ranks = [build(each, F32, TPGroup(rank, 2)) for each in (folder, floats)]
        assert digest(ranks[0]) == digest(ranks[1])


def test_what_ranks_cannot_split(plain: Path, tmp_path: Path) -> None:
    folder, _ = write_nvfp4(plain, tmp_path, "mxfp8")
    named = r"down_proj: 160 inputs in groups of 32 .* parts of 80, which cut a group; .* could be 1, 5$"
    with pytest.raises(ValueError, match=named):
        weight_bytes(load_model_config(folder), TPGroup(0, 2), BF16)


@pytest.mark.parametrize("kind", ["mxfp8", "int8"])
def test_updates_and_sleep(plain: Path, tmp_path: Path, kind: str) -> None:
    other = write_tiny_model(tmp_path / "other", "qwen3", seed=1, **SIZES)
    folders = {tmp_path / "first": plain, tmp_path / "second": other}
    first, second = (write_nvfp4(source, target, kind)[0] for target, source in folders.items())
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
        with pytest.raises(ValueError, match=r"up_proj: weight came without weight_scale; pass all"):
            llm.update_weights({f"{UP}.weight": new[f"{UP}.weight"]})


@pytest.mark.parametrize("kind", ["mxfp8", "int8"])
def test_dummy_weights(plain: Path, tmp_path: Path, kind: str) -> None:
    model = load(write_nvfp4(plain, tmp_path, kind)[0])
    init_dummy_weights(model, 0)
    first, second = (layer.mlp.down_proj.get_parameter("weight") for layer in model.model.layers)
    assert 0.01 < first.float().std() < 0.03 and not torch.equal(first, second)


def test_zero_points_static_inputs_and_other_names(plain: Path, tmp_path: Path) -> None:
    """Asymmetric weights; scales of activations, which nothing reads; the format "naive-quantized"."""
    folder, meant = write_nvfp4(plain, tmp_path / "int8", "int8")
    stated = edit_quantization(folder)["config_groups"]["group_0"]

    def change(tensors: Tensors) -> None:
        for name in [each for each in tensors if tensors[each].dtype == torch.int8]:
            module, rows = name.removesuffix(".weight"), len(tensors[name])
            tensors[f"{module}.weight_zero_point"] = torch.full((rows, 1), 3, dtype=torch.int8)
            tensors[f"{module}.input_scale"] = torch.ones(1).bfloat16()
            tensors[f"{module}.input_zero_point"] = torch.ones(1).to(torch.int8)
            meant[name] -= 3 * tensors[f"{module}.weight_scale"].float()

    edit_tensors(folder, change)
    inputs = stated["input_activations"] | {"dynamic": False, "strategy": "tensor", "symmetric": False}
    weights = stated["weights"] | {"symmetric": False}
    stated |= {"format": None, "weights": weights, "input_activations": inputs}
    edit_quantization(folder, format="naive-quantized", config_groups={"group_0": stated})
    check_weights(load_model_config(folder), folder)
    exact = load(in_floats(folder, tmp_path / "floats", meant))
    assert torch.allclose(forward(load(folder), PROMPT), forward(exact, PROMPT), atol=1e-4)


def test_shapes_of_scales_of_modelopt(plain: Path, tmp_path: Path) -> None:
    """FP8 with scales [N], and of blocks in four dimensions."""
    folder, meant = write_nvfp4(plain, tmp_path / "fp8", "modelopt-fp8")
    exact = load(in_floats(folder, tmp_path / "floats", meant))
    for algorithm, shape in (
        ("FP8_PER_CHANNEL_PER_TOKEN", lambda n, k: (n,)),
        ("fp8_pb_wo", lambda n, k: (-(-n // 128), 1, -(-k // 128), 1)),
    ):
        target, _ = write_nvfp4(plain, tmp_path / algorithm, "modelopt-fp8")

        def change(tensors: Tensors, shape: Any = shape) -> None:
            for name in [each for each in tensors if each.endswith(".weight_scale")]:
                n, k = tensors[name.removesuffix("_scale")].shape
                tensors[name] = tensors[name].expand(shape(n, k)).contiguous()

        edit_tensors(target, change)
        edit_quantization(target, quant_algo=algorithm)
        check_weights(load_model_config(target), target)
        assert digest(load(target)) == digest(exact)


@pytest.mark.parametrize(
    ("kind", "edit", "message"),
    [
        ("mxfp8", lambda t: t[f"{UP}.weight_scale"][2].fill_(255), rf"{UP}.weight_scale has nan, which must"),
        ("mxfp8", lambda t: t.pop(f"{UP}.weight_scale"), rf"1 missing: {UP}.weight_scale"),
        ("mxfp8", lambda t: t.update({f"{UP}.weight_scale": torch.ones(160, 3)}), r"weight_scale is F32"),
        ("int8", lambda t: t[f"{UP}.weight_scale"][3].zero_(), rf"{UP}.weight_scale has 0.0, which must"),
        ("int8", lambda t: t.update({f"{UP}.weight": t[f"{UP}.weight"].short()}), rf"{UP}.weight is I16"),
        ("int8", lambda t: t.update({f"{UP}.weight_scale": torch.ones(96, 1)}), r"weight_scale is \(96, 1\)"),
    ],
)
def test_bad_tensors(plain: Path, tmp_path: Path, kind: str, edit: Any, message: str) -> None:
    folder, _ = write_nvfp4(plain, tmp_path, kind)
    edit_tensors(folder, edit)
    with pytest.raises(ModelLoadError, match=message):
        check_weights(load_model_config(folder), folder)


@pytest.mark.parametrize(
    ("kind", "part", "changes", "message"),
    [
        ("mxfp8", "weights", {"group_size": 16}, "weights: group_size 16 is not supported; supported: 32"),
        ("mxfp8", "weights", {"strategy": "channel"}, "strategy 'channel' is not supported"),
        ("mxfp8", "input_activations", {"num_bits": 4}, "input_activations: num_bits 4 is not supported"),
        ("int8", "weights", {"num_bits": 4}, "weights: num_bits 4 is not supported; supported: 8"),
        ("int8", "weights", {"strategy": "group"}, "strategy 'group' is not supported"),
        ("int8", "input_activations", {"type": "float"}, "input_activations: type 'float' is not supported"),
    ],
)
def test_variants_that_are_refused(
    plain: Path, tmp_path: Path, kind: str, part: str, changes: dict[str, Any], message: str
) -> None:
    folder, _ = write_nvfp4(plain, tmp_path, kind)
    group = edit_quantization(folder)["config_groups"]["group_0"]
    edit_quantization(folder, config_groups={"group_0": group | {part: group[part] | changes}})
    with pytest.raises(ValueError, match=message):
        load_model_config(folder)


def test_int8_of_modelopt_is_refused(plain: Path, tmp_path: Path) -> None:
    """SmoothQuant's files multiply the inputs by scales of their own."""
    folder, _ = write_nvfp4(plain, tmp_path, "modelopt-mxfp8")
    edit_quantization(folder, quant_algo="W8A8_SQ_PER_CHANNEL")
    with pytest.raises(ValueError, match=r"quant_algo 'W8A8_SQ_PER_CHANNEL' is not supported; .* 'MXFP8'"):
        load_model_config(folder)
