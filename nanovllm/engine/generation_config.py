"""The sampling parameters that a model's generation_config.json recommends, used as defaults.

Reads the file that the option names. ModelConfig owns its end-of-sequence ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanovllm.batch import SAMPLING_PARAMETERS
from nanovllm.models.files import GENERATION_FILE
from nanovllm.models.loader import load_generation_config
from nanovllm.sampling_params import SamplingParams

# The keys that are used, with the names of their parameters.
PARAMETERS = {name: name for name in (*SAMPLING_PARAMETERS, "repetition_penalty")} | {
    "max_new_tokens": "max_tokens"
}
ADVICE = "pass sampling_params, or make the LLM with generation_config='vllm'"


def read_generation_config(option: str, model_folder: Path) -> dict[str, Any]:
    """Read the file of the model, or of the folder that `option` of `Config` names.

    Raises ValueError if that folder has no such file, ModelLoadError if the file is unreadable.
    """
    if option in ("auto", "vllm"):
        return load_generation_config(model_folder)
    folder = Path(option).expanduser()
    if not (folder / GENERATION_FILE).is_file():
        raise ValueError(
            f"generation_config must be 'auto', 'vllm' or a folder with {GENERATION_FILE}, not {option!r}"
        )
    return load_generation_config(folder)


def overridden(generation: Mapping[str, Any], option: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The file's sampling parameters, with `changes` replacing its values; `option` as in `Config`.

    `do_sample: false` in the file means greedy, as in transformers, unless `changes` set a temperature.

    ValueError or TypeError for a key that is no sampling parameter, or a wrong value in `changes`.
    """
    unknown = changes.keys() - PARAMETERS.keys()
    if unknown:
        raise ValueError(
            f"override_generation_config: {min(map(str, unknown))!r} is none of {', '.join(PARAMETERS)}; "
            "pass other parameters as SamplingParams"
        )
    _params(changes, "override_generation_config: {}")
    found = dict({} if option == "vllm" else generation) | dict(changes)
    if found.get("do_sample") is False and changes.get("temperature") is None:
        found["temperature"] = 0.0
    return found


def recommended_params(generation: Mapping[str, Any]) -> SamplingParams:
    """Return SamplingParams with the file's values; null means the default. ValueError or TypeError for a
    wrong value."""
    return _params(generation, f"{GENERATION_FILE}: {{}}; {ADVICE}")


def _params(generation: Mapping[str, Any], message: str) -> SamplingParams:
    """SamplingParams with these values; `message` is a format string for errors."""
    values = {PARAMETERS[key]: generation[key] for key in PARAMETERS if generation.get(key) is not None}
    try:
        return SamplingParams(**values)
    except (TypeError, ValueError) as error:
        raise type(error)(message.format(error)) from None
