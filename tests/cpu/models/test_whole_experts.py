"""Whole experts by rank: the answers of one rank for all families and formats; what is read and refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import moe_cases
import pytest
import torch
from checked_llm import make_tiny
from digests import digest, make_digest
from engine_cases import make_prompts, tokens
from gguf_files import random_blocks
from moe_cases import Sizes
from rank_threads import config_of, loaded, on_ranks
from safetensors.torch import load_file, save_file
from tensors import BF16, F32
from test_models import PROMPT, forward
from tiny_models import (
    transformers_greedy,
    transformers_logits,
    transformers_model,
    write_tiny_model,
)

from nanovllm import LLM, ModelLoadError, SamplingParams
from nanovllm.kernels.compat import INTERPRET
from nanovllm.layers.stream import Group
from nanovllm.models import weights
from nanovllm.models.registry import open_checkpoint
from nanovllm.models.weights import weight_bytes
from nanovllm.moe.kernels.grouped_matmul import choose_experts
from nanovllm.moe.options import placed
from nanovllm.moe.placement import ExpertPlacement
from nanovllm.vllm.engine_args import EngineArgs, FlexibleArgumentParser
from tools.write_fp8 import write_fp8
from tools.write_gguf import write_gguf
from tools.write_int4 import write_int4
from tools.write_mxfp4 import write_mxfp4
from tools.write_nvfp4 import write_nvfp4

interpreted = pytest.mark.skipif(
    not INTERPRET, reason="kernels are compiled here; tests/gpu runs these cases"
)
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
RANKS = (2, 4)
_PLAIN = choose_experts(1, 10, F32, torch.device("cpu"))


def by_rank(folder: Path, ranks: int, **options: Any) -> torch.Tensor:
    """Logits of PROMPT on ranks with whole experts."""
    config = config_of(folder, tensor_parallel_size=ranks, enable_expert_parallel=True, **options)
    assert config.moe is not None and config.moe.by_rank  # type: ignore[attr-defined]
    return on_ranks(ranks, lambda tp: loaded(config, folder, tp), PROMPT)


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


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
FAMILIES += ("gemma4-experts", "qwen3_next", "qwen3_5_moe")
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
        torch.testing.assert_close(by_rank(path, ranks, **options), one, atol=near, rtol=near)


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


# -- what is read -------------------------------------------------------------------------------------------


class Counted:
    """A tensor in a file that counts the elements that are read of it."""

    def __init__(self, source: Any, count: Callable[[int], None]) -> None:
        self._source, self._count = source, count

    def get_shape(self) -> list[int]:
        return self._source.get_shape()

    def get_dtype(self) -> str:
        return self._source.get_dtype()

    def __getitem__(self, index: Any) -> torch.Tensor:
        found = self._source[index]
        self._count(found.numel())
        return found


def read_by(config: Any, path: Path, rank: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The elements of each tensor of the files that a rank reads."""
    found: Counter[str] = Counter()

    def opened(folder: Path) -> Any:
        checkpoint = open_checkpoint(folder)

        class Opened:
            absent = checkpoint.absent

            @contextmanager
            def tensors(self) -> Iterator[Any]:
                with checkpoint.tensors() as sources:
                    yield {name: Counted(each, counter(name)) for name, each in sources.items()}

        return Opened()

    def counter(name: str) -> Callable[[int], None]:
        return lambda number: found.update({name: number})

    with monkeypatch.context() as patch:
        patch.setattr(weights, "open_checkpoint", opened)
        loaded(config, path, Group(rank, ranks))
    return found


