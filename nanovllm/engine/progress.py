"""The progress bar of `generate`: requests done, and tokens a second of prefill and decode."""

from __future__ import annotations

from time import perf_counter
from types import TracebackType
from typing import Any

from nanovllm.engine.batch import LAST_SAMPLED, Batch


class Progress:
    """A tqdm bar over requests; silent when not enabled. Time between two updates counts for the later's
    batch."""

    def __init__(self, total: int, enabled: bool) -> None:
        self._bar: Any = None
        if enabled:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=total, desc="Generating", dynamic_ncols=True)
        self._tokens = {"prefill": 0, "decode": 0}
        self._seconds = {"prefill": 0.0, "decode": 0.0}
        self._last = perf_counter()

    def update(self, batch: Batch | None, num_finished: int) -> None:
        """Count a step: `batch` has been computed and `num_finished` requests ended with it."""
        if self._bar is None:
            return
        now = perf_counter()
        if batch is not None:
            phase = "decode" if batch.token_ids[0] == LAST_SAMPLED else "prefill"
            self._tokens[phase] += len(batch.token_ids)
            self._seconds[phase] += now - self._last
        self._last = now
        rates = {p: f"{self._tokens[p] / s:,.0f} tok/s" for p, s in self._seconds.items() if s > 0}
        self._bar.set_postfix(rates, refresh=False)
        self._bar.update(num_finished)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
