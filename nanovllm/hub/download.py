"""Models of the Hugging Face hub: a hub id becomes a folder of its downloaded files.

Imported only for a name that is no folder or file here, because huggingface_hub takes half a second.
"""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

import huggingface_hub

from nanovllm.errors import ModelLoadError
from nanovllm.models.registry import MODULES_FILE, Hub

_TOKENIZER_PATTERNS = ["*.json", "*.jinja", "*.model", "*.txt"]
_HUB_IGNORED = ["*/*", "consolidated*"]  # other formats of the same weights
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def download(name: str, hub: Hub, kind: str) -> Path:
    """Return the folder of the downloaded files of the hub id `name`. kind: as in `resolve_model_path`.

    Raises ValueError if `name` is no hub id, ModelLoadError if the download fails.
    """
    if not _HUB_ID.fullmatch(name):
        path = Path(os.path.expanduser(name))
        raise ValueError(
            f"{kind} folder {str(path)!r} does not exist, and it is not a hub id (organisation/name)"
        )
    patterns = [*_TOKENIZER_PATTERNS, *(["*.safetensors"] if kind == "model" else [])]
    fetch = partial(
        huggingface_hub.snapshot_download,
        name,
        revision=hub.revision,
        cache_dir=hub.download_dir,
        token=hub.token,
    )
    try:
        found = fetch(
            allow_patterns=[*patterns, *(["*.py"] if hub.code else [])], ignore_patterns=_HUB_IGNORED
        )
        if kind == "model" and (Path(found) / MODULES_FILE).is_file():  # its folders hold settings
            found = fetch(allow_patterns=["*_*/config.json"], ignore_patterns=["*/*/*"])
    except Exception as error:  # errors of the hub client, its HTTP library or the system
        fix = "" if "/" in name else "; a hub id mostly has an organisation, such as Qwen/Qwen3-0.6B"
        raise ModelLoadError(
            f"{kind} {name!r} is not a folder here{fix}, and the Hugging Face hub did not deliver it "
            f"({type(error).__name__}: {error}). Check the spelling and the network (with HF_HUB_OFFLINE=1 "
            "only models downloaded before are found), or download it on another machine with "
            f"`hf download {name} --local-dir FOLDER` and pass the folder"
        ) from error
    return Path(found)
