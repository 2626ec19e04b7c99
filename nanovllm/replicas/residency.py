"""ReplicaResidency: sleep and wake-up of all replicas, including replicas that restart meanwhile.

Each replica's own Residency does the work. Knows no request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nanovllm.engine.residency import Residency
from nanovllm.replicas.pool import Replicas
from nanovllm.runner.residency import TAGS


class ReplicaResidency(Residency):
    """As Residency, for all replicas; they do not support new weights."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._asleep: frozenset[str] = frozenset()

    @property
    def asleep(self) -> frozenset[str]:
        return self._asleep

    def sleep(self, level: int) -> None:
        self._replicas.set("sleep", level)
        self._replicas.unset("wake_up")
        self._asleep = frozenset(TAGS)

    def wake_up(self, tags: frozenset[str]) -> None:
        self._replicas.set("wake_up", sorted(tags))
        self._asleep -= tags
        if not self._asleep:
            self._replicas.unset("sleep", "wake_up")

    def update_weights(self, tensors: Mapping[str, Any] | Iterable[Any]) -> None:
        raise ValueError(
            "update_weights() needs data_parallel_size=1: a replica that restarts has the checkpoint's "
            "weights. Write a checkpoint and make a new LLM"
        )
