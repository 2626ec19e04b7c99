"""The versions of the packages that a run depends on. Imports none of them."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("nanovllm", "torch", "transformers", "tokenizers", "triton", "numpy")


def versions(more: tuple[str, ...] = ()) -> dict[str, str]:
    """The versions of Python, of the packages that answers depend on, and of the packages `more`, by name."""
    found = {"python": platform.python_version()}
    for name in (*PACKAGES, *more):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
