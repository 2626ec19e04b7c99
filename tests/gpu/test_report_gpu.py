"""NVML reports the engine's GPU."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import inside
import pytest

from nanovllm import LLM, SamplingParams, demo_model_path
from nanovllm.report import GPUMonitor, write_report

pytestmark = pytest.mark.gpu


def test_power_and_memory_are_sampled(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    with LLM(demo_model_path(), num_kvcache_blocks=64) as llm:
        with GPUMonitor(llm) as gpu:
            llm.generate(["What is 2 + 3?"] * 64, params, use_tqdm=False)
        total = inside.runner(llm).device.memory()[1]
        kv_bytes = inside.runner(llm).kv_cache.nbytes
        write_report(tmp_path / "report.html", llm, gpu=gpu)
    assert gpu.why_not is None and len(gpu.samples) >= 2
    for sample in gpu.samples:
        [power], [memory] = sample.power, sample.memory
        assert 1 < power < 5000
        assert kv_bytes < memory <= 1.05 * total
    page = ElementTree.parse(tmp_path / "report.html").getroot()
    titles = [svg.findtext("*[@class='title']") for svg in page.iter("{http://www.w3.org/2000/svg}svg")]
    assert "GPU power" in titles and "GPU memory in use" in titles
