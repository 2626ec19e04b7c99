"""ReplicaResidency: sleep, wake-up and new weights of all replicas, also of those that restart meanwhile.

Owns the shared memory with new weights. Each replica's own Residency does the work. Knows no request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.engine.residency import Residency
from nanovllm.models.weights import check_dense, named_pairs, named_tensor
from nanovllm.replicas.pool import Replicas
from nanovllm.runner.residency import TAGS, WEIGHTS
from nanovllm.workers.interrupts import held_interrupts
from nanovllm.workers.shared_tensors import SharedMemoryBuffer, SharedTensors


@dataclass(frozen=True)
class _Update:
    """The tensors of one call of `update_weights`, for replicas that restart."""

    buffer: SharedMemoryBuffer
    tensors: SharedTensors

    @property
    def names(self) -> set[str]:
        return {place.name for place in self.tensors.places}


class ReplicaResidency(Residency):
    """As Residency, for all replicas."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._asleep: frozenset[str] = frozenset()
        self._drops_weights = False  # they sleep without a copy
        self._updates: dict[int, _Update] = {}  # by number, those that the current weights consist of
        self._num_updates = 0

    @property
    def asleep(self) -> frozenset[str]:
        return self._asleep

    def sleep(self, level: int) -> None:
        self._drops_weights |= level > 1
        self._replicas.unset("sleep", "wake_up")  # a replica that restarts sleeps last
        self._replicas.set("sleep", 2 if self._drops_weights else 1)
        self._asleep = frozenset(TAGS)

    def wake_up(self, tags: frozenset[str]) -> None:
        self._replicas.set("wake_up", sorted(tags))
        self._asleep -= tags
        if self._drops_weights and WEIGHTS in tags:
            self._drops_weights = False
            self.forget_updates()
        if not self._asleep:
            self._replicas.unset("sleep", "wake_up")

    def update_weights(self, tensors: Mapping[str, Any] | Iterable[Any]) -> None:
        """Copy the tensors to shared memory, where all replicas check and load them."""
        self.check_awake((WEIGHTS,), why=", at least with tags=['weights']")
        buffer = SharedMemoryBuffer(1, grows=True)
        try:
            for index, pair in enumerate(named_pairs(tensors)):
                name, tensor = named_tensor(index, pair)
                check_dense(name, tensor)
                buffer.put(name, tensor.detach())
        except BaseException:
            buffer.close()
            raise
        with held_interrupts():
            self._load(_Update(buffer, buffer.take()))

    def _load(self, update: _Update) -> None:
        """Have all replicas load an update, and forget earlier ones of which it leaves nothing."""
        self._num_updates += 1
        updates, names = {self._num_updates: update}, update.names
        for number, earlier in reversed(self._updates.items()):
            if not earlier.names <= names:
                updates[number] = earlier
                names |= earlier.names
        updates = dict(sorted(updates.items()))
        shared = {number: each.tensors for number, each in updates.items()}
        try:
            self._replicas.set("load_updates", shared)
        except BaseException:
            update.buffer.close()
            raise
        self._updates, before = updates, self._updates
        for number in before.keys() - updates.keys():
            before[number].buffer.close()

    def forget_updates(self) -> None:
        """Free the memory of all updates; replicas that restart have the checkpoint's weights."""
        self._replicas.unset("load_updates")
        for update in self._updates.values():
            update.buffer.close()
        self._updates = {}
