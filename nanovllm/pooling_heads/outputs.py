"""What `classify`, `reward`, `encode` and pair scores return, under vLLM's names. Computes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanovllm.extras.outputs import PoolingRequestOutput

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, eq=False)
class PoolingOutput:
    """data: float32 on the CPU, [values] of a prompt, or [tokens, values] of each token."""

    data: torch.Tensor


@dataclass(slots=True)
class ClassificationOutput:
    """probs: one for each label, by its index. labels: their names, as `id2label` of config.json has them."""

    probs: list[float]
    labels: tuple[str, ...] = field(default=(), repr=False, compare=False)

    @property
    def num_classes(self) -> int:
        return len(self.probs)

    @property
    def label(self) -> str | None:
        """The name of the likeliest label; None without values."""
        return self.labels[self.probs.index(max(self.probs))] if self.probs else None

    def __repr__(self) -> str:
        return f"ClassificationOutput(num_classes={self.num_classes})"


@dataclass(slots=True)
class ScoringOutput:
    """score: how well the second text answers the first; NaN without one."""

    score: float


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """What `classify` returns for a prompt."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """What `score` returns for a pair of texts, of a model that scores pairs."""
