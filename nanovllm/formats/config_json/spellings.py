"""One form of config.json: each setting has one name, whichever version of transformers wrote the file.

Files state some settings in several ways; the tables here list all of them. `hf_overrides` come in after
both sides have this form, so it makes no difference which spelling either of them has. Opens no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanovllm.models.config import FULL, SLIDING, Ropes

# A setting, and its names in files. If a file has several, the first that is not null counts, as in
# transformers; a family's default counts under its own name.
NAMES: dict[str, tuple[str, ...]] = {
    "dtype": ("dtype", "torch_dtype"),
    "hidden_act": ("hidden_activation", "hidden_act"),
    "layer_types": ("layer_types", "layers_block_type"),
    "num_experts": ("num_local_experts", "num_experts"),
    "sliding_window_pattern": ("sliding_window_pattern", "_sliding_window_pattern"),
}
# A list that transformers 5 makes of older settings and writes beside them, and these settings. An override
# of one of them replaces the list.
MADE_FROM: dict[str, tuple[str, ...]] = {
    "layer_types": (
        *("sliding_window_pattern", "max_window_layers"),
        *("no_rope_layers", "no_rope_layer_interval"),
    ),
    "no_rope_layers": ("no_rope_layer_interval",),
    "per_layer_config": ("global_head_dim", "num_global_key_value_heads"),
}
# Of rope: what stays if an override has another scaling, and does not state them.
PROPERTIES = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
_DICTS = ("rope_parameters", "rope_scaling")  # of transformers 5 and 4
_ROPE_KEYS = (*PROPERTIES, "rope_local_base_freq", *_DICTS)

_Sets = dict[str, dict[str, Any]]  # settings by the kind of layer


def one_form(
    file: Mapping[str, Any], overrides: Mapping[str, Any], defaults: Mapping[str, Any], ropes: Ropes
) -> dict[str, Any]:
    """The content of config.json with the names of NAMES, and with `overrides` in place.

    defaults: the family's. The result's `rope_parameters` has one set of settings for each kind of layer,
    with all that is known of it; it has no other key of rope. ValueError for overrides that contradict each
    other or do not say what they mean, and for rope settings of the wrong kind.
    """
    if "hidden_activation" not in defaults:  # transformers reads hidden_act alone
        file = {key: value for key, value in file.items() if key != "hidden_activation"}
    found = _named({**defaults, **file}, _names_of({**defaults, **file}))
    found = {key: value for key, value in found.items() if key in file or key in NAMES}
    changes = _named(overrides, _names_of(overrides, "hf_overrides"))
    found = _without_made_lists(found, changes, defaults) | changes
    rope = _rope(file, overrides, defaults, ropes)
    return {key: value for key, value in found.items() if key not in _ROPE_KEYS} | {"rope_parameters": rope}


def _names_of(raw: Mapping[str, Any], where: str | None = None) -> dict[str, Any]:
    """The settings of NAMES that `raw` states. where: refuse several values of one."""
    found: dict[str, Any] = {}
    for name, others in NAMES.items():
        stated = {other: raw[other] for other in others if other in raw}
        values = [value for value in stated.values() if value is not None]
        if where and any(value != values[0] for value in values):
            raise ValueError(
                f"{where}: {' and '.join(stated)} are one setting; pass one of them, not {stated}"
            )
        if stated:
            found[name] = values[0] if values else None
    return found


def _named(raw: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    others = {other for names in NAMES.values() for other in names}
    return {key: value for key, value in raw.items() if key not in others} | dict(settings)


def _without_made_lists(
    found: dict[str, Any], changes: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """The file's settings without the lists that `changes` replace."""
    for made, sources in MADE_FROM.items():
        given = [name for name in sources if name in changes]
        for name in given:
            if name not in defaults:
                raise ValueError(f"hf_overrides: this family does not read {name}; override {made}")
        if given and made not in changes:
            found = {key: value for key, value in found.items() if key != made}
    before = {**defaults, **found}
    windows_were_off = (
        before.get("sliding_window", 1) in (None, 0) or before.get("use_sliding_window") is False
    )
    windows = {"sliding_window", "use_sliding_window"} & changes.keys()
    kinds = found.get("layer_types")
    made_without = windows_were_off and isinstance(kinds, list) and all(kind == FULL for kind in kinds)
    if windows and (made_without or changes.get("use_sliding_window") is False):  # or made with windows
        found = {key: value for key, value in found.items() if key != "layer_types"}
    return found


def _rope(
    file: Mapping[str, Any], overrides: Mapping[str, Any], defaults: Mapping[str, Any], ropes: Ropes
) -> _Sets:
    """The settings of each kind of layer."""
    if not any(file.get(key) for key in _DICTS):
        file = {**file, "rope_scaling": None, "rope_parameters": defaults.get("rope_parameters")}
    trained = PROPERTIES[-1]  # transformers takes this one from the top level first, of one rope alone
    keys = [key for key in _ROPE_KEYS if ropes == "one" or key != trained]
    top = {key: value for key in keys if (value := _first(key, file, defaults)) is not None}
    single, inside = _top_level(top, ropes), _in_dicts(file, "config.json", ropes)
    if ropes == "each":
        missing = [kind for kind, found in inside.items() if not found]
        if missing:
            raise ValueError(f"config.json: rope_parameters must have an object for {missing[0]!r}")
    known = {
        kind: {"rope_type": "default"}
        | single[kind]
        | inside[kind]
        | ({trained: single[kind][trained]} if trained in single[kind] else {})
        for kind in (FULL, SLIDING)
    }
    known = _overridden(known, overrides, ropes)
    if ropes == "each" and (without := [kind for kind, found in known.items() if "rope_theta" not in found]):
        raise ValueError(
            f"config.json: rope_parameters must have a rope_theta for {without[0]!r}, which transformers has "
            f"no default for; state it, as with hf_overrides={{'rope_parameters': {{{without[0]!r}: ...}}}}"
        )
    return known


