"""PoolingParams: vLLM's parameters of embeddings and of a head's values. Computes nothing."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

from nanovllm.checks import check_bool, check_int
from nanovllm.names import takes_others


@takes_others
@dataclass(kw_only=True)
class PoolingParams:
    """What becomes of a prompt's hidden states. All fields are keyword arguments.

    dimensions: keep the first values of an embedding, at most as many as it has. Only models that were
    trained for it (Matryoshka) give good embeddings then.
    use_activation: scale an embedding to Euclidean length 1, after `dimensions`; make probabilities of a
    head's values. None takes the default of the call. normalize: the same, in older versions of vLLM.
    vLLM's further fields accept their neutral values. TypeError or ValueError for anything else.
    """

    dimensions: int | None = None
    use_activation: bool | None = None
    normalize: bool | None = None

    def __post_init__(self) -> None:
        if self.dimensions is not None:
            expected = "None or an integer of at least 1"
            self.dimensions = check_int("dimensions", self.dimensions, 1, expected)
        use_activation, normalize = self.use_activation, self.normalize
        for name, value in (("use_activation", use_activation), ("normalize", normalize)):
            if value is not None:
                check_bool(name, value)
        if None not in (use_activation, normalize) and use_activation != normalize:
            raise ValueError(
                f"use_activation={use_activation} and normalize={normalize} are one parameter; "
                "pass one of them"
            )

    def normalizes(self, default: bool) -> bool:
        """Whether the embedding is scaled to length 1."""
        return next((each for each in (self.use_activation, self.normalize) if each is not None), default)

    def clone(self) -> PoolingParams:
        """A copy."""
        return copy(self)
