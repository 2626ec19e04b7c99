"""Every family gives the logits of transformers, from the same files, in float32 on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from tiny_models import (
    FAMILIES,
    MORE_FAMILIES,
    edit_json,
    transformers_greedy,
    transformers_logits,
    write_tiny_model,
)

from nanovllm.attention.base import AttentionMetadata
from nanovllm.attention.reference import ReferenceBackend
from nanovllm.cpu import isa
from nanovllm.device import Device
from nanovllm.engine.startup import resolve_max_model_len
from nanovllm.formats.config_json.reading import NEUTRAL
from nanovllm.kernels.paged import KVCache
from nanovllm.layers.stream import Step
from nanovllm.layers.weights import allocate
from nanovllm.models.config import ModelFamily
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.registry import get_family, load_model_config, register_model, supported_architectures
from nanovllm.models.weights import load_weights
from nanovllm.parallel.group import TPGroup
from nanovllm.quantization.shards import WeightOptions

PROMPT = [5, 93, 17, 2, 60, 60, 31, 8, 44, 71, 12]
BLOCK_SIZE = 4
ROPE_TYPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
}


def load(
    folder: Path,
    max_model_len: int = 128,
    deterministic: bool = False,
    fuse: bool = False,
    overrides: dict[str, Any] | None = None,
    on_cpu: bool = False,
    tp: TPGroup | None = None,
) -> DecoderForCausalLM:
    """on_cpu: weights are stored as a CPU uses them. tp: the part of this rank."""
    config = (
        load_model_config(folder) if overrides is None else load_model_config(folder, overrides=overrides)
    )
    if on_cpu:
        config = replace(config, quant=config.quant.on(Device("cpu").capability))
    model = DecoderForCausalLM(config, tp or TPGroup(), ReferenceBackend(), max_model_len)
    allocate(model, WeightOptions(torch.float32, torch.device("cpu"), deterministic, fuse), config.quant)
    load_weights(model, folder)
    for layer in model.attention_layers:
        shape = (-(-max_model_len // BLOCK_SIZE), BLOCK_SIZE, layer.spec.num_kv_heads, layer.spec.head_dim)
        layer.cache = KVCache(torch.full(shape, torch.nan), torch.full(shape, torch.nan))
        if layer.spec.kv_from is not None:
            layer.cache = model.attention_layers[layer.spec.kv_from].cache
    for state_layer in model.state_layers:
        state_layer.allocate_states(1)
    return model


@torch.inference_mode()
def forward(
    model: DecoderForCausalLM, token_ids: list[int], start: int = 0, wanted: list[int] | None = None
) -> torch.Tensor:
    """Logits [len(token_ids), vocab] of a sequence's tokens from position `start` on, or of the `wanted`
    ones. K/V of earlier tokens are in the cache.
    """
    end = start + len(token_ids)
    positions = torch.arange(start, end, dtype=torch.int32)
    starts, ends = (torch.tensor([0, length], dtype=torch.int32) for length in (len(token_ids), end))
    is_prefill = len(token_ids) > 1
    meta = AttentionMetadata(
        max_seqlen_k=end,
        slot_mapping=positions,
        context_lens=torch.tensor([end], dtype=torch.int32),
        block_tables=torch.arange(-(-end // BLOCK_SIZE), dtype=torch.int32)[None],
        cu_seqlens_q=starts if is_prefill else None,
        cu_seqlens_k=ends if is_prefill else None,
        max_seqlen_q=len(token_ids),
    )
    rows = None if wanted is None else torch.tensor(wanted, dtype=torch.int32)
    logits = model.compute_logits(
        model(
            torch.tensor(token_ids),
            Step(positions, meta, slots=torch.zeros(len(token_ids), dtype=torch.int64)),
            rows,
        )
    )
    assert logits is not None
    return logits


def greedy(model: DecoderForCausalLM, prompt: list[int], max_tokens: int) -> list[int]:
    output: list[int] = []
    step, start = prompt, 0
    while len(output) < max_tokens:
        output.append(int(forward(model, step, start)[-1].argmax()))
        start += len(step)
        step = output[-1:]
    return output


def check_against_transformers(folder: Path) -> None:
    model = load(folder)
    torch.testing.assert_close(
        forward(model, PROMPT), transformers_logits(folder, PROMPT), atol=1e-4, rtol=1e-4
    )
    found = greedy(model, PROMPT, 12)
    assert found == transformers_greedy(folder, PROMPT, 12, found)
    for deterministic in (False, True):
        model = load(folder, deterministic=deterministic, fuse=True)  # equal but for rounding
        expected = transformers_logits(folder, PROMPT)
        torch.testing.assert_close(forward(model, PROMPT), expected, atol=1e-4, rtol=1e-4)
        wanted = [2, len(PROMPT) - 1]
        torch.testing.assert_close(
            forward(model, PROMPT, wanted=wanted), expected[wanted], atol=1e-4, rtol=1e-4
        )


def test_the_last_layer_computes_only_wanted_rows(tmp_path: Path) -> None:
    """After attention, the last layer computes only the wanted rows. All other layers, and its keys and
    values, have all rows.
    """
    model = load(write_tiny_model(tmp_path, "qwen3"))
    rows: list[int] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda _, __, term: rows.append(len(term.x)))
    logits = forward(model, PROMPT, wanted=[len(PROMPT) - 1])
    assert rows == [len(PROMPT)] * (len(model.model.layers) - 1) + [1]
    assert torch.equal(logits.argmax(-1), forward(model, PROMPT)[-1:].argmax(-1))
    stored = [layer.cache.k.flatten(0, 1)[: len(PROMPT)] for layer in model.attention_layers]
    assert all(cells.isfinite().all() for cells in stored)


def test_deterministic_needs_rows_of_whole_16_bytes(tmp_path: Path) -> None:
    """A CPU's kernels need none, but they multiply no odd number of columns."""
    options = WeightOptions(torch.bfloat16, torch.device("cpu"), deterministic=True)

    def allocate_with(size: int) -> None:
        config = load_model_config(write_tiny_model(tmp_path / str(size), "qwen3", intermediate_size=size))
        allocate(DecoderForCausalLM(config, TPGroup(), ReferenceBackend(), 128), options, config.quant)

    message = "multiples of 16 bytes; rows of model.layers.0.mlp.down_proj have {} elements of torch.bfloat16"
    with pytest.raises(ValueError, match=message.format(91)):
        allocate_with(91)
    allocate_with(96)
    if isa.has_kernels():
        allocate_with(90)
    else:
        with pytest.raises(ValueError, match=message.format(90)):
            allocate_with(90)


