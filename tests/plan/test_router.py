"""Router: it takes every request once, none waits for ever, and requests with a common prefix meet on one
replica.
"""

from __future__ import annotations

import os
import random
import socket
import struct
from array import array
from itertools import pairwise

import inside
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.config import Config
from nanovllm.parallel.replicas import process as replica_process
from nanovllm.parallel.replicas.process import ReplicaProcess
from nanovllm.parallel.replicas.router import MIN_PREFIX_BYTES, Router, prefix_hashes
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import Request

REACH = 40


def prompt(*ids: int) -> bytes:
    return struct.pack(f"={len(ids)}i", *ids)


def of_group(group: int, own: int, length: int = 300) -> bytes:
    """A prompt: `length` tokens that its group shares, then ten of its own."""
    return prompt(*[group] * length, *[1000 + own] * 10)


class RoundRobin:
    """The baseline of the comparison."""

    def __init__(self, num_replicas: int) -> None:
        self._queues: list[list[int]] = [[] for _ in range(num_replicas)]
        self._next = 0

    def add(self, number: int, prompt: bytes) -> None:
        self._queues[self._next].append(number)
        self._next = (self._next + 1) % len(self._queues)

    def take(self, replica: int) -> int | None:
        return self._queues[replica].pop(0) if self._queues[replica] else None


def test_prefix_hashes_are_equal_where_prompts_are() -> None:
    long, short = prompt(*range(300)), prompt(*range(200), 7)
    assert len(prefix_hashes(long)) == 3 and len(prefix_hashes(short)) == 2
    assert prefix_hashes(long)[:2] == prefix_hashes(short)
    assert prefix_hashes(prompt(5, *range(300)))[0] != prefix_hashes(long)[0]
    assert prefix_hashes(bytes(MIN_PREFIX_BYTES - 4)) == []
    assert len(prefix_hashes(bytes(MIN_PREFIX_BYTES))) == 1


def test_prompts_that_share_nothing_leave_as_they_came() -> None:
    router = Router(2, REACH)
    for number in range(30):
        router.add(number, prompt(*range(number, number + 200)))
    assert [router.take(number % 2) for number in range(30)] == list(range(30))
    assert router.take(0) is None and len(router) == 0


def test_each_group_goes_to_one_replica_until_nothing_else_waits() -> None:
    router, rng = Router(2, reach=10_000), random.Random(0)
    groups = [rng.randrange(20) for _ in range(1000)]
    for number, group in enumerate(groups):
        router.add(number, of_group(group, number))
    taken: list[list[int]] = [[], []]
    for turn in range(1000):
        number = router.take(turn % 2)
        assert number is not None
        taken[turn % 2].append(groups[number])
    assert sorted(taken[0] + taken[1]) == sorted(groups)
    computed = len(set(taken[0])) + len(set(taken[1]))
    assert computed <= 21, "at most the last group is shared out"
    for one in taken:  # and requests of one group come one after the other
        assert sum(a != b for a, b in pairwise(one)) < len(set(one)) + 1


def test_a_common_beginning_of_all_does_not_hide_the_groups() -> None:
    """A system prompt of 70 tokens, then 1,000 tokens of each group. Both replicas soon hold the system
    prompt.
    """
    router, rng = Router(2, reach=10_000), random.Random(1)
    groups = [rng.randrange(10) for _ in range(400)]
    for number, group in enumerate(groups):
        router.add(number, prompt(*[1] * 70, *[2 + group] * 1000, number))
    taken: list[set[int]] = [set(), set()]
    for turn in range(400):
        number = router.take(turn % 2)
        assert number is not None
        taken[turn % 2].add(groups[number])
    assert len(taken[0]) + len(taken[1]) <= 12


