"""The sampling parameters of rows, from JSON: the job's, overridden by a row's own, and a seed for each row.

Checks values like SamplingParams. Knows no prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from nanovllm.engine.requests import drawn_seed
from nanovllm.extras.repetitions import RepetitionDetectionParams
from nanovllm.extras.structured_outputs import StructuredOutputsParams
from nanovllm.inputs import show
from nanovllm.jobs.errors import refusing
from nanovllm.jobs.sources import parse_json
from nanovllm.params import SamplingParams

PARAMS_COLUMN = "sampling_params"
# Parameters that JSON has as an object: the class whose fields it has.
_OBJECTS: dict[str, type] = {
    "structured_outputs": StructuredOutputsParams,
    "repetition_detection": RepetitionDetectionParams,
}


def row_params(
    base: SamplingParams, seed: int, of_several: Mapping[str, Any], index: int, own: Mapping[str, Any]
) -> SamplingParams:
    """Return the parameters of row `index`: its own, as for `make_params`, on top of `base`.

    A row without a seed gets one from the engine's `seed` and its index, see `row_seed`. So it has the same
    answer in every run of the job. of_several: beneath a row's own with `n` above 1, if `base` is greedy:
    greedy answers would all be equal.
    """
    if not own and base.temperature == 0:
        return base
    if base.temperature == 0 and own.get("n", 1) != 1:
        own = {**of_several, **own}
    params = make_params(own, base) if own else base.clone()
    if params.seed is None:
        params.seed = row_seed(seed, index)
    return params


def row_seed(seed: int, index: int) -> int:
    """The seed of row `index` (from 0) of a job if none is given; `seed` is the engine's, as in `LLM`.

    `LLM.generate` of a new engine gives the prompt at this index the same seed.
    """
    return drawn_seed(seed, index)


def make_params(values: Mapping[str, Any], base: SamplingParams | None = None) -> SamplingParams:
    """Return SamplingParams with these values, as JSON has them, on top of `base`.

    `structured_outputs` and `repetition_detection` are dictionaries of the fields of their classes.
    ValueError or TypeError for a wrong value, and for logprobs of prompts, which have no place in an answer.
    """
    given = dict(values)
    for name, kind in _OBJECTS.items():
        if (found := given.get(name)) is not None:
            if not isinstance(found, Mapping):
                raise TypeError(f"{name} must be an object {{...}}, not {show(found)}")
            given[name] = kind(**found)
    if given.get("prompt_logprobs") is not None:
        raise ValueError("prompt_logprobs are not written by a job; leave them out, or use LLM.generate")
    return SamplingParams(**({} if base is None else vars(base)) | given)


def job_params(
    sampling: Mapping[str, Any],
    recommended: SamplingParams | None,
    of_format: Mapping[str, Any] = MappingProxyType({}),
) -> SamplingParams:
    """Return the parameters of rows without their own: the model's defaults, overridden by those of the row
    format, overridden by `--sampling`."""
    with refusing("--sampling and the model's generation_config.json: "):
        return make_params({**of_format, **sampling}, recommended)


def own_params(value: Any) -> dict[str, Any]:
    """Return a row's own parameters: a dictionary, of CSV as JSON; what is null or empty asks for nothing."""
    if isinstance(value, str) and value:
        try:
            value = parse_json(value)
        except ValueError as error:
            raise ValueError(f"column {PARAMS_COLUMN!r} is no JSON object: {error}") from None
    if value is None or value == "":
        return {}
    if not isinstance(value, dict):
        raise TypeError(f"column {PARAMS_COLUMN!r} must be an object {{...}}, not {show(value)}")
    return {name: each for name, each in value.items() if each is not None}
