"""The longest sequence: what limits it, what is said where it is shorter than expected, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checked_llm import make_tiny
from tiny_models import write_tiny_model

from nanovllm.engine.startup import resolve_max_model_len
from nanovllm.models.registry import get_family


def test_max_model_len(caplog: pytest.LogCaptureFixture) -> None:
    config = get_family("LlamaForCausalLM").model_config("X", {"max_position_embeddings": 100})
    assert [resolve_max_model_len(asked, config) for asked in (None, 99, 100)] == [100, 99, 100]
    assert not caplog.records
    assert resolve_max_model_len(101, config) == 100
    assert caplog.messages == ["max_model_len is 100, not 101: the model has no more positions"]


def test_a_window_that_shortens_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_tiny_model(tmp_path, "mistral", sliding_window=40)
    make_tiny(folder, max_model_len=None).close()
    said = [each for each in caplog.messages if "max_model_len" in each]
    assert said == [
        "max_model_len is 40, not the model's 512: longer sequences need its sliding window of 40 tokens, "
        "which is not supported"
    ]
    caplog.clear()
    make_tiny(folder, max_model_len=40).close()
    assert "max_model_len" not in caplog.text
    for asked in (41, 10_000):
        with pytest.raises(
            ValueError, match=f"max_model_len={asked} needs .*window of 40 .*at most max_model_len=40"
        ):
            make_tiny(folder, max_model_len=asked)


@pytest.mark.parametrize(
    ("architecture", "raw", "window"),
    [
        ("MistralForCausalLM", {}, 4096),
        ("MistralForCausalLM", {"sliding_window": 64}, 64),
        ("MistralForCausalLM", {"sliding_window": None}, None),
        ("LlamaForCausalLM", {"sliding_window": 64}, None),
        ("Qwen2ForCausalLM", {"sliding_window": 64}, None),
        ("Qwen2ForCausalLM", {"sliding_window": 64, "use_sliding_window": True}, 64),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 32},
            None,
        ),
        ("Qwen3ForCausalLM", {"sliding_window": None, "use_sliding_window": True}, None),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "layer_types": ["full_attention"]}, None),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "layer_types": ["sliding_attention"]}, 4096),
    ],
)
def test_sliding_window_limits_the_length(architecture: str, raw: dict[str, Any], window: int | None) -> None:
    config = get_family(architecture).model_config(architecture, raw)
    assert config.sliding_window == window
    if window is None:
        config.check_max_model_len(config.max_position_embeddings)
    else:
        config.check_max_model_len(window)
        with pytest.raises(ValueError, match=f"sliding window of {window} tokens.* max_model_len={window}"):
            config.check_max_model_len(window + 1)


QWEN_1M = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}


@pytest.mark.parametrize(
    ("changes", "longest"),
    [
        ({}, 253952),
        ({"original_max_position_embeddings": 32768}, 32768),
        ({"original_max_position_embeddings": 0}, 253952),
        ({"sparse_attention_enabled": True}, 32768),
        ({"sparse_attention_enabled": True, "sparse_attention_threshold": 1000}, 1000),
    ],
)
def test_dual_chunk_attention_limits_the_length(changes: dict[str, Any], longest: int) -> None:
    raw = {"max_position_embeddings": 1010000, "dual_chunk_attention_config": QWEN_1M | changes}
    config = get_family("Qwen2ForCausalLM").model_config("X", raw)
    assert config.longest == longest
    config.check_max_model_len(longest)
    message = rf"max_model_len={longest + 1} needs .*dual_chunk_attention_config.*max_model_len={longest}$"
    with pytest.raises(ValueError, match=message):
        config.check_max_model_len(longest + 1)


def test_the_longest_sequence_meets_all_limits() -> None:
    raw = {"max_position_embeddings": 1000, "sliding_window": 300}
    family = get_family("MistralForCausalLM")
    assert family.model_config("X", raw).longest == 300
    chunks = {"dual_chunk_attention_config": {"chunk_size": 250, "local_size": 50}}
    config = family.model_config("X", raw | chunks)
    assert config.longest == 200
    with pytest.raises(ValueError, match=r"sliding window of 300 tokens.* use at most max_model_len=200"):
        config.check_max_model_len(301)
    assert family.model_config("X", raw | {"sliding_window": None}).longest == 1000
