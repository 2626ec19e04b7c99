"""The longest sequence: what limits it, what is said where it is shorter than expected, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import inside
import pytest
from checked_llm import make_tiny
from tiny_models import write_tiny_model

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.device import Device
from nanovllm.engine.startup import cache_options, resolve_max_model_len, usable_length
from nanovllm.models.registry import get_family, load_model_config


def test_max_model_len(caplog: pytest.LogCaptureFixture) -> None:
    config = get_family("LlamaForCausalLM").model_config("X", {"max_position_embeddings": 100})
    assert [resolve_max_model_len(asked, config) for asked in (None, 99, 100)] == [100, 99, 100]
    assert not caplog.records
    assert resolve_max_model_len(101, config) == 100
    assert caplog.messages == ["max_model_len is 100, not 101: the model has no more positions"]


def test_a_window_does_not_shorten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Windows that no sequence exceeds are left out, so that they cost nothing."""
    folder = write_tiny_model(tmp_path, "mistral", sliding_window=40)
    for asked, length, window in ((None, 512, 40), (41, 41, 40), (40, 40, None)):
        with make_tiny(folder, max_model_len=asked, num_kvcache_blocks=64) as llm:
            assert llm.model_config.max_model_len == length
            assert {layer.spec.window for layer in inside.model(llm).attention_layers} == {window}
    assert "max_model_len" not in caplog.text


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
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "layer_types": ["full_attention"] * 32}, None),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 32}, 4096),
    ],
)
def test_windows_of_layers(architecture: str, raw: dict[str, Any], window: int | None) -> None:
    config = get_family(architecture).model_config(architecture, raw)
    windows = {spec.window for spec in config.attention}
    assert windows == {window} or windows == {None, window}
    config.check_max_model_len(config.max_position_embeddings)
    assert config.longest == config.max_position_embeddings


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


# -- the size of the KV cache ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "longest", "raised"),
    [
        ({"num_kvcache_blocks": 5}, 40, "num_kvcache_blocks"),
        ({"kv_cache_memory_bytes": 30_000}, 56, "kv_cache_memory_bytes"),
    ],
)
def test_a_small_cache_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, int], longest: int, raised: str
) -> None:
    folder = write_tiny_model(tmp_path)
    with make_tiny(folder, **options) as llm:
        assert [each for each in caplog.messages if "max_model_len" in each] == [
            f"max_model_len is {longest}, not 64: the KV cache has room for no more; raise {raised} for "
            "longer sequences"
        ]
        assert llm.model_config.max_model_len == longest
        with pytest.raises(ValueError, match=f"prompt has {longest} tokens.* or raise {raised}$"):
            llm.generate([[5] * longest], use_tqdm=False)
    caplog.clear()
    make_tiny(folder, num_kvcache_blocks=8).close()
    assert "max_model_len" not in caplog.text


