"""`nanovllm doctor` says whether a model can run, without loading it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from tiny_families import MORE_FAMILIES
from tiny_models import edit_json, write_tiny_model

from nanovllm import demo_model_path
from nanovllm.cpu import isa
from nanovllm.device import Device
from nanovllm.jobs.main import main
from nanovllm.models import weights

Doctor = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Doctor:
    def never(*args: object) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(weights, "load_weights", never)

    def run(*argv: str | Path) -> tuple[int, list[str]]:
        code = main(["doctor", *map(str, argv), "--device", "cpu"])
        return code, capsys.readouterr().out.splitlines()

    return run


@pytest.mark.parametrize(("level", "backend"), [("torch", "reference"), ("generic", "cpu")])
def test_a_model_that_can_run(level: str, backend: str, doctor: Doctor) -> None:
    with isa.compiling_for(level):
        code, lines = doctor(demo_model_path())
    assert code == 0 and lines[0] == "it can run here"
    assert lines[1] == "device: cpu (asked for)" and lines.index("this machine:") > lines.index(
        f"model {demo_model_path()}"
    )
    text = "\n".join(lines)
    for part in (
        f"attention backend {backend}: can run",
        "device: cpu (asked for)",
        "  architecture Qwen3ForCausalLM, 6 layers, vocabulary of 512",
        "  dtype: float32 (the checkpoint's is bfloat16)",
        f"  attention backend: {backend} (no triton: ",
        "  max_model_len: 1,024 of the model's 1,024 positions",
        "  tokenizer: 512 tokens; it has a chat template",
        "  files: all weights are there, with the right shapes",
        "  KV cache: about ",
    ):
        assert part in text, part


@pytest.mark.parametrize(
    "family",
    [
        *("gemma4-experts", "gemma4-unified", "ministral3", "olmo_hybrid", "laguna", "muse_glimmer"),
        *("lfm2", "lfm2_moe"),
    ],
)
def test_families(tmp_path: Path, family: str, doctor: Doctor) -> None:
    """Their files are compared with their config.json, tensors that are not needed too."""
    folder = write_tiny_model(tmp_path, family)
    code, lines = doctor(folder, "--skip-tokenizer-init")
    assert (code, lines[0]) == (0, "it can run here"), lines
    assert "  files: all weights are there, with the right shapes" in lines
    architecture = MORE_FAMILIES[family][1].__name__
    assert any(line.startswith(f"  architecture {architecture}, ") for line in lines)


def test_experts_of_ranks(tmp_path: Path, doctor: Doctor) -> None:
    """Whole ones by rank: where they lie, the weights of the rank that has most, and what is refused."""
    folder = write_tiny_model(tmp_path / "experts", "qwen3_moe", num_experts=5, moe_intermediate_size=4096)
    common = (folder, "--skip-tokenizer-init", "--tensor-parallel-size", "2", "--dtype", "float32")
    found = {}
    for flags in ((), ("--enable-expert-parallel",)):
        code, lines = doctor(*common, *flags)
        assert code == 0, lines[0]
        [found[flags]] = [line for line in lines if line.startswith("  weights:")]
        [experts] = [line for line in lines if line.startswith("  experts:")]
        wanted = "3 or 2 whole ones of 5 on each of 2 ranks" if flags else "a part of the width of all 5"
        assert wanted in experts
    halves, whole = (float(line.split()[1]) for line in found.values())  # 5 halves of an expert, and 3 whole
    assert whole == pytest.approx(1.2 * halves, abs=0.01)
    code, lines = doctor(folder, "--skip-tokenizer-init", "--enable-expert-parallel")
    assert code == 2 and "tensor_parallel_size is 1" in lines[0]
    code, lines = doctor(write_tiny_model(tmp_path / "dense"), *common[1:], "--enable-expert-parallel")
    assert code == 2 and "enable_expert_parallel=True needs a mixture of experts" in lines[0]


def test_no_model(doctor: Doctor) -> None:
    code, lines = doctor()
    assert code == 0 and lines[0].startswith("pass a model, a folder or a hub id")


def test_quantised_weights_count_as_such(doctor: Doctor) -> None:
    def gigabytes(*argv: str) -> float:
        code, lines = doctor(demo_model_path(), *argv)
        assert code == 0
        [line] = [line for line in lines if line.startswith("  weights: ")]
        return float(line.split()[1])

    if isa.has_kernels():
        assert gigabytes("--quantization", "int8") < 0.7 * gigabytes()
    code, lines = doctor(demo_model_path(), "--quantization", "awq")
    assert code == 2 and "quantization='awq', but config.json has no" in lines[0]


def test_models_that_cannot_run(doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = write_tiny_model(tmp_path / "tiny")

    def why(*argv: str | Path) -> str:
        code, lines = doctor(*argv)
        assert code == 2
        return lines[0].removeprefix("it cannot run here: ")

    assert why(tmp_path / "nowhere").endswith("does not exist, and it is not a hub id (organisation/name)")
    assert "tensor_parallel_size=3" in why(tiny, "--tensor-parallel-size", "3", "--skip-tokenizer-init")
    assert "attention_backend='flash_attn' cannot run here" in why(tiny, "--attention-backend", "flash_attn")
    assert "max_model_len must be at least 1, not 0" in why(tiny, "--max-model-len", "0")
    (tiny / "model.safetensors").unlink()
    assert "holds no *.safetensors weights" in why(tiny, "--skip-tokenizer-init")
    edit_json(tiny / "config.json", architectures=["GPT2LMHeadModel"])
    assert "'GPT2LMHeadModel' is not supported" in why(tiny)
    monkeypatch.setattr(Device, "memory", lambda self: (2**20, 2**30))
    assert "the model does not fit: its weights need" in why(demo_model_path())


def test_of_a_model_on_the_hub_only_small_files_are_needed(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = write_tiny_model(tmp_path)
    (tiny / "model.safetensors").unlink()
    asked: list[dict[str, Any]] = []

    def download(name: str, **options: Any) -> str:
        asked.append(options)
        if name != "some/model":
            raise huggingface_hub.errors.LocalEntryNotFoundError("offline")
        return str(tiny)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    code, lines = doctor("some/model", "--skip-tokenizer-init")
    assert code == 0 and "  files: the first run downloads what is not there yet" in lines
    assert not any("safetensors" in pattern for pattern in asked[0]["allow_patterns"])
    code, lines = doctor("other/model")
    assert code == 2 and lines[0].startswith("it cannot run here: model 'other/model' is not a folder here")
