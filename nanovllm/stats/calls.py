"""StatsCalls: the call that sums up what an engine has counted."""

from __future__ import annotations

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.inputs import calls_of_llm
from nanovllm.stats.summary import EngineStats, summary


@calls_of_llm
class StatsCalls(LLMEngine):
    """An engine that says what it has done."""

    def stats(self) -> EngineStats:
        """Return totals since the engine's start; printing them gives a summary of a few lines.

        Any thread may call this at any time: within `on_step`, while a stream is open, and after `close`.
        With replicas, the sums over all of them; seconds are divided by their number.
        """
        return summary(self._history, self._executor.load)