def test_rows_that_no_product_reads_need_no_alignment(tmp_path: Path) -> None:
    """A convolution of states has 4 weights of 2 bytes for each channel."""
    options = WeightOptions(torch.bfloat16, torch.device("cpu"), deterministic=True)
    config = load_model_config(write_tiny_model(tmp_path, "qwen3_5"))
    allocate(DecoderForCausalLM(config, TPGroup(), ReferenceBackend(), 128), options, config.quant)


@pytest.mark.parametrize("kv_heads", [8, 4, 2, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_and_gqa_ratios(tmp_path: Path, family: str, kv_heads: int) -> None:
    overrides = {"num_attention_heads": 8, "num_key_value_heads": kv_heads, "hidden_size": 64}
    check_against_transformers(write_tiny_model(tmp_path, family, **overrides))


@pytest.mark.parametrize("family", FAMILIES)
def test_tied_embeddings(tmp_path: Path, family: str) -> None:
    check_against_transformers(write_tiny_model(tmp_path, family, tie_word_embeddings=True))


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral"])
def test_head_dim_is_not_hidden_over_heads(tmp_path: Path, family: str) -> None:
    check_against_transformers(write_tiny_model(tmp_path, family, head_dim=12))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_attention_bias(tmp_path: Path, family: str) -> None:
    folder = write_tiny_model(tmp_path, family, attention_bias=True)
    config = load_model_config(folder)
    assert config.qkv_bias
    assert config.o_bias
    check_against_transformers(folder)


def test_mlp_bias(tmp_path: Path) -> None:
    check_against_transformers(write_tiny_model(tmp_path, "llama", mlp_bias=True))


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_rope_types(tmp_path: Path, family: str, rope_type: str) -> None:
    rope = ROPE_TYPES[rope_type] | {"rope_theta": 500.0}
    check_against_transformers(write_tiny_model(tmp_path, family, rope_parameters=rope))


def test_dynamic_rope_ends_at_the_trained_length(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Beyond it every new token changes the rotation of all keys in transformers."""
    rope = ROPE_TYPES["dynamic"] | {"rope_theta": 500.0}
    folder = write_tiny_model(tmp_path, "llama", rope_parameters=rope, max_position_embeddings=16)
    config = load_model_config(folder)
    assert (config.max_position_embeddings, config.longest) == (32, 16)
    assert resolve_max_model_len(None, config) == 16
    beyond = "dynamic rope scaling beyond its trained length of 16 tokens, which is not supported"
    assert f"max_model_len is 16, not the model's 32: longer sequences need its {beyond}" in caplog.text
    for asked in (17, 32, 99):
        with pytest.raises(
            ValueError, match=f"max_model_len={asked} needs this model's {beyond}.* use at most"
        ):
            resolve_max_model_len(asked, config)
    prompt = [*PROMPT, 3, 55, 41, 9, 70]  # as long as the trained length
    found, expected = forward(load(folder, max_model_len=16), prompt), transformers_logits(folder, prompt)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert greedy(load(folder, max_model_len=16), PROMPT, 5) == transformers_greedy(folder, PROMPT, 5)


def test_sharded_bfloat16_checkpoint(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, dtype="bfloat16", max_shard_size="10KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert load_model_config(folder).dtype == "bfloat16"
    check_against_transformers(folder)


@pytest.mark.parametrize("rope_type", [None, *ROPE_TYPES])
def test_config_of_transformers_4_is_the_same(tmp_path: Path, rope_type: str | None) -> None:
    rope = ROPE_TYPES.get(rope_type or "", {"rope_type": "default"})
    folder = write_tiny_model(tmp_path, "llama", rope_parameters=rope | {"rope_theta": 500.0})
    expected = load_model_config(folder)
    assert expected.spec(0).rope.rope_type == rope["rope_type"]
    legacy = {("type" if key == "rope_type" else key): value for key, value in rope.items()}
    edit_json(
        folder / "config.json",
        remove=("rope_parameters", "dtype"),
        rope_theta=500.0,
        rope_scaling=legacy if rope_type else None,
        torch_dtype="float32",
    )
    assert load_model_config(folder) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_keys_take_the_defaults_of_transformers(family: str) -> None:
    config_class, model_class = FAMILIES[family]
    stated = config_class().to_dict()
    reader = get_family(model_class.__name__)
    assert reader.model_config("X", {}) == reader.model_config("X", stated)
    # null is not the same as a missing key: one KV head for each query head, and no window
    nulls = {"num_key_value_heads": None, "sliding_window": None, "eos_token_id": None}
    config = reader.model_config("X", nulls)
    assert (config.num_kv_heads, config.spec(0).window, config.eos_token_ids) == (config.num_heads, None, ())


def test_eos_ids_of_both_files(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama")
    edit_json(folder / "config.json", eos_token_id=7)
    edit_json(folder / "generation_config.json", eos_token_id=[9, 7, 3])
    assert load_model_config(folder).eos_token_ids == (3, 7, 9)
    edit_json(folder / "config.json", remove=("eos_token_id",))
    edit_json(folder / "generation_config.json", eos_token_id=4)
    assert load_model_config(folder).eos_token_ids == (4,)
    edit_json(folder / "generation_config.json", remove=("eos_token_id",))
    assert load_model_config(folder).eos_token_ids == (2,)  # the family's own keys
    edit_json(folder / "generation_config.json", eos_token_id="</s>")
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id .*'</s>'"):
        load_model_config(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["BertModel"]},
            "architecture 'BertModel' is not supported; supported: .*Llama.*Qwen3",
        ),
        ({"architectures": None}, "architectures must name one model, not None"),
        (
            {"rope_parameters": {"rope_type": "fast"}},
            "rope type 'fast' is not supported; .*default.*yarn",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' needs 'short_factor'"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "rope type 'su' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' needs 'factor'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "x"}}, "'factor' must be a number .*'x'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "must be positive"),
        ({"rope_parameters": {"full_attention": {}}}, "one set of rope parameters for all layers"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported; supported: 'silu'"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "way that is not supported; supported: 'fp8', 'co",
        ),
        ({"layer_types": ["linear_attention"] * 2}, "linear_attention"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported; supported: float32, bf"),
        ({"hidden_size": "32"}, "hidden_size must be a positive integer, not '32'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, not 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10000, not 1000000000"),
        ({"num_key_value_heads": 3}, "4 is not a multiple of num_key_value_heads 3"),
        ({"dual_chunk_attention_config": 5}, "dual_chunk_attention_config must be an object, not 5"),
        (
            {"dual_chunk_attention_config": {"chunk_size": 64, "local_size": 64}},
            "dual_chunk_attention_config needs a chunk_size above its local_size 64, not 64",
        ),
        ({"head_dim": 15}, "head_dim must be even and at least 4, not 15"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, not 'no'"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_tiny_model(tmp_path)
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ValueError, match=message) as caught:
        load_model_config(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("family", "key"),
    [
        (family, key)
        for family, (_, model_class, *_) in (FAMILIES | MORE_FAMILIES).items()
        for key in NEUTRAL
        if key not in get_family(model_class.__name__).reads
    ],
)
def test_keys_that_would_change_the_results(family: str, key: str) -> None:
    reader = get_family((FAMILIES | MORE_FAMILIES)[family][1].__name__)
    own = {}
    if family == "granite4":
        own = {"layer_types": ["attention"] * 2, "num_hidden_layers": 2, "num_local_experts": 0}
    plain = reader.model_config("X", own)
    for value in NEUTRAL[key]:
        assert reader.model_config("X", own | {key: value}) == plain
    if key == "num_experts":  # the other name of this setting
        own.pop("num_local_experts", None)
    for value in (0.5, 7, {"x": 1}, [1]):
        with pytest.raises(ValueError, match=rf"config\.json: {key} .* is not supported; supported: None"):
            reader.model_config("X", own | {key: value})


def test_full_attention_equals_a_window_that_is_not_exceeded(tmp_path: Path) -> None:
    check_against_transformers(write_tiny_model(tmp_path, "mistral", sliding_window=len(PROMPT) + 12))


def test_register_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside.keep_families(monkeypatch)
    folder = write_tiny_model(tmp_path, "llama")
    edit_json(folder / "config.json", architectures=["MyLlama"])
    with pytest.raises(ValueError, match="'MyLlama' is not supported"):
        load_model_config(folder)
    register_model("MyLlama", get_family("LlamaForCausalLM"))
    assert "MyLlama" in supported_architectures()
    assert load_model_config(folder).architecture == "MyLlama"
    assert isinstance(get_family("MyLlama"), ModelFamily)
    with pytest.raises(TypeError, match="must be a ModelFamily"):
        register_model("MyLlama", "llama")  # type: ignore[arg-type]


def test_tensor_parallel_sizes() -> None:
    raw = {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 96, "head_dim": 8}
    config = get_family("LlamaForCausalLM").model_config("X", raw)
    for size in (1, 2, 4, 12):
        config.check_tensor_parallel_size(size)
    with pytest.raises(ValueError, match=r"tensor_parallel_size=3 .*12 query heads, 4 KV.*; .* 1, 2, 4, 12$"):
        config.check_tensor_parallel_size(3)
