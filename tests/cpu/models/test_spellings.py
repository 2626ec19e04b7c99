"""Settings of config.json that have several spellings: an override in any of them gives the model of a file
that states it plainly, whatever the file's own spelling."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checked_llm import make_tiny
from test_models import forward, load
from tiny_models import FAMILIES, MORE_FAMILIES, edit_json, write_tiny_model

from nanovllm import SamplingParams
from nanovllm.formats.config_json.spellings import MADE_FROM, NAMES
from nanovllm.models.config import FULL, SLIDING, ModelConfig
from nanovllm.models.registry import get_family, load_model_config

SCORED = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
IDS = [(7 * i * i + 3 * i + 5) % 97 for i in range(60)]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
OLD_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
# Files with theta 1e6, without and with a scaling: as transformers 5 and 4 write them, and with both forms.
ROPE_FILES: dict[str, dict[str, Any]] = {
    "5": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "4": {"rope_theta": 1e6, "rope_scaling": None},
    "5 with theta beside it": {"rope_parameters": {"rope_type": "default"}, "rope_theta": 1e6},
    "5, scaled": {"rope_parameters": LLAMA3 | {"rope_theta": 1e6}},
    "4, scaled": {"rope_theta": 1e6, "rope_scaling": LLAMA3},
    "4, edited by hand": {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 8.0}},
    "both": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": LLAMA3},
}
# Overrides, and what a file that states all of it has; None: as the file itself.
ROPE_OVERRIDES: list[tuple[dict[str, Any], dict[str, Any] | None, float]] = [
    ({"rope_theta": 500.0}, None, 500.0),
    ({"rope_scaling": YARN}, YARN, 1e6),
    ({"rope_scaling": OLD_YARN}, YARN, 1e6),
    ({"rope_scaling": YARN | {"rope_theta": 500.0}}, YARN, 500.0),
    ({"rope_scaling": YARN, "rope_theta": 500.0}, YARN, 500.0),
    ({"rope_parameters": YARN}, YARN, 1e6),
    ({"rope_parameters": YARN | {"rope_theta": 500.0}}, YARN, 500.0),
    ({"rope_parameters": YARN, "rope_theta": 500.0}, YARN, 500.0),
    ({"rope_parameters": {"rope_theta": 500.0}, "rope_scaling": YARN}, YARN, 500.0),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, {}, 500.0),
    ({"rope_scaling": None}, {}, 1e6),
    ({"rope_parameters": None, "rope_scaling": None}, {}, 1e6),
]


def stated(folder: Path, within: Path, **settings: Any) -> Path:
    """A copy of a folder whose config.json states rope settings in this way alone."""
    copy = Path(tempfile.mkdtemp(dir=within))
    for path in folder.iterdir():
        if path.name != "config.json":
            (copy / path.name).symlink_to(path)
    keys = ("rope_parameters", "rope_scaling", "rope_theta")
    raw = json.loads((folder / "config.json").read_text())
    (copy / "config.json").write_text(
        json.dumps({key: value for key, value in raw.items() if key not in keys} | settings)
    )
    return copy


def logprobs(folder: Path, overrides: dict[str, Any] | None = None) -> list[list[float]]:
    """After each token of IDS, of the whole vocabulary."""
    logits = forward(load(folder, max_model_len=64, overrides=overrides), IDS)
    found: list[list[float]] = torch.log_softmax(logits, dim=-1).tolist()
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("rope") / "qwen3", "qwen3", max_position_embeddings=64)


@pytest.mark.parametrize("style", ROPE_FILES)
def test_rope_settings_by_every_spelling(model: Path, tmp_path: Path, style: str) -> None:
    file = ROPE_FILES[style]
    own = dict(file.get("rope_scaling") or file.get("rope_parameters") or {})
    folder, none, plain = stated(model, tmp_path, **file), {"rope_type": "default"}, {}
    for overrides, scaling, theta in ROPE_OVERRIDES:
        whole = (own if scaling is None else scaling) or none
        whole = {("rope_type" if key == "type" else key): value for key, value in whole.items()}
        key = json.dumps(settings := {"rope_parameters": whole | {"rope_theta": theta}})
        if key not in plain:
            plain_folder = stated(model, tmp_path, **settings)
            plain[key] = load_model_config(plain_folder), logprobs(plain_folder)
        config, expected = plain[key]
        assert load_model_config(folder, overrides=overrides) == config, overrides
        assert logprobs(folder, overrides) == expected, overrides
    assert len({json.dumps(each[1]) for each in plain.values()}) == len(plain), "each gives other logprobs"


def test_rope_settings_in_the_engine(model: Path, tmp_path: Path) -> None:
    def scored(folder: Path, **overrides: Any) -> list[float]:
        with make_tiny(folder, num_kvcache_blocks=40, hf_overrides=overrides) as llm:
            [output] = llm.generate([IDS], SCORED, use_tqdm=False)
        return [each[token].logprob for token, each in zip(IDS[1:], output.prompt_logprobs[1:], strict=True)]

    saved = stated(model, tmp_path, **ROPE_FILES["5"])
    plain = stated(model, tmp_path, rope_theta=1e6, rope_scaling=YARN)
    assert scored(saved, rope_scaling=YARN) == scored(plain) != scored(saved)


def test_a_scaling_keeps_what_belongs_to_the_model() -> None:
    """The share of a head and the trained length of a file stay, as its theta does."""
    raw = {"partial_rotary_factor": 0.25, "original_max_position_embeddings": 8}
    overrides = {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
    config = get_family("GlmForCausalLM").model_config("X", raw, overrides=overrides)
    rope = config.spec(0).rope
    assert rope is not None
    assert (rope.rope_type, rope.rotary_share, rope.original_max_position) == ("yarn", 0.25, 8)
    config = get_family("GlmForCausalLM").model_config(
        "X", raw, overrides={"rope_scaling": YARN, "partial_rotary_factor": 0.5}
    )
    rope = config.spec(0).rope
    assert rope is not None and (rope.rotary_share, rope.original_max_position) == (0.5, 32)


def by_kind(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {FULL: full, SLIDING: sliding}}


def ropes(config: ModelConfig) -> dict[bool, Any]:
    return {config.spec(layer).window is None: config.spec(layer).rope for layer in range(config.num_layers)}


PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 8.0}
# A family, ways to state one pair of ropes, an override, and the pair of ropes that it gives.
ROPES_BY_KIND: list[tuple[str, list[dict[str, Any]], dict[str, Any], dict[str, Any]]] = [
    (
        "gemma3",
        files := [
            by_kind(LINEAR | {"rope_theta": 1e6}, PLAIN),
            {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": LINEAR},
            by_kind({"rope_theta": 1e6}, PLAIN) | {"rope_scaling": {"type": "linear", "factor": 8.0}},
        ],
        {"rope_theta": 700.0},
        by_kind(LINEAR | {"rope_theta": 700.0}, PLAIN),
    ),
    (
        "gemma3",
        files,
        {"rope_local_base_freq": 9.0},
        by_kind(LINEAR | {"rope_theta": 1e6}, PLAIN | {"rope_theta": 9.0}),
    ),
    ("gemma3", files, {"rope_scaling": YARN}, by_kind(YARN | {"rope_theta": 1e6}, PLAIN)),
    ("gemma3", files, {"rope_scaling": None}, by_kind({"rope_theta": 1e6}, PLAIN)),
    (
        "gemma3",
        files,
        {"rope_parameters": {FULL: YARN, SLIDING: {"rope_theta": 9.0}}},
        by_kind(YARN | {"rope_theta": 1e6}, PLAIN | {"rope_theta": 9.0}),
    ),
    (
        "olmo3",
        olmo := [
            by_kind(YARN | {"rope_theta": 5e5}, PLAIN | {"rope_theta": 5e5}),
            {"rope_theta": 5e5, "rope_scaling": YARN},
        ],
        {"rope_theta": 700.0},
        by_kind(YARN | {"rope_theta": 700.0}, PLAIN | {"rope_theta": 700.0}),
    ),
    (
        "olmo3",
        olmo,
        {"rope_scaling": None},
        by_kind(PLAIN | {"rope_theta": 5e5}, PLAIN | {"rope_theta": 5e5}),
    ),
    (
        "gemma4",
        [by_kind({"rope_type": "proportional", "partial_rotary_factor": 0.4, "rope_theta": 300.0}, PLAIN)],
        {"rope_parameters": {SLIDING: {"rope_theta": 9.0}}},
        by_kind(
            {"rope_type": "proportional", "partial_rotary_factor": 0.4, "rope_theta": 300.0},
            PLAIN | {"rope_theta": 9.0},
        ),
    ),
]


@pytest.mark.parametrize(("family", "files", "overrides", "plain"), ROPES_BY_KIND)
def test_ropes_of_kinds_of_layers(
    family: str, files: list[dict[str, Any]], overrides: dict[str, Any], plain: dict[str, Any]
) -> None:
    reader = get_family(MORE_FAMILIES[family][1].__name__)
    expected = reader.model_config("X", plain)
    for file in files:
        own = reader.model_config("X", file)
        found = reader.model_config("X", file, overrides=overrides)
        assert ropes(found) == ropes(expected) and found == expected, file
        assert ropes(own) != ropes(found), file
        assert own == reader.model_config("X", files[0])


# What a file states, what an override states in each spelling, and a file that states both plainly.
OFF = {"sliding_window": None, "use_sliding_window": False, "layer_types": [FULL] * 4, "num_hidden_layers": 4}
ON = {"sliding_window": 6, "use_sliding_window": True, "num_hidden_layers": 4}
SETTINGS: list[tuple[str, list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]] = [
    (
        "llama",
        [{"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}, {"dtype": "bfloat16", "torch_dtype": "float32"}],
        [{"dtype": "float16"}, {"torch_dtype": "float16"}, {"dtype": "float16", "torch_dtype": "float16"}],
        {"dtype": "float16"},
    ),
    (
        "gemma2",
        [{"hidden_activation": "gelu"}, {"hidden_activation": "gelu", "hidden_act": "silu"}],
        [{"hidden_activation": "silu"}, {"hidden_act": "silu"}],
        {"hidden_activation": "silu"},
    ),
    (
        "qwen3_moe",
        [{"num_experts": 8}, {"num_local_experts": 8}],
        [{"num_experts": 12}, {"num_local_experts": 12}],
        {"num_experts": 12},
    ),
    (
        "granite4",
        [
            {"num_local_experts": 0, "num_hidden_layers": 3, "layer_types": ["attention"] * 3},
            {"num_local_experts": 0, "num_hidden_layers": 3, "layers_block_type": ["attention"] * 3},
        ],
        [
            {"num_hidden_layers": 2, "layer_types": [FULL] * 2},
            {"num_hidden_layers": 2, "layers_block_type": ["attention"] * 2},
        ],
        {"num_local_experts": 0, "num_hidden_layers": 2, "layers_block_type": ["attention"] * 2},
    ),
    (
        "gemma3",
        [
            {"num_hidden_layers": 4, "sliding_window_pattern": 2},
            {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "_sliding_window_pattern": 2},
            {"text_config": {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2}},
        ],
        [
            {"sliding_window_pattern": 3},
            {"_sliding_window_pattern": 3},
            {"layer_types": [SLIDING, SLIDING, FULL, SLIDING]},
            {"text_config": {"sliding_window_pattern": 3}},
        ],
        {"num_hidden_layers": 4, "layer_types": [SLIDING, SLIDING, FULL, SLIDING]},
    ),
    (
        "exaone4",
        [
            {"num_hidden_layers": 4, "sliding_window": 6, "layer_types": [SLIDING, FULL] * 2},
            {"num_hidden_layers": 4, "sliding_window": 6, "sliding_window_pattern": 2},
        ],
        [{"sliding_window_pattern": 4}, {"layer_types": [SLIDING] * 3 + [FULL]}],
        {"num_hidden_layers": 4, "sliding_window": 6, "sliding_window_pattern": 4},
    ),
    (
        "exaone4",
        [{"num_hidden_layers": 4, "sliding_window": None, "layer_types": [FULL] * 4}],
        [{"sliding_window": 6}],
        {"num_hidden_layers": 4, "sliding_window": 6},
    ),
    (
        "qwen2",
        [ON | {"max_window_layers": 1, "layer_types": [FULL] + [SLIDING] * 3}, ON | {"max_window_layers": 1}],
        [{"max_window_layers": 3}, {"layer_types": [FULL] * 3 + [SLIDING]}],
        ON | {"max_window_layers": 3},
    ),
    (
        "qwen3",
        [OFF | {"max_window_layers": 1}],
        [{"sliding_window": 6, "use_sliding_window": True}],
        ON | {"max_window_layers": 1},
    ),
    (
        "smollm3",
        [
            {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "layer_types": [FULL] * 4},
            {"num_hidden_layers": 4},
        ],
        [{"no_rope_layer_interval": 2}, {"no_rope_layers": [1, 0, 1, 0]}],
        {"num_hidden_layers": 4, "no_rope_layer_interval": 2},
    ),
    (
        "gemma4",
        [
            {"num_hidden_layers": 2, "per_layer_config": {"1": {"head_dim": 64, "num_key_value_heads": 1}}}
            | {"layer_types": [SLIDING, FULL], "attention_k_eq_v": True},
        ],
        [
            {"global_head_dim": 32, "num_global_key_value_heads": 2},
            {"per_layer_config": {"1": {"head_dim": 32, "num_key_value_heads": 2}}},
        ],
        {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL], "attention_k_eq_v": True}
        | {"global_head_dim": 32, "num_global_key_value_heads": 2},
    ),
]


@pytest.mark.parametrize(("family", "files", "spellings", "plain"), SETTINGS)
def test_every_other_setting(
    family: str, files: list[dict[str, Any]], spellings: list[dict[str, Any]], plain: dict[str, Any]
) -> None:
    reader = get_family((FAMILIES | MORE_FAMILIES)[family][1].__name__)
    expected = reader.model_config("X", plain)
    for file in files:
        assert reader.model_config("X", file) == reader.model_config("X", files[0]) != expected
        for overrides in spellings:
            assert reader.model_config("X", file, overrides=overrides) == expected, (file, overrides)


def test_every_spelling_is_tested() -> None:
    def keys(value: Any) -> set[str]:
        inner = [value.get("text_config", {})] if isinstance(value, dict) else []
        return set(value) | {key for each in inner for key in each}

    tested = {key for _, files, changes, _ in SETTINGS for each in (*files, *changes) for key in keys(each)}
    assert {other for names in NAMES.values() for other in names} <= tested
    assert {other for made, names in MADE_FROM.items() for other in (made, *names)} <= tested


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("llama", {"dtype": "float16", "torch_dtype": "bfloat16"}, "dtype and torch_dtype are one setting"),
        (
            "llama",
            {"sliding_window_pattern": 2},
            "does not read sliding_window_pattern; override layer_types",
        ),
        ("gemma2", {"max_window_layers": 2}, "does not read max_window_layers; override layer_types"),
        ("llama", {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}}, "rope_theta is stated twice"),
        ("llama", {"rope_scaling": {"factor": 2.0}}, "have no rope_type, and config.json's is 'default'"),
        (
            "llama",
            {"rope_scaling": YARN, "rope_parameters": LLAMA3},
            "rope_scaling are one setting.*rope_type",
        ),
        ("llama", {"rope_scaling": 5}, "hf_overrides: rope parameters must be an object, not 5"),
        ("gemma4", {"rope_theta": 5.0}, "a rope for each kind of layer, so rope_theta says too little"),
        ("gemma4", {"rope_parameters": {FULL: {"rope_theta": 5.0}}}, "have no rope_type.*'proportional'"),
    ],
)
def test_overrides_that_do_not_say_what_they_mean(
    family: str, overrides: dict[str, Any], message: str
) -> None:
    reader = get_family((FAMILIES | MORE_FAMILIES)[family][1].__name__)
    with pytest.raises(ValueError, match=message):
        reader.model_config("X", {}, overrides=overrides)


def test_a_file_that_contradicts_itself(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "llama")
    edit_json(folder / "config.json", rope_parameters=YARN, rope_scaling=LLAMA3)
    with pytest.raises(
        ValueError, match=r"rope_scaling are one setting, and they state rope_type 'yarn' and 'll"
    ):
        load_model_config(folder)
