"""What a model's generation_config.json recommends: how to sample where the caller does not say.

Reads the file that the option names. Its end-of-sequence ids belong to ModelConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanovllm.models.loader import GENERATION_FILE, load_generation_config
from nanovllm.sampling_params import SamplingParams

# The keys that count, as in vLLM, with the names of their parameters.
SAME = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
PARAMETERS = {**{name: name for name in SAME}, "max_new_tokens": "max_tokens"}
INSTEAD = "pass sampling_params, or make the LLM with generation_config='vllm'"


def read_generation_config(option: str, model_folder: Path) -> dict[str, Any]:
    """Read the file of the model, or of the folder that `option` of `Config` names.

    Raises ValueError when that folder has none, ModelLoadError when the file is unreadable.
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
    """What the file says of sampling, with `changes` in the place of its values; `option` as of `Config`.

    ValueError or TypeError for a key that says nothing of sampling, or a value of `changes` that is wrong.
    """
    unknown = changes.keys() - PARAMETERS.keys()
    if unknown:
        raise ValueError(
            f"override_generation_config: {min(map(str, unknown))!r} is none of {', '.join(PARAMETERS)}; "
            "pass what else you want as SamplingParams"
        )
    _params(changes, "override_generation_config: {}")
    return dict({} if option == "vllm" else generation) | dict(changes)


def recommended_params(generation: Mapping[str, Any]) -> SamplingParams:
    """Return SamplingParams with what the file says; null says nothing. ValueError or TypeError for a value
    that is wrong."""
    return _params(generation, f"{GENERATION_FILE}: {{}}; {INSTEAD}")


def _params(generation: Mapping[str, Any], message: str) -> SamplingParams:
    """SamplingParams with these values; `message` is a format of what is wrong with one."""
    values = {PARAMETERS[key]: generation[key] for key in PARAMETERS if generation.get(key) is not None}
    try:
        return SamplingParams(**values)
    except (TypeError, ValueError) as error:
        raise type(error)(message.format(error)) from None
