"""The folder of a model: a path, or a hub id, which is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from nanovllm.errors import ModelLoadError
from nanovllm.models.registry import Hub, resolve_model_path


def test_resolve_model_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(name: str, **options: Any) -> str:
        asked.append(name)
        assert "*.safetensors" in options["allow_patterns"]
        assert not any("bin" in pattern for pattern in options["allow_patterns"])
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert resolve_model_path(tmp_path) == tmp_path
    assert resolve_model_path(f"~/{tmp_path.name}") == tmp_path
    assert asked == []
    assert resolve_model_path("Qwen/Qwen3-0.6B") == tmp_path
    assert resolve_model_path("gpt2") == tmp_path
    assert asked == ["Qwen/Qwen3-0.6B", "gpt2"]
    for wrong in ("/no/such/folder", "./models", "../models", "~/models", "a/b/c", "models/", "C:\\models"):
        with pytest.raises(ValueError, match="does not exist, and it is not a hub id"):
            resolve_model_path(wrong)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="is a file; pass the folder"):
        resolve_model_path(tmp_path / "model.safetensors")
    assert len(asked) == 2


def test_arguments_of_the_hub_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def download(name: str, **options: Any) -> str:
        asked.append(options)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve_model_path("org/name", Hub("v1", "/cache", "token", code=True))
    resolve_model_path("org/name", Hub(), "tokenizer")
    first, second = asked
    assert (first["revision"], first["cache_dir"], first["token"]) == ("v1", "/cache", "token")
    assert "*.safetensors" in first["allow_patterns"] and "*.py" in first["allow_patterns"]
    assert (second["revision"], second["cache_dir"], second["token"]) == (None, None, None)
    assert not {"*.safetensors", "*.py"} & set(second["allow_patterns"])
    assert resolve_model_path(tmp_path, Hub("main")) == tmp_path
    with pytest.raises(ValueError, match=r"^revision='v1' is for a hub id, and model .* is a folder"):
        resolve_model_path(tmp_path, Hub("v1"))
    with pytest.raises(ValueError, match=r"^tokenizer_revision='v1' is for a hub id, and tokenizer .* is"):
        resolve_model_path(tmp_path, Hub("v1"), "tokenizer")
    with pytest.raises(ValueError, match="tokenizer folder '/no/such' does not exist"):
        resolve_model_path("/no/such", kind="tokenizer")
    # Before Python 3.14, `Path.exists` raises an error for such a name.
    refused = r"tokenizer ('/aaa.*' cannot be opened: File name too long|folder '/aaa.*' does not exist)"
    with pytest.raises(ValueError, match=refused):
        resolve_model_path("/" + "a" * 300, kind="tokenizer")


def test_a_hub_that_does_not_answer_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, **options: Any) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelLoadError, match=r"no connection.*HF_HUB_OFFLINE.*hf download Qwen/Qwen3-0.6B"):
        resolve_model_path("Qwen/Qwen3-0.6B")
