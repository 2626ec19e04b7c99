"""What families read in config.json in the same way. Every error names the key. Opens no file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm.attention.rotary import LARGEST, ROPES, RopeConfig
from nanovllm.kernels.activation import Activation
from nanovllm.models.config import FULL, SLIDING, HFConfig

MOST_LAYERS = 10_000  # each of which is listed
_LARGEST_THETA = 2.0**63  # Llama 3 models for millions of tokens have some 10 ** 10
_SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")


def window_length(hf: HFConfig) -> int | None:
    """The sliding window; a missing key means 4,096, null means none."""
    return None if hf.raw.get("sliding_window", 4096) is None else hf.integer("sliding_window", 4096)


def layer_kinds(hf: HFConfig, default: Callable[[int], bool]) -> list[str]:
    """The kind of each layer: `layer_types` of config.json, or those that `default` says are sliding."""
    count = hf.integer("num_hidden_layers")
    kinds: list[str] = hf.get("layer_types") or [
        SLIDING if default(layer) else FULL for layer in range(count)
    ]
    if len(kinds) != count:
        raise ValueError(
            f"config.json: layer_types names {len(kinds)} layers, and num_hidden_layers is {count}"
        )
    return kinds


def check_windows(hf: HFConfig) -> None:
    """ValueError if layer_types names layers with a window, and use_sliding_window is not true."""
    if SLIDING in hf.get("layer_types", []) and not hf.boolean("use_sliding_window"):
        raise ValueError(
            f"config.json: layer_types names a layer with {SLIDING}, and use_sliding_window is not true; "
            'make them agree, as with hf_overrides={"use_sliding_window": ...}'
        )


def check_layers(raw: Mapping[str, Any]) -> None:
    """ValueError for more layers than `MOST_LAYERS`."""
    count = raw.get("num_hidden_layers")
    if isinstance(count, int) and count > MOST_LAYERS:
        raise ValueError(f"config.json: num_hidden_layers must be at most {MOST_LAYERS}, not {count}")


def first_layers(hf: HFConfig, key: str) -> frozenset[int]:
    """The indices of the first layers, of which `key` says how many; 0 without."""
    count = hf.get(key, 0)
    if type(count) is not int or not 0 <= count <= MOST_LAYERS:
        raise ValueError(
            f"config.json: {key} must be a number of layers, at most {MOST_LAYERS}, not {count!r}"
        )
    return frozenset(range(count))


def check_fixed(hf: HFConfig, fixed: Mapping[str, Any]) -> None:
    """ValueError for a key with another value than the one that is supported."""
    for key, right in fixed.items():
        if hf.get(key, right) != right:
            raise ValueError(f"config.json: {key} {hf.get(key)!r} is not supported; it must be {right!r}")


def number(hf: HFConfig, key: str, default: float = 1.0) -> float:
    """A positive number."""
    value = hf.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 2**31:
        raise ValueError(f"config.json: {key} must be a positive number, not {value!r}")
    return float(value)


def eos_token_ids(hf: HFConfig, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """All ids in either file; the family's default only if neither has any."""
    stated: set[int] = set()
    for source, value in (
        ("config.json", hf.raw.get("eos_token_id")),
        ("generation_config.json", generation.get("eos_token_id")),
    ):
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None:
                continue
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise ValueError(f"{source}: eos_token_id must be token ids, not {value!r}")
            stated.add(token_id)
    if not stated and "eos_token_id" not in hf.raw and "eos_token_id" in hf.defaults:
        default = hf.defaults["eos_token_id"]
        stated.update(default if isinstance(default, list) else [default])
    return tuple(sorted(stated))


def activation(hf: HFConfig) -> Activation:
    try:
        return Activation.of(hf.get("hidden_act", "silu"))
    except ValueError as error:
        raise ValueError(f"config.json: hidden_act {error}") from None


def dual_chunk(hf: HFConfig) -> int | None:
    """The length up to which dual chunk attention (Qwen2.5-1M) equals full attention: one chunk, before the
    scaling of logits and sparse attention begin. None without dual chunk attention."""
    raw = hf.get("dual_chunk_attention_config")
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise ValueError(f"config.json: dual_chunk_attention_config must be an object, not {raw!r}")
    config = HFConfig(raw, {"chunk_size": 8192, "local_size": 1024, "sparse_attention_threshold": 32768})
    chunk, local = config.integer("chunk_size"), config.integer("local_size")
    if chunk <= local:
        raise ValueError(
            f"config.json: dual_chunk_attention_config needs a chunk_size above its local_size {local}, "
            f"not {chunk}"
        )
    limits = [chunk - local]
    if config.get("original_max_position_embeddings"):
        limits.append(config.integer("original_max_position_embeddings"))
    if config.get("sparse_attention_enabled"):
        limits.append(config.integer("sparse_attention_threshold"))
    return min(limits)


