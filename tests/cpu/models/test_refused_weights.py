"""Folders whose weights do not fit their config.json or the device are refused before memory is taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fp8_models import DOWN, EXPERT, tensors_of
from safetensors.torch import save_file
from tiny_models import write_tiny_model

from nanovllm import LLM, ModelLoadError
from nanovllm.config import Config
from nanovllm.device import Device
from nanovllm.engine import startup
from nanovllm.runner import model_runner
from tools.write_fp8 import write_fp8
from tools.write_int4 import write_int4

WRITERS: dict[str, tuple[Callable[[Path, Path], Path], str, str]] = {
    "channel": (lambda source, target: write_fp8(source, target, "channel"), "qwen3", f"{DOWN}.weight_scale"),
    "block": (lambda source, target: write_fp8(source, target, "block"), "qwen3", f"{DOWN}.weight_scale_inv"),
    "experts": (
        lambda source, target: write_fp8(source, target, "block"),
        "qwen3_moe",
        f"{EXPERT}.weight_scale_inv",
    ),
    "awq": (lambda source, target: write_int4(source, target, "awq", group=32), "qwen3", f"{DOWN}.scales"),
}


class Runner(Exception):
    """A runner is made."""


@pytest.fixture
def no_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making a runner fails."""

    def fail(*args: object) -> None:
        raise Runner

    monkeypatch.setattr(model_runner.RankSetup, "load", fail)


@pytest.mark.usefixtures("no_runner")
@pytest.mark.parametrize("case", WRITERS)
def test_a_bad_folder_is_refused_before_there_is_a_runner(tmp_path: Path, case: str) -> None:
    write, family, scale = WRITERS[case]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
    folder = write(write_tiny_model(tmp_path / "plain", family, **sizes), tmp_path / "quantised")

    def start() -> None:
        LLM(folder, device="cpu", skip_tokenizer_init=True)

    with pytest.raises(Runner):
        start()
    path, tensors = folder / "model.safetensors", tensors_of(folder)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors.* is it complete"):
        start()
    save_file(tensors | {scale: torch.ones(7, 5)}, path)
    with pytest.raises(ModelLoadError, match=rf"1 wrong shape: {scale} is \(7, 5\), but the model needs"):
        start()
    path.write_bytes(whole)
    with pytest.raises(Runner):
        start()


@pytest.mark.parametrize(
    ("family", "hidden", "dtype", "multiple"),
    [
        ("qwen3_moe", 68, "bfloat16", 8),
        ("mixtral", 68, "auto", 8),
        ("qwen3_moe", 66, "float32", 4),
        ("qwen3_moe", 68, "float32", None),
        ("qwen3_moe", 72, "float16", None),
        ("qwen3", 68, "bfloat16", None),
    ],
)
def test_rows_of_experts_on_a_gpu(
    tmp_path: Path,
    family: str,
    hidden: int,
    dtype: str,
    multiple: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"hidden_size": hidden, "head_dim": 16}
    folder = write_tiny_model(tmp_path, family, dtype="bfloat16", **sizes)
    gpu = SimpleNamespace(is_cuda=True, capability=(9, 0), ranks=lambda size, replicas: ["cuda:0"])
    gpu.resolve_dtype = lambda *names: Device.resolve_dtype(gpu, *names)
    config = Config(str(folder), dtype=dtype, skip_tokenizer_init=True)
    startup.open_model(Config(str(folder), device="cpu", dtype=dtype, skip_tokenizer_init=True))
    monkeypatch.setattr(startup, "Device", lambda spec: gpu)
    if multiple is None:
        startup.open_model(config)
        return
    with pytest.raises(
        ValueError,
        match=rf"hidden_size {hidden} of config\.json is not a multiple of {multiple}, .*device='cpu'",
    ):
        startup.open_model(config)
