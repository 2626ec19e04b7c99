"""If the program of an integration is missing, the error names the extra that installs it. Needs none of
them.
"""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("package", "extra"), [("lm_eval", "lm-eval"), ("lighteval", "lighteval"), ("ray", "ray")]
)
def test_the_error_names_the_extra(package: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"nanovllm.integrations.{package}", raising=False)
    with pytest.raises(ImportError, match=rf"pip install 'nanovllm\[{extra}\]'"):
        importlib.import_module(f"nanovllm.integrations.{package}")
