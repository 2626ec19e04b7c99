"""A page about a run: `write_report("report.html", llm)`.

Reads the engine's statistics and, with a `GPUMonitor`, power and memory of its GPUs. Does not affect the run.
"""

from __future__ import annotations

from nanovllm.report.answers import Answers, Sample
from nanovllm.report.gpu import GPUMonitor
from nanovllm.report.page import charts, check_path, make_report, write_report

__all__ = ["Answers", "GPUMonitor", "Sample", "charts", "check_path", "make_report", "write_report"]
