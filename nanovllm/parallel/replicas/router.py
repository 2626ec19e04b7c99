"""Router: chooses the next waiting request for a replica, so that prompts with a common prefix meet on one.

Only counts numbers and hashes. Knows neither requests nor processes, and never keeps a replica idle.
"""

# See "Routing" in parallel/README.md. Each group of prompts goes to one replica, and is split only when
# nothing else waits. Requests without a common prefix leave in the order of their arrival.

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from itertools import islice
from typing import NamedTuple

import xxhash

MIN_PREFIX_BYTES = 64 * 4  # the shortest hashed prefix, as int32 ids; each next one is twice as long
_MAX_CANDIDATES = 32  # number of oldest requests to consider
_MAX_HASHES = 100_000  # the last hashes of a replica that are assumed to be in its prefix cache


class _Waiting(NamedTuple):
    number: int  # of the request
    arrival: int  # counted from 0
    hashes: list[int]  # of its prefixes, the shortest first


class Router:
    """The waiting requests, by their numbers."""

    def __init__(self, num_replicas: int, reach: int) -> None:
        """reach: when more requests than this have arrived after a waiting one, it is taken next."""
        self._reach = reach
        self._waiting: OrderedDict[int, _Waiting] = OrderedDict()  # the oldest first
        self._by_hash: dict[int, dict[int, None]] = {}  # waiting requests with the hash, oldest first
        self._held: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]
        self._last: list[list[int]] = [[] for _ in range(num_replicas)]  # of each replica's last request
        self._num_held = [0] * num_replicas  # tokens; see `num_held_tokens`
        self._num_arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, number: int, prompt: bytes) -> None:
        """Add a waiting request. prompt: its token ids as int32, or the part that may be shared."""
        self._waiting[number] = waiting = _Waiting(number, self._num_arrivals, prefix_hashes(prompt))
        self._num_arrivals += 1
        for each in waiting.hashes:
            self._by_hash.setdefault(each, {})[number] = None

    def take(self, replica: int) -> int | None:
        """Choose a request for a replica with room; None if no request waits."""
        if not self._waiting:
            return None
        oldest = next(iter(self._waiting.values()))
        is_due = self._num_arrivals - oldest.arrival > self._reach
        return self._give(replica, oldest if is_due else self._cheapest(replica))

    def num_held_tokens(self, replica: int) -> int:
        """How many leading tokens of its last request the replica had cached before, rounded down."""
        return self._num_held[replica]

    def remove(self, number: int) -> bool:
        """Remove a waiting request; False if it does not wait."""
        waiting = self._waiting.pop(number, None)
        if waiting is None:
            return False
        for each in waiting.hashes:
            requests = self._by_hash[each]
            del requests[number]
            if not requests:
                del self._by_hash[each]
        return True

    def forget(self, replica: int) -> None:
        """Forget what the replica has cached."""
        self._held[replica].clear()
        self._last[replica] = []

    def clear(self) -> None:
        self._waiting.clear()
        self._by_hash.clear()

    def _give(self, replica: int, chosen: _Waiting) -> int:
        """Move a request from the waiting ones to the replica."""
        self.remove(chosen.number)
        self._last[replica] = chosen.hashes
        held = self._held[replica]
        known = sum(each in held for each in chosen.hashes)
        self._num_held[replica] = MIN_PREFIX_BYTES // 4 * 2 ** (known - 1) if known else 0
        for each in chosen.hashes:
            held[each] = None
            held.move_to_end(each)
        while len(held) > _MAX_HASHES:
            held.popitem(last=False)
        return chosen.number

    def _cheapest(self, replica: int) -> _Waiting:
        best, least = None, 0
        for waiting in self._candidates(replica):
            cost = self._cost(waiting, replica)
            if best is None or cost < least:
                best, least = waiting, cost
            if cost == 0:
                break
        assert best is not None
        return best

    def _candidates(self, replica: int) -> Iterator[_Waiting]:
        """Requests that share a prefix with the replica's last one, longest first; then the oldest."""
        for each in reversed(self._last[replica]):
            if each in self._by_hash:
                yield self._waiting[next(iter(self._by_hash[each]))]
        yield from islice(self._waiting.values(), _MAX_CANDIDATES)

    def _cost(self, waiting: _Waiting, replica: int) -> int:
        """How many more prefixes of this prompt another replica holds."""
        deepest = max(_levels_held(waiting, held) for held in self._held)
        return deepest - _levels_held(waiting, self._held[replica])


def _levels_held(waiting: _Waiting, held: Collection[int]) -> int:
    """The index of the longest held prefix, counted from 1; 0 if none is held."""
    levels = range(len(waiting.hashes), 0, -1)
    return next((level for level in levels if waiting.hashes[level - 1] in held), 0)


def prefix_hashes(prompt: bytes) -> list[int]:
    """Return the hashes of the prefixes of a prompt, the shortest first."""
    view, hashes, length = memoryview(prompt), [], MIN_PREFIX_BYTES
    while length <= len(prompt):
        hashes.append(xxhash.xxh3_64_intdigest(view[:length]))
        length *= 2
    return hashes