def test_gpu_memory_utilization_on_a_cpu(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It does nothing there: this is said where it is given, and no error advises it."""
    folder = write_tiny_model(tmp_path)
    make_tiny(folder).close()
    assert "gpu_memory_utilization" not in caplog.text
    make_tiny(folder, gpu_memory_utilization=0.5, num_kvcache_blocks=8).close()
    assert caplog.messages == [
        "gpu_memory_utilization=0.5 does nothing on a CPU, where num_kvcache_blocks sets the size of the KV "
        "cache"
    ]
    config = Config.from_kwargs("m", device="cpu")
    assert cache_options(config, Device("cpu")) == "kv_cache_memory_bytes or num_kvcache_blocks"


def test_replicas_say_it_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_model(tmp_path, "mistral", sliding_window=64)
    options = {"device": "cpu", "skip_tokenizer_init": True, "kvcache_block_size": 8}
    with LLM(folder, data_parallel_size=2, num_kvcache_blocks=5, **options) as llm:
        assert llm.model_config.max_model_len == 40
        with pytest.raises(ValueError, match=r"has 5 blocks of 8 tokens.* or raise num_kvcache_blocks$"):
            llm.generate([[5] * 40], use_tqdm=False)
    assert capfd.readouterr().err.count("max_model_len") == 0  # in this process pytest takes the two lines


@pytest.mark.parametrize("rope", [{}, {"rope_type": "linear", "factor": 9.0}])
def test_tables_follow_what_can_be_used(tmp_path: Path, rope: dict[str, Any]) -> None:
    """A config of 2 * 10**7 positions makes no table of that length: memory and time follow the KV cache."""
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4} | rope}
    folder = write_tiny_model(tmp_path, max_position_embeddings=2 * 10**7, **rope)
    with make_tiny(folder, max_model_len=None, num_kvcache_blocks=16, kvcache_block_size=16) as llm:
        table = inside.model(llm).model.layers[0].self_attn.rotary.cos_sin
        assert llm.model_config.max_model_len == 256
        length = inside.runner(llm).max_model_len  # a block more than the cache has
        assert len(table) == length + 1 == 256 + 16 + 1
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        [out] = llm.generate([[5] * 200], params, use_tqdm=False)
        assert len(out["token_ids"]) == 56
    config = load_model_config(folder)
    tables = 2**30 // (24 * 1024 // 16 + 12 * 16)  # of max_num_seqs rows of blocks, and of head_dim
    per_token = 2 * 2 * 2 * 16 * 4  # K and V, layers, KV heads, head_dim, float32
    for options, most in (
        ({}, tables),
        ({"tensor_parallel_size": 2}, tables),
        ({"max_num_seqs": 1, "kvcache_block_size": 256}, 2**30 // 192),
        ({"kv_cache_memory_bytes": 2**20}, 2**20 // per_token),
        ({"num_kvcache_blocks": 3}, 3 * 256),
    ):
        of = Config.from_kwargs(str(folder), device="cpu", **options)
        assert usable_length(of, config, Device("cpu"), 2 * 10**7) == most + 256
        assert usable_length(of, config, Device("cpu"), 700) == 700


LONGROPE = {
    **{"hidden_size": 64, "sliding_window": None, "original_max_position_embeddings": 64},
    "rope_parameters": {
        **{"rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0] * 8},
        "long_factor": [1.0 + 2 * index for index in range(8)],
    },
}


@pytest.mark.parametrize(
    ("family", "settings", "options", "asked"),
    [
        ("phi3", LONGROPE, {}, None),
        ("phi3", LONGROPE, {}, 64),
        ("gemma3", {"sliding_window": 40}, {}, None),
        ("qwen3", {}, {"kv_cache_dtype": "fp8"}, None),
    ],
    ids=["longrope", "short longrope", "windows", "scales of FP8"],
)
def test_the_size_of_the_cache_changes_no_answer(
    tmp_path: Path, family: str, settings: dict[str, Any], options: dict[str, Any], asked: int | None
) -> None:
    """Some of these caches hold fewer tokens than longrope's training length, a window or a calibration."""
    folder = write_tiny_model(tmp_path, family, **settings)
    prompt = [(7 * index * index + 3) % 97 for index in range(30)]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    found, lengths = [], []
    tight = {"num_kvcache_blocks": 5 if family == "gemma3" else 3}  # whose layers share slabs
    for size in ({}, tight, {"kv_cache_memory_bytes": 40_000}):
        with make_tiny(folder, kvcache_block_size=16, max_model_len=asked, **options, **size) as llm:
            [output] = llm.generate([prompt], params, use_tqdm=False)
            lengths.append(llm.model_config.max_model_len)
        [answer] = output.outputs
        given = zip(
            [*prompt[1:], *answer.token_ids], [*output.prompt_logprobs[1:], *answer.logprobs], strict=True
        )
        found.append([(token, each[token].logprob) for token, each in given])
    assert found[0] == found[1] == found[2]
    assert lengths[0] == (asked or 512) and lengths[1] < lengths[0], "the caches differ"