def rope_config(
    params: Mapping[str, Any], positions: int, share: float | None, interleaved: bool
) -> RopeConfig:
    """params: of one kind of layer, as `one_form` gives them. positions: `max_position_embeddings`. share: of
    a head's elements, unless `params` say it; None: only 1 is supported."""
    stated = params.get("partial_rotary_factor", 1.0 if share is None else share)
    if isinstance(stated, bool) or not isinstance(stated, (int, float)) or not 0 < stated <= 1:
        raise ValueError(f"config.json: partial_rotary_factor must be above 0, at most 1, not {stated!r}")
    if share is None and stated != 1.0:
        raise ValueError(f"config.json: partial_rotary_factor {stated} is not supported; supported: 1.0")
    try:
        rope = rope_from(params, 10000.0, positions)
    except ValueError as error:
        raise ValueError(f"config.json: {error}") from None
    return replace(rope, rotary_share=float(stated), interleaved=interleaved)


def rope_from(params: Mapping[str, Any], theta: float, max_position_embeddings: int) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_scaling` (4, where the type may be called "type").

    theta, max_position_embeddings: defaults for keys missing in `params`. Raises ValueError for an
    unknown type, a missing key, and a value that is not a number.
    """
    rope_type = params.get("rope_type", params.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in ROPES:
        raise ValueError(f"rope type {rope_type!r} is not supported; supported: {', '.join(ROPES)}")
    kind = ROPES[rope_type]
    for key in kind.required:
        if params.get(key) is None:
            raise ValueError(f"rope type {rope_type!r} needs {key!r}, and the config has only {dict(params)}")

    def number(key: str, default: float | None) -> Any:
        value = params.get(key)
        if value is None:
            value = default
        if value is None:
            return None
        most = _LARGEST_THETA if key == "rope_theta" else LARGEST
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < most:
            raise ValueError(f"rope setting {key!r} must be a number of at least 0, not {value!r}")
        return value

    def numbers(key: str) -> tuple[float, ...]:
        values = params.get(key) or ()
        if not kind.scales_pairs:
            return ()
        if not isinstance(values, list) or not all(isinstance(each, (int, float)) for each in values):
            raise ValueError(f"rope setting {key!r} must be a list of numbers, not {values!r}")
        return tuple(map(float, values))

    original = number("original_max_position_embeddings", max_position_embeddings)
    if not kind.states_original:
        original = max_position_embeddings
    if original <= 0:
        raise ValueError(f"original_max_position_embeddings must be positive, not {original}")
    factor = number("factor", max_position_embeddings / original if kind.factor_is_ratio else 1.0)
    own = ("low_freq_factor", "high_freq_factor", "attention_factor", "mscale", "mscale_all_dim")
    config = RopeConfig(
        rope_type=rope_type,
        theta=float(number("rope_theta", theta)),
        original_max_position=original,
        factor=factor,
        beta_fast=number("beta_fast", 0) or 32.0,
        beta_slow=number("beta_slow", 0) or 1.0,
        truncate=bool(params.get("truncate", True)),
        short_factor=numbers("short_factor"),
        long_factor=numbers("long_factor"),
        **{key: number(key, getattr(RopeConfig, key)) for key in own},
    )
    _check(config, max_position_embeddings)
    return config


def _check(rope: RopeConfig, stated: int) -> None:
    """Raise ValueError for values that do not go together, with `stated` positions."""
    if rope.theta <= 0 or rope.factor <= 0:
        raise ValueError(f"rope_theta and factor must be positive, not {rope.theta} and {rope.factor}")
    rope.kind.check(rope)
    if not 1 <= rope.max_position(stated) < LARGEST:
        raise ValueError(
            f"max_position_embeddings {stated} with the factor {rope.factor} must "
            "be at least 1 and below 2**31"
        )


def fraction(hf: HFConfig, key: str) -> float:
    value = hf.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise ValueError(f"config.json: {key} must be a number between 0 and 1, not {value!r}")
    return float(value)


def dtype(hf: HFConfig) -> str:
    name = str(hf.get("dtype") or "float32").removeprefix("torch.")
    if name not in _SUPPORTED_DTYPES:
        raise ValueError(
            f"config.json: dtype {name!r} is not supported; supported: {', '.join(_SUPPORTED_DTYPES)}"
        )
    return name
