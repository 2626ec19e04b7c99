"""ExpertPlacement: which experts of a layer a rank holds. Its weights and its routing follow it.

By width a rank holds a part of every expert; by rank it holds some experts whole. Owns no weight.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """Experts `[first, first + count)` of `total`. A rank numbers its own from 0 on."""

    first: int
    count: int
    total: int

    @classmethod
    def all(cls, total: int) -> ExpertPlacement:
        """Every expert, whole or a part of its width."""
        return cls(0, total, total)

    @classmethod
    def of_rank(cls, total: int, rank: int, ranks: int) -> ExpertPlacement:
        """Whole experts of one of `ranks` ranks, neighbours by number (vLLM's "linear" placement). Where they
        do not divide, the first ranks have one more. ValueError if a rank would have none."""
        if ranks > total:
            raise ValueError(
                f"{total} experts are fewer than {ranks} ranks, and a rank without experts is not supported"
            )
        each, more = divmod(total, ranks)
        return cls(rank * each + min(rank, more), each + (rank < more), total)

    @property
    def own(self) -> range:
        """The numbers of its experts in the model."""
        return range(self.first, self.first + self.count)

    @property
    def others(self) -> list[int]:
        """The numbers of all other experts, which other ranks hold."""
        return [*range(self.first), *range(self.first + self.count, self.total)]

    @property
    def is_all(self) -> bool:
        """Whether there are no others."""
        return self.count == self.total
