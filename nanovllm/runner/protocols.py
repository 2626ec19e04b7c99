"""What doors fill for a `BatchRunner`: prefixes that rows share, captured and recorded steps.

Their classes are in the doors; computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from nanovllm.attention.base import SharedPrefixes
from nanovllm.batch import Batch
from nanovllm.layers.stream import Step

GraphOutput = tuple[torch.Tensor, torch.Tensor | None]
SharedRows = SharedPrefixes[np.ndarray]


class PrefixFinder(Protocol):
    """What finds the rows of a decode step that begin with the same blocks; see `shared_prefixes/`."""

    nothing: dict[int, SharedRows]  # no such rows, by each chunk that `find` may choose

    def find(self, batch: Batch) -> SharedRows | None:
        """The prefixes to read once for several rows; None if that does not pay."""


class Graphs(Protocol):
    """Decode steps over fixed tensors, captured by number of rows; see `cuda_graphs/`."""

    def size_for(self, num_seqs: int) -> int:
        """The smallest size that holds `num_seqs` rows."""

    def capture(self, size: int) -> None:
        """Capture one size, unless it is captured."""

    def replay(self, size: int) -> Any:
        """Run the captured step of `size` rows; return its output, which is valid until the next replay."""


class Prefills(Protocol):
    """Prefill steps that are captured in part; see `cuda_graphs/prefill.py`."""

    def run(self, token_ids: torch.Tensor, step: Step, wanted: torch.Tensor | None) -> torch.Tensor | None:
        """As the model; None if this step is not captured."""


class RecordedSteps(Protocol):
    """What a door has in place of graphs: decode steps, recorded when they first run and then replayed."""

    @property
    def usable(self) -> bool:
        """Whether steps can be recorded, as far as is known."""

    def clear(self) -> None:
        """Forget all recordings: addresses of weights or of the KV cache change."""

    def run(self, key: object, make_step: Callable[[], Callable[[], Any]]) -> Any:
        """The output of the step `key`, of its recording or of the step that `make_step` makes, which is
        recorded. None if it cannot be recorded; then it has stored no token."""
