"""Which .gguf files make one model: its parts, by the names that llama.cpp gives them. Opens no file."""

from __future__ import annotations

import re
from pathlib import Path

from nanovllm.errors import ModelLoadError
from nanovllm.models.registry import listing

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def models(folder: Path) -> dict[str, list[Path]]:
    """The files of each model in a folder, by its name; those of image encoders are left out."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.gguf")):
        if path.is_file() and not path.name.startswith("mmproj"):
            part = _PART.fullmatch(path.name)
            found.setdefault(part[1] if part else path.name, []).append(path)
    return found


def parts(path: Path) -> list[Path]:
    """All files of the model at `path`, in order. Raises ModelLoadError for a missing one."""
    if path.is_dir():
        found = models(path)
        if len(found) != 1:
            raise ModelLoadError(
                f"{path} has {len(found)} GGUF models: {listing(found)}; pass the path of one"
            )
        [(path, *_)] = found.values()
    part = _PART.fullmatch(path.name)
    if part is None:
        return [path]
    count = int(part[3])
    paths = [path.with_name(f"{part[1]}-{number:05}-of-{part[3]}.gguf") for number in range(1, count + 1)]
    missing = [each.name for each in paths if not each.is_file()]
    if missing or not paths:
        raise ModelLoadError(f"{path} is one of {count} parts, and there is no {listing(missing)} beside it")
    return paths