def _first(key: str, *sources: Mapping[str, Any]) -> Any:
    if key in _DICTS:
        return None
    return next((each[key] for each in sources if each.get(key) is not None), None)


def _overridden(known: _Sets, overrides: Mapping[str, Any], ropes: Ropes) -> _Sets:
    """`known` with what overrides state."""
    where = "hf_overrides"
    if ropes == "each" and (wrong := [key for key in _ROPE_KEYS if key in overrides and key != _DICTS[0]]):
        raise ValueError(
            f"{where}: this family has a rope for each kind of layer, so {wrong[0]} says too little; "
            "override rope_parameters with an object for full_attention, sliding_attention, or both"
        )
    top = {key: overrides[key] for key in _ROPE_KEYS if overrides.get(key) is not None}
    single, inside = _top_level(top, ropes), _in_dicts(overrides, where, ropes)
    for kind, stated in inside.items():
        for key in single[kind].keys() & stated.keys():
            if single[kind][key] != stated[key]:
                raise ValueError(
                    f"{where}: {key} is stated twice, as {single[kind][key]!r} and {stated[key]!r}; pass it "
                    "once"
                )
        stated = single[kind] | stated
        before, numbers = known[kind], [key for key in stated if key not in PROPERTIES]
        if "rope_type" in stated:
            before = {key: value for key, value in before.items() if key in PROPERTIES}
        elif numbers or (kind in _kinds_in_dicts(overrides, ropes) and before["rope_type"] != "default"):
            raise ValueError(
                f"{where}: rope settings {stated} have no rope_type, and config.json's is "
                f"{before['rope_type']!r}; state the rope_type ('default' for none) with all of its numbers, "
                "or override rope_theta alone"
            )
        known = known | {kind: before | stated}
    return known


def _top_level(top: Mapping[str, Any], ropes: Ropes) -> _Sets:
    """What keys beside the dicts state of each kind."""
    found = {key: top[key] for key in PROPERTIES if key in top}
    if ropes != "local":
        return {FULL: found, SLIDING: found}
    sliding = {key: value for key, value in found.items() if key != "rope_theta"}
    local = {"rope_theta": top["rope_local_base_freq"]} if "rope_local_base_freq" in top else {}
    return {FULL: found, SLIDING: sliding | local}


def _in_dicts(raw: Mapping[str, Any], where: str, ropes: Ropes) -> _Sets:
    """What `rope_parameters` and `rope_scaling` state of each kind. null in overrides means no scaling."""
    found: _Sets = {FULL: {}, SLIDING: {}}
    for key in _DICTS:
        for kind, params in _by_kind(raw.get(key), where, ropes).items():
            if params is not None and not isinstance(params, dict):
                raise ValueError(
                    f"{where}: rope_parameters must have an object for {kind!r}, not {params!r}"
                    if ropes == "each"
                    else f"{where}: rope parameters must be an object, not {params!r}"
                )
            found[kind] = _joined(found[kind], _one(params or {}, where), where)
        if where != "config.json" and key in raw and not raw[key]:
            for kind in (FULL, SLIDING) if ropes == "one" else (FULL,):
                found[kind] = {"rope_type": "default"} | found[kind]
    return found


def _kinds_in_dicts(raw: Mapping[str, Any], ropes: Ropes) -> set[str]:
    return {kind for key in _DICTS for kind, params in _by_kind(raw.get(key), "", ropes).items() if params}


def _by_kind(params: Any, where: str, ropes: Ropes) -> dict[str, Any]:
    """The settings of each kind in one of the dicts."""
    if not params:
        return {}
    if ropes == "each":
        return {kind: params.get(kind) if isinstance(params, dict) else params for kind in (FULL, SLIDING)}
    if isinstance(params, dict) and any(isinstance(value, dict) for value in params.values()):
        if ropes == "one":
            raise ValueError(
                f"{where}: one set of rope parameters for all layers is supported, not {params!r}"
            )
        return {kind: params.get(kind) for kind in (FULL, SLIDING)}
    if ropes == "unscaled" and isinstance(params, dict):
        return {FULL: params, SLIDING: {key: params[key] for key in PROPERTIES[:2] if key in params}}
    return {FULL: params} if ropes == "local" else {FULL: params, SLIDING: params}


def _one(params: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A set of settings without nulls, its type under one name; a file without one means "default"."""
    found = {key: value for key, value in params.items() if value is not None and key != "type"}
    kind = params.get("rope_type") or params.get("type") or ("default" if where == "config.json" else None)
    return found | ({"rope_type": kind} if found and kind is not None else {})


def _joined(one: dict[str, Any], other: dict[str, Any], where: str) -> dict[str, Any]:
    """What both dicts of transformers state together; of a file with both, one may state theta alone."""
    if not one or not other:
        return one or other
    scaled = [each for each in (one, other) if each.get("rope_type", "default") != "default"]
    if len(scaled) == 1:
        plain = one if scaled[0] is other else other
        one, other = scaled[0], {key: plain[key] for key in PROPERTIES if key in plain}
    if twice := [key for key in one if key in other and one[key] != other[key]]:
        raise ValueError(
            f"{where}: {' and '.join(_DICTS)} are one setting, and they state {twice[0]} {one[twice[0]]!r} "
            f"and {other[twice[0]]!r}; remove one of them"
        )
    return one | other