@pytest.mark.parametrize("kind", ["floats", "fp8 block", "awq", "modelopt", "int8", "gguf Q8_0"])
def test_a_rank_reads_its_own_experts_alone(
    plain: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 experts on 2 ranks: 3 and 2. The codes of a rank's experts are read once, those of others not at all,
    nor are their scales."""
    path = plain if kind == "floats" else FILES[kind](plain, tmp_path / "stored")
    # The blocks of integers are read as they are stored, which `Counted` has not.
    options = {"quantization": "dequantize"} if "gguf" in kind else {}
    config = config_of(path, tensor_parallel_size=2, enable_expert_parallel=True, **options)
    with open_checkpoint(path).tensors() as sources:
        sizes = {name: torch.Size(each.get_shape()).numel() for name, each in sources.items()}  # type: ignore[union-attr]
    experts = {name: int(name.split(".")[5]) for name in sizes if ".experts." in name}
    for rank, own in ((0, {0, 1, 2}), (1, {3, 4})):
        read = read_by(config, path, rank, 2, monkeypatch)
        found = {experts[name] for name, count in read.items() if name in experts and count}
        assert found == own
        for name, expert in experts.items():
            if expert in own and name.endswith(("proj.weight", "qweight", "weight_packed")):
                assert read[name] == sizes[name]
        assert read["model.layers.0.mlp.gate.weight"] == sizes["model.layers.0.mlp.gate.weight"]


@pytest.mark.parametrize("packed", [True, False], ids=["mxfp4", "floats"])
def test_a_part_of_the_tensors_of_all_experts_is_read(
    tmp_path: Path, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_model(tmp_path / "floats", "gpt_oss", hidden_size=64, intermediate_size=96)
    path = write_mxfp4(path, tmp_path / "mxfp4") if packed else path
    config = config_of(path, tensor_parallel_size=4, enable_expert_parallel=True)
    tensors = load_file(path / "model.safetensors")
    for rank, count in enumerate((3, 3, 2, 2)):
        read = read_by(config, path, rank, 4, monkeypatch)
        for name, tensor in tensors.items():
            if ".experts." in name:
                times = 2 if "gate_up" in name else 1  # rows of gate and up take turns, and each reads both
                assert read[name] == tensor.numel() // 10 * count * times


def test_other_experts_are_checked(plain: Path, tmp_path: Path) -> None:
    """Each rank names what is wrong with an expert of another one, from the header."""
    path = write_fp8(plain, tmp_path, "block")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.experts.4.up_proj.weight"
    config = config_of(path, tensor_parallel_size=2, enable_expert_parallel=True)
    for change, message in (
        ({name: tensors[name][:3].clone()}, rf"{name} is \(3, 128\)"),
        ({name: tensors[name].to(torch.int8)}, f"{name} is I8"),
        ({name + "_scale_inv": None}, f"missing: {name}_scale_inv"),
        ({name.replace(".4.", ".5."): tensors[name].clone()}, "unexpected: .*experts.5.up_proj.weight"),
    ):
        changed = {key: value for key, value in (tensors | change).items() if value is not None}
        save_file(changed, path / "model.safetensors")
        for rank in (0, 1):
            with pytest.raises(ModelLoadError, match=message):
                loaded(config, path, Group(rank, 2))


@pytest.mark.parametrize("quantization", [None, "fp8", "int8"])
def test_dummy_weights_are_those_of_one_rank(plain: Path, quantization: str | None) -> None:
    options: dict[str, Any] = {} if quantization is None else {"quantization": quantization}
    one = forward(loaded(config_of(plain, **options), None, Group()), PROMPT)
    config = config_of(plain, tensor_parallel_size=2, enable_expert_parallel=True, **options)
    assert_same(on_ranks(2, lambda tp: loaded(config, None, tp), PROMPT), one)


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_bytes_of_weights(tmp_path: Path, family: str) -> None:
    """A start reserves those of rank 0, which has the most experts; where they divide, as many as by width."""
    folder = write_tiny_model(tmp_path, family, intermediate_size=24)
    whole, width = (
        config_of(folder, tensor_parallel_size=4, enable_expert_parallel=each) for each in (True, False)
    )
    found = [weight_bytes(whole, Group(rank, 4), F32) for rank in range(4)]
    biases = 2 * 24 + 32 if family == "gpt_oss" else 0
    expert = 4 * whole.num_layers * (3 * 24 * 32 + biases)
    assert found[0] == found[1] == found[2] + expert == found[3] + expert
    more = 4 * whole.num_layers * 5 * 32 if biases else 0  # by width each rank has all biases of down
    assert weight_bytes(whole, Group(0, 2), F32) == weight_bytes(width, Group(0, 2), F32) - more


# -- kernels ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN in padding
@interpreted
@pytest.mark.parametrize(
    ("rows", "sizes", "ranks", "tile_rows"),
    [(1, Sizes(), 2, 16), (2, Sizes(12, 3), 4, 2), (97, Sizes(), 4, 4), (1030, Sizes(12, 2), 2, 64)],
)
def test_routing_of_ranks(rows: int, sizes: Sizes, ranks: int, tile_rows: int) -> None:
    for rank in range(ranks):
        placement = ExpertPlacement.of_rank(sizes.experts, rank, ranks)
        moe_cases.check_routing(rows, sizes, BF16 if rank else F32, "cpu", tile_rows, placement)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN in padding
@interpreted
@pytest.mark.parametrize("choice", [_PLAIN, moe_cases.SWAPPED], ids=["plain", "swapped"])
@pytest.mark.parametrize("rows", [1, 2, 40])
def test_experts_of_ranks(rows: int, choice: Any) -> None:
    moe_cases.check_parts(rows, Sizes(clamped=rows == 2), 3, F32, "cpu", choice)


# -- engines ------------------------------------------------------------------------------------------------


def test_an_engine_on_two_ranks(tmp_path: Path) -> None:
    """Answers, the experts of tokens by their numbers in the model, sleep and new weights."""
    first, second = (write_tiny_model(tmp_path / str(i), "qwen2_moe", seed=i) for i in range(2))
    prompts = make_prompts()[:4]
    options: dict[str, Any] = {"enable_prefix_caching": False, "return_routed_experts": True}
    with make_tiny(first, **options) as llm:
        wanted = llm.generate(prompts, SHORT, use_tqdm=False)
    options |= {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    with make_digest(first, **options) as llm:
        found = llm.generate(prompts, SHORT, use_tqdm=False)
        assert tokens(found) == tokens(wanted)
        for output, other in zip(found, wanted, strict=True):
            assert (output.outputs[0].routed_experts == other.outputs[0].routed_experts).all()
        before = llm.on_ranks("digest")
        llm.sleep(2)
        llm.wake_up()
        assert llm.on_ranks("digest") == before
        with pytest.raises(
            ValueError, match=r"experts\.7\.up_proj\.weight has shape \(3, 32\), but .*24, 32"
        ):
            llm.update_weights({"model.layers.1.mlp.experts.7.up_proj.weight": torch.zeros(3, 32)})
        llm.update_weights(transformers_model(second).state_dict())
        config = config_of(second, tensor_parallel_size=2, enable_expert_parallel=True)
        loads = [digest(loaded(config, second, Group(rank, 2))) for rank in (0, 1)]
        for after, fresh in zip(llm.on_ranks("digest"), loads, strict=True):
            experts = [name for name in fresh if ".experts." in name]
            assert experts and all(after[name] == fresh[name] for name in experts)
        found = llm.generate(prompts, SHORT, use_tqdm=False)
        assert tokens(found) == [transformers_greedy(second, prompt, 6) for prompt in prompts]


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gpt_oss", {"tensor_parallel_size": 4, "max_num_batched_tokens": 9, "num_kvcache_blocks": 12}),
        ("glm4_moe", {"tensor_parallel_size": 2, "kv_cache_dtype": "auto", "async_scheduling": False}),
        ("qwen3_next", {"tensor_parallel_size": 2, "max_num_batched_tokens": 7}),
        ("mixtral", {"tensor_parallel_size": 2, "data_parallel_size": 2}),
    ],
)
def test_engines(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    folder, prompts = write_tiny_model(tmp_path, family), make_prompts()
    expected = [transformers_greedy(folder, prompt, 6) for prompt in prompts]
    if "data_parallel_size" in options:
        base = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 48, "num_kvcache_blocks": 200}
        llm = LLM(folder, enable_expert_parallel=True, **base, **options)
    else:
        llm = make_tiny(folder, enable_expert_parallel=True, **options)
    with llm:
        assert tokens(llm.generate(prompts, SHORT, use_tqdm=False)) == expected


# -- options ------------------------------------------------------------------------------------------------


def test_what_is_refused(plain: Path, tmp_path: Path) -> None:
    dense = write_tiny_model(tmp_path)
    whole: dict[str, Any] = {"enable_expert_parallel": True}
    with pytest.raises(
        ValueError, match=r"enable_expert_parallel=True .* tensor_parallel_size is 1; raise it"
    ):
        LLM(plain, **whole)
    with pytest.raises(
        ValueError, match="enable_expert_parallel=True needs a mixture of experts, and Qwen3F"
    ):
        make_tiny(dense, tensor_parallel_size=2, **whole)
    with pytest.raises(ValueError, match=r"enable_expert_parallel=True .*: 5 experts are fewer than 8 ranks"):
        config_of(plain, tensor_parallel_size=8, **whole)
    with pytest.raises(ValueError, match="deterministic=True needs tensor_parallel_size=1, not 2"):
        LLM(plain, tensor_parallel_size=2, deterministic=True, **whole)
    with pytest.raises(TypeError, match="enable_expert_parallel must be True or False"):
        LLM(plain, tensor_parallel_size=2, enable_expert_parallel="yes")
    sizes = config_of(plain, tensor_parallel_size=3, **whole)
    with pytest.raises(
        ValueError, match=r"2 KV heads \(or is not a multiple of them\); sizes that do: 1, 2, 4$"
    ):
        sizes.check_tensor_parallel_size(3)


def test_what_a_start_says(plain: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "nanovllm")
    config = config_of(plain, tensor_parallel_size=2, enable_expert_parallel=True)
    assert "experts: 3 or 2 whole ones of 5 on each of 2 ranks" in caplog.text
    by_width: Any = config_of(plain, tensor_parallel_size=2).moe
    assert placed(by_width, 2) == "experts: a part of the width of all 5 on each rank"
    assert replace(by_width, by_rank=True) == config.moe


def test_the_name_is_that_of_vllm() -> None:
    """In its arguments of an engine, with its default, and as its flag."""
    defaults = json.loads((Path(__file__).parents[2] / "data/vllm_defaults.json").read_text())
    assert (
        defaults["EngineArgs"]["enable_expert_parallel"]
        is EngineArgs(model="x").enable_expert_parallel
        is False
    )
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    for flags, value in (
        ([], False),
        (["--enable-expert-parallel"], True),
        (["--no-enable-expert-parallel"], False),
    ):
        args = parser.parse_args(["--model", "x", "-tp", "2", *flags])
        assert EngineArgs.from_cli_args(args).enable_expert_parallel is value
