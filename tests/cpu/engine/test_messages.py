"""What users meet first: each message says what the thing is, what is supported, and what to do."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from tiny_models import edit_json, write_tiny_model

import nanovllm
from nanovllm import LLM, SamplingParams, demo_model_path
from nanovllm.config import Config
from nanovllm.jobs.main import parse_args
from nanovllm.models.registry import load_model_config, resolve_model_path
from nanovllm.models.weights import check_weights
from nanovllm.runner.memory import KVCacheSpace, fit_kv_cache

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n"
RUN = ["run", "in.jsonl", "-o", "out.jsonl", "--model", "m"]
FAMILIES = "supported: Ernie4_5ForCausalLM, Exaone4ForCausalLM, Gemma2ForCausalLM, Gemma3ForCausalLM"


def configured(**changes: Any) -> Callable[[Path], object]:
    """Read a model whose config.json has these values."""

    def read(folder: Path) -> object:
        write_tiny_model(folder)
        edit_json(folder / "config.json", **changes)
        return load_model_config(folder)

    return read


def quantised(**config: Any) -> Callable[[Path], object]:
    return configured(quantization_config=config)


def pointer(name: str) -> Callable[[Path], object]:
    """Read a model of which one file is a git-lfs pointer."""

    def read(folder: Path) -> object:
        write_tiny_model(folder)
        (folder / name).write_text(POINTER)
        config = load_model_config(folder)
        check_weights(config, folder)
        return LLM(folder, device="cpu", num_kvcache_blocks=4)

    return read


def gguf(folder: Path) -> object:
    (folder / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    return load_model_config(resolve_model_path(folder / "model-Q4_K_M.gguf"))


def gguf_folder(folder: Path) -> object:
    (folder / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    return load_model_config(folder)


def no_organisation(folder: Path) -> object:
    def refuse(*args: object, **options: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("404 Client Error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub, "snapshot_download", refuse)
        return resolve_model_path("Qwen3-0.6B")


def biased(folder: Path) -> object:
    with LLM(demo_model_path(), device="cpu", num_kvcache_blocks=4) as llm:
        return llm.generate("a", SamplingParams(logit_bias={7: 1.0, 9999: 2.0}), use_tqdm=False)


def flags(*names: str) -> Callable[[Path], object]:
    return lambda folder: parse_args([*RUN, *names])


QUANTISED = "use the model's bfloat16, float16 or float32 checkpoint"
REGISTER = "register_model of nanovllm.models.registry adds it"
CASES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "logit_bias": (biased, ["logit_bias: token id 9999 is outside the vocabulary (0 to 511)"]),
    "--max-tokens": (
        flags("--max-tokens", "9"),
        ["arguments: --max-tokens 9; it is a sampling parameter: write --sampling max_tokens=VALUE"],
    ),
    "--quantization-config": (
        flags("--quantization-config=awq"),
        ["--quantization-config=awq; this option of vLLM is not supported; put it into config.json"],
    ),
    "a flag that does nothing here": (flags("--swap-space", "4"), ["it has no effect here; leave it out"]),
    "a flag that is misspelt": (flags("--max-num-sqs", "1"), ["did you mean --max-num-seqs?"]),
    "a .gguf file": (
        gguf,
        ["model-Q4_K_M.gguf: the file ends within its header; is it complete?"],
    ),
    "a folder with a .gguf file": (
        gguf_folder,
        ["model-Q4_K_M.gguf: the file ends within its header; is it complete?"],
    ),
    "AWQ": (
        quantised(quant_method="awq", bits=4, version="gemv"),
        ["version 'gemv' is not supported; supported: 'gemm'"],
    ),
    "GPTQ": (quantised(quant_method="gptq", bits=8), ["bits 8 is not supported; supported: 4"]),
    "FP8 in other blocks": (
        quantised(quant_method="fp8", weight_block_size=[64, 64]),
        ["weight_block_size [64, 64] is not supported; supported: [128, 128]"],
    ),
    "bitsandbytes": (
        quantised(quant_method="bitsandbytes", load_in_4bit=True),
        ["quant_method 'bitsandbytes'", "not supported", QUANTISED],
    ),
    "a mixture of experts": (
        configured(architectures=["DeepseekV3ForCausalLM"], n_routed_experts=256),
        ["'DeepseekV3ForCausalLM' is not supported, because it is a mixture of ex", FAMILIES, REGISTER],
    ),
    "Gemma": (
        configured(architectures=["Gemma3nForCausalLM"]),
        ["'Gemma3nForCausalLM' is not supported", FAMILIES, REGISTER],
    ),
    "a vision model": (
        configured(architectures=["Qwen2_5_VLForConditionalGeneration"], vision_config={}),
        ["is not supported, because it reads images or sound", FAMILIES, REGISTER],
    ),
    "device='mps'": (
        lambda folder: Config.from_kwargs("m", device="mps"),
        ["device must be 'auto', 'cpu', 'cuda' or 'cuda:N', not 'mps'", "not supported, use 'cpu'"],
    ),
    "git-lfs weights": (
        pointer("model.safetensors"),
        ["model.safetensors is a git-lfs pointer", "git lfs pull"],
    ),
    "a git-lfs config": (pointer("config.json"), ["config.json is a git-lfs pointer", "git lfs pull"]),
    "a git-lfs tokenizer": (
        pointer("tokenizer.json"),
        ["tokenizer.json is a git-lfs pointer", "git lfs pull"],
    ),
    "a hub id without its organisation": (
        no_organisation,
        ["'Qwen3-0.6B' is not a folder here; a hub id mostly has an organisation, such as Qwen/Qwen3-0.6B"],
    ),
    "a rope_theta that is no number": (
        configured(rope_parameters=None, rope_theta="x"),
        ["config.json: rope setting 'rope_theta' must be a number of at least 0, not 'x'"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_messages(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, parts = CASES[case]
    with pytest.raises((Exception, SystemExit)) as caught:
        make(tmp_path)
    text = str(caught.value) + capsys.readouterr().err
    for part in parts:
        assert part in text
    assert "at position" not in text


def test_the_memory_of_a_cpu_is_said_in_plain_words(caplog: pytest.LogCaptureFixture) -> None:
    space = KVCacheSpace("cpu", free=2**33, total=2**35, budget=2**32, reserve=0, per_block=2**20)
    with caplog.at_level(logging.WARNING):
        fit_kv_cache([space], Config("m"), 16, 10**6)
    [text] = caplog.messages
    assert "up to 4.00 GiB of memory will be used" in text and "pass kv_cache_memory_bytes" in text
    assert "KV" not in text and "block" not in text


def test_no_message_names_an_internal_class() -> None:
    """The class names of the package that no user imports, in the texts of errors and of the log."""
    trees = [ast.parse(path.read_text()) for path in Path(nanovllm.__file__).parent.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    classes = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    internal = {name for name in classes if re.match("[A-Z]+[a-z]+.*[A-Z]", name)} - {*nanovllm.__all__}
    internal -= {"ModelFamily"}  # what `register_model` takes
    said = [
        node
        for node in nodes
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and "logger." in ast.unparse(node.func))
    ]
    assert len(said) > 300
    texts = [part.value for node in said for part in ast.walk(node) if isinstance(part, ast.Constant)]
    for text in filter(lambda text: isinstance(text, str), texts):
        assert not internal & set(re.findall(r"\w+", text)), text
