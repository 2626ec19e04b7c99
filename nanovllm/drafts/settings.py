"""DraftSettings: the option `speculative_config` of `LLM`, checked, under vLLM's names.

Needs no torch. Drafts nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from nanovllm.checks import check_float, check_int, show, wrong
from nanovllm.names import nearest

OPTION = "speculative_config"
METHODS = ("ngram", "suffix")
_LOOKUP = 5  # tokens, vLLM's default of both lengths of an n-gram
_DEPTH = 24  # tokens, vLLM's default
_OFF = """
    enforce_eager disable_eagle_block_drop use_local_argmax_reduction use_heterogeneous_vocab
    parallel_drafting enable_adaptive_verification
"""
_NONE = """
    tensor_parallel_size quantization moe_backend attention_backend kv_cache_dtype max_model_len revision
    code_revision draft_load_config index_share_for_mtp_iteration num_speculative_tokens_per_batch_size
    disable_by_batch_size speculative_token_tree synthetic_acceptance_rates synthetic_acceptance_length
    dspark_draft_topk
"""
# Fields of vLLM's SpeculativeConfig for a second model or another test of drafts: the values of each that
# change nothing.
_ELSEWHERE: dict[str, tuple[Any, ...]] = {
    "model": (None, "ngram", "[ngram]", "suffix"),
    "draft_tensor_parallel_size": (None, 1),
    "disable_padded_drafter_batch": (None, False, True),
    "rejection_sample_method": (None, "standard"),
    "draft_sample_method": (None, "greedy"),
    **dict.fromkeys(_OFF.split(), (None, False)),
    **dict.fromkeys(_NONE.split(), (None,)),
}


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """How drafts are made: the fields of vLLM's SpeculativeConfig that have a meaning without a second model.

    `of` fills in what is not given.
    """

    method: str
    num_speculative_tokens: int  # the most drafts of a sequence in a step
    prompt_lookup_min: int = _LOOKUP  # tokens of the shortest n-gram that is looked up
    prompt_lookup_max: int = _LOOKUP
    suffix_decoding_max_tree_depth: int = _DEPTH  # tokens that match, and drafts, together
    suffix_decoding_max_cached_requests: int = 10_000  # earlier answers that are looked up; 0: none
    suffix_decoding_max_spec_factor: float = 1.0  # the most drafts for each token that matches
    suffix_decoding_min_token_prob: float = 0.1  # the least share of the places that go on with a draft

    @classmethod
    def of(cls, given: object) -> DraftSettings:
        """The settings of a dictionary.

        TypeError for what is no dictionary, an unknown key, or a value of another type; ValueError for a
        method or a value that asks for a second model, or is out of range.
        """
        if not isinstance(given, Mapping) or not given:
            example = "{'method': 'ngram', 'num_speculative_tokens': 4}"
            raise TypeError(f"{OPTION} must be a dictionary such as {example}, not {show(given)}")
        own = [each.name for each in fields(cls)]
        for name, value in given.items():
            if name not in own:
                _check_absent(str(name), value, own)
        values = {name: given[name] for name in own if given.get(name) is not None}
        method = values.pop("method", None) or str(given.get("model", "")).strip("[]") or None
        if method not in METHODS:
            raise ValueError(
                f"{OPTION}: method must be 'ngram' or 'suffix', which take drafts from the text, not "
                f"{method!r}; no second model and no further layers draft here"
            )
        other = "suffix_" if method == "ngram" else "prompt_"
        if unused := [name for name in values if name.startswith(other)]:
            raise ValueError(f"{OPTION}: {unused[0]!r} does nothing with method={method!r}; leave it out")
        ranges = {name: _checked(name, value) for name, value in values.items()}
        return cls(method=method, **(_ngram(ranges) if method == "ngram" else _suffix(ranges)))


def _check_absent(name: str, value: object, own: list[str]) -> None:
    """Accept a value that changes nothing; else the error names the key."""
    if name not in _ELSEWHERE:
        raise TypeError(f"{OPTION}: unknown key {name!r}; {nearest(name, own)}")
    if not any(value is each or (value == each and type(value) is type(each)) for each in _ELSEWHERE[name]):
        raise ValueError(
            f"{OPTION}: {name}={value!r} is not supported, because drafts come from the text and a draft is "
            "accepted if it is the token that is drawn; leave it out"
        )


def _checked(name: str, value: Any) -> Any:
    """A value in its range."""
    about = f"{OPTION}: {name}"
    if name.endswith("spec_factor"):
        expected = "a positive number"
        if (found := check_float(about, value, expected)) <= 0:
            raise wrong(about, value, expected)
        return found
    if name.endswith("token_prob"):
        expected = "a number in [0, 1]"
        if not 0 <= (share := check_float(about, value, expected)) <= 1:
            raise wrong(about, value, expected)
        return share
    if name.endswith("cached_requests"):
        return check_int(about, value, 0, "an integer of at least 0")
    return check_int(about, value, 1, "an integer of at least 1")


def _ngram(values: dict[str, Any]) -> dict[str, Any]:
    """With vLLM's defaults: one length stands for both."""
    if "num_speculative_tokens" not in values:
        raise ValueError(f"{OPTION}: method='ngram' needs num_speculative_tokens, such as 4")
    least, most = values.get("prompt_lookup_min"), values.get("prompt_lookup_max")
    least, most = least or most or _LOOKUP, most or least or _LOOKUP
    if least > most:
        raise ValueError(f"{OPTION}: prompt_lookup_min={least} is above prompt_lookup_max={most}")
    return values | {"prompt_lookup_min": least, "prompt_lookup_max": most}


def _suffix(values: dict[str, Any]) -> dict[str, Any]:
    """With vLLM's default of the number of drafts."""
    depth = values.get("suffix_decoding_max_tree_depth", _DEPTH)
    if depth < 2:
        raise ValueError(f"{OPTION}: suffix_decoding_max_tree_depth={depth} must be at least 2")
    return {"num_speculative_tokens": depth} | values
