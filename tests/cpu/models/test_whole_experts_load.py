"""Whole experts by rank: what a rank reads and holds, engines, and options that are refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checked_llm import make_tiny
from digests import digest, make_digest
from engine_cases import make_prompts, tokens
from rank_threads import assert_same, config_of, loaded, on_ranks
from safetensors.torch import load_file, save_file
from tensors import F32
from test_models import PROMPT, forward
from tiny_models import (
    transformers_greedy,
    transformers_model,
    write_tiny_model,
)

from nanovllm import LLM, ModelLoadError, SamplingParams
from nanovllm.layers.stream import Group
from nanovllm.models import weights
from nanovllm.models.registry import open_checkpoint
from nanovllm.models.weights import weight_bytes
from nanovllm.moe.options import placed
from nanovllm.vllm.engine_args import EngineArgs, FlexibleArgumentParser
from tools.write_fp8 import write_fp8
from tools.write_gguf import write_gguf
from tools.write_int4 import write_int4
from tools.write_mxfp4 import write_mxfp4
from tools.write_nvfp4 import write_nvfp4

SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SIZES: dict[str, Any] = {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 64, "num_experts": 5}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("plain"), "qwen3_moe", **SIZES)


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


def write(kind: str, source: Path, target: Path) -> Path:
    if kind == "fp8 block":
        return write_fp8(source, target, "block")
    if kind == "awq":
        return write_int4(source, target, "awq", group=32)
    if kind in ("modelopt", "int8"):
        return write_nvfp4(source, target, kind)[0]
    assert kind == "gguf Q8_0"
    target.mkdir()
    return write_gguf(source, target / "model.gguf", "Q8_0")


@pytest.mark.parametrize("kind", ["floats", "fp8 block", "awq", "modelopt", "int8", "gguf Q8_0"])
def test_a_rank_reads_its_own_experts_alone(
    plain: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 experts on 2 ranks: 3 and 2. The codes of a rank's experts are read once, those of others not at all,
    nor are their scales."""
    path = plain if kind == "floats" else write(kind, plain, tmp_path / "stored")
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
    """A start reserves those of rank 0, which has the most; where experts divide, as many as by width."""
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
