"""A step makes the calls of torch and the launches of Triton that tests/data/op_gate/gpu holds."""

from __future__ import annotations

from pathlib import Path

import op_gate
import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", op_gate.GPU)
def test_launches(name: str, tmp_path: Path) -> None:
    op_gate.check(name, "cuda", tmp_path)
