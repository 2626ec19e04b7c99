"""A script may end in any way while its engine is open on one or two GPUs, without a crash."""

from __future__ import annotations

from pathlib import Path

import endings
import pytest
import torch

from tools.benchmark.shapes import write_shape

pytestmark = pytest.mark.gpu

SIZES = [size for size in (1, 2) if size <= torch.cuda.device_count()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shape("qwen3-0.6b", tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ending", endings.ENDINGS)
def test_a_process_may_end_without_close(model: Path, ending: str, size: int) -> None:
    options = {"load_format": "dummy", "num_kvcache_blocks": 100, "max_model_len": 4096}
    endings.check(ending, model, "cuda", size, prompt_len=600, max_tokens=100, **options)
