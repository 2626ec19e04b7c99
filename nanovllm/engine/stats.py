"""StepStats: what the engine tells its `stats` callback about every finished step.

Only what the host knows without asking the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.batch import Batch, StepKind


@dataclass(frozen=True, slots=True, eq=False)
class StepStats:
    """One finished step. Running and waiting are counted after it, so what ended with it is in neither."""

    batch: Batch  # what was computed; not to be changed
    seconds: float  # from the end of the step before; of the first one, from when its request came
    num_drawn_tokens: int  # without those of surplus rows
    num_cached_tokens: int  # that the prefix cache spared the sequences admitted for this step
    num_finished: int  # requests
    num_running: int  # sequences
    num_waiting: int  # sequences
    kv_cache_usage: float  # share of the blocks that sequences hold

    @property
    def kind(self) -> StepKind:
        return self.batch.kind

    @property
    def num_seqs(self) -> int:
        """Sequences in this step."""
        return len(self.batch.seq_ids)

    @property
    def num_new_tokens(self) -> int:
        """Tokens whose K/V this step computed: prompts in prefill, one for each sequence in decode."""
        return len(self.batch.token_ids)