def test_forgotten_prefixes_have_no_cost() -> None:
    router = Router(2, REACH)
    for number in range(4):
        router.add(number, of_group(number // 2, number))
    assert router.take(0) == 0
    assert router.take(1) == 2, "the first replica holds what 1 begins with"
    router.forget(0)
    assert router.take(1) == 3 and router.take(1) == 1


@settings(max_examples=100, deadline=None)
@given(
    num_replicas=st.integers(1, 4),
    groups=st.lists(st.integers(0, 5), max_size=150),
    turns=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.booleans()), max_size=250),
)
def test_every_request_is_taken_once_and_none_waits_for_ever(
    num_replicas: int, groups: list[int], turns: list[tuple[int, int, bool]]
) -> None:
    router = Router(num_replicas, REACH)
    coming = iter(enumerate(groups))
    waiting: list[int] = []
    seen: list[int] = []
    num_added = 0
    for adds, replica, aborts in [*turns, *[(1, turn, False) for turn in range(2 * len(groups))]]:
        for number, group in [each for _, each in zip(range(adds), coming, strict=False)]:
            router.add(number, of_group(group, number, length=64 * (1 + group)))
            waiting.append(number)
            num_added += 1
        if aborts and waiting:
            assert router.remove(waiting[-1]) and not router.remove(waiting[-1])
            seen.append(waiting.pop())
        was_due = waiting and num_added - waiting[0] > REACH
        number_taken = router.take(replica % num_replicas)
        assert (number_taken is None) == (not waiting), "no replica is left idle"
        if number_taken is not None:
            assert number_taken == waiting[0] or not was_due
            waiting.remove(number_taken)
            seen.append(number_taken)
        assert len(router) == len(waiting)
    assert sorted(seen) == list(range(len(groups)))
    assert not inside.waiting_hashes(router)


def computed_prefixes(router: Router | RoundRobin, num_groups: int, room: int) -> int:
    """The number of prefixes that two replicas compute, each with a cache for `room` prefixes."""
    rng = random.Random(0)
    groups = [group for group in range(num_groups) for _ in range(100)]
    rng.shuffle(groups)
    for number, group in enumerate(groups):
        router.add(number, of_group(group, number))
    caches: list[list[int]] = [[], []]
    computed = 0
    for turn in range(len(groups)):
        number = router.take(turn % 2)
        if number is None:
            continue
        cache, group = caches[turn % 2], groups[number]
        computed += group not in cache
        caches[turn % 2] = [group, *(each for each in cache if each != group)][:room]
    return computed


def test_fewer_prefixes_are_computed_than_by_round_robin() -> None:
    assert computed_prefixes(Router(2, reach=10_000), 20, room=20) <= 21
    assert computed_prefixes(RoundRobin(2), 20, room=20) == 40
    assert computed_prefixes(Router(2, reach=10_000), 20, room=5) <= 21
    assert computed_prefixes(RoundRobin(2), 20, room=5) > 1000


def test_what_a_replica_holds_of_what_it_took() -> None:
    router = Router(2, REACH)
    for number in range(5):
        router.add(number, of_group(1, number))  # 300 common tokens: the first 64, 128 and 256
    router.add(5, prompt(7, 7))
    assert router.take(0) == 0 and router.num_held_tokens(0) == 0
    assert router.take(0) == 1 and router.num_held_tokens(0) == 256
    assert router.take(1) == 5 and router.num_held_tokens(1) == 0
    router.forget(0)
    assert router.take(0) == 2 and router.num_held_tokens(0) == 0
    assert router.take(1) == 3 and router.num_held_tokens(1) == 0
    assert router.take(1) == 4 and router.num_held_tokens(1) == 256


def request_of(number: int, length: int, n: int = 1) -> Request:
    return Request(number, None, array("i", [0] * length), SamplingParams(n=n), frozenset(), (), None)


def test_a_replica_has_room_while_little_waits_to_be_computed() -> None:
    config = Config(model="m", max_num_seqs=16, max_num_batched_tokens=100)
    member = ReplicaProcess(0, config)
    member.is_ready = True
    has_room = member.has_room
    member.take(request_of(0, 150, n=3), 0)
    assert has_room()
    member.take(request_of(1, 150), 128)
    member.take(request_of(2, 60), 0)
    assert not has_room(), "150 + 22 + 60 tokens are more than two steps"
    assert member.hear(
        num_received=3, num_waiting=2
    )  # one completion of request 0 runs, so its prompt is computed
    assert has_room()
    member.take(request_of(3, 150), 0)
    assert not has_room()
    # More sequences wait than were sent, because some were preempted.
    member.hear(num_received=6, num_waiting=6)
    assert not has_room()
    member.hear(num_received=6, num_waiting=1)
    assert has_room()
    for number in range(4, 16):
        member.take(request_of(number, 1), 0)
    assert not has_room(), "a batch and an eighth of it are in flight"
    member.forget_requests()
    member.take(request_of(16, 150), 0)
    assert has_room()
    assert not member.hear(num_received=18, num_waiting=0), "a step of forgotten requests"
    assert member.hear(num_received=19, num_waiting=0)


def test_the_pipe_blocks_whatever_timeout_new_sockets_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_process, "start_process", lambda process: None)
    member = ReplicaProcess(0, Config(model="m"))
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(5)
    try:
        member.start({})
    finally:
        socket.setdefaulttimeout(before)
    assert os.get_blocking(member.pipe.fileno())
    member.end(0)
