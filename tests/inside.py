"""The only place where tests reach behind the public names of the engine.

A change of the inside changes these functions, and no test that uses them.
"""

from __future__ import annotations

from nanovllm import LLM
from nanovllm.runner.model_runner import ModelRunner


def runner(llm: LLM) -> ModelRunner:
    """Rank 0's runner."""
    return llm._runner
