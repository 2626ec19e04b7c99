"""The policy of a model with states, by which the plan takes its manager of blocks."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.kv_group import KVGroup, KVPolicy


@dataclass(frozen=True, slots=True)
class StatePolicy(KVPolicy):
    """All blocks are kept, and states beside them."""

    manager = "states"
    in_parts = False

    num_seqs: int  # the rows of running sequences


def groups(num_seqs: int) -> tuple[KVGroup, ...]:
    """The one group of the layers with attention, in a model that runs so many sequences at once."""
    return (KVGroup(StatePolicy(num_seqs)),)
