"""Channel: every reader gets every call, whole and in order, even if others are slow or stuck."""

from __future__ import annotations

import os
import pickle
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection

import inside
import numpy as np
import pytest
from channels import SECONDS, DeadWorkerError, called, dead, last, listening, opened, shm_files
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.batch import (
    FILTERS,
    LAST_SAMPLED,
    PADDING,
    Batch,
    Extras,
    SamplingColumns,
    StepKind,
    greedy,
)
from nanovllm.errors import WorkerError
from nanovllm.parallel.channel import Channel, ChannelReader


def make_batch(query_lens: list[int], width: int, sampling: SamplingColumns | None = None) -> Batch:
    size, rng = len(query_lens), np.random.default_rng(0)
    return Batch(
        kind=StepKind.PREFILL,
        seq_ids=tuple(range(2**40, 2**40 + size)),
        slots=np.arange(size, dtype=np.int32),
        token_ids=rng.integers(LAST_SAMPLED, 150_000, sum(query_lens), dtype=np.int32),
        query_lens=np.array(query_lens, np.int32),
        context_lens=np.array(query_lens, np.int32) + 7,
        tables=(rng.integers(PADDING, 1000, (size, width), dtype=np.int32),),
        draws=rng.integers(2, size=size, dtype=np.int32),
        sampling=sampling or greedy(size),
    )


def all_columns(size: int) -> SamplingColumns:
    return SamplingColumns(
        temperature=np.linspace(0, 2, size, dtype=np.float32),
        seeds=np.arange(size, dtype=np.int64) - 2**62,
        positions=np.arange(size, dtype=np.int32),
        **{name: np.linspace(0, 1, size, dtype=np.float32) for name in FILTERS},
    )


def assert_same(got: object, expected: object) -> None:
    """Equal in type, dtype, shape and value, field by field."""
    assert type(got) is type(expected)
    if is_dataclass(expected):
        for field in fields(expected):
            assert_same(getattr(got, field.name), getattr(expected, field.name))
    elif isinstance(expected, np.ndarray):
        assert got.dtype == expected.dtype and got.shape == expected.shape
        np.testing.assert_array_equal(got, expected)
    elif isinstance(expected, tuple):
        assert len(got) == len(expected)
        for each, other in zip(got, expected, strict=True):
            assert_same(each, other)
    elif isinstance(expected, Extras):
        assert vars(got) == vars(expected)
    else:
        assert got == expected


@pytest.fixture
def channel() -> Iterator[Channel]:
    """Two readers, and a ring of 4 slots of 16 bytes: hardly any message fits into one slot."""
    with opened(2, num_slots=4, slot_bytes=16) as channel:
        yield channel


@pytest.fixture
def wide() -> Iterator[Channel]:
    """One reader, and the default ring."""
    with opened(1) as channel:
        yield channel


# The content of a message


@pytest.mark.parametrize(
    "args",
    [
        (),
        (3, "text", None, 2.5, True, (1, ("a", None)), [b"bytes"]),
        (make_batch([1] * 5, 3),),
        (make_batch([1] * 7, 16, all_columns(7)),),
        (make_batch([5, 1, 30], 4),),
        (make_batch([1], 0),),
        (make_batch([], 0, all_columns(0)),),
        ("before", make_batch([2, 3], 1), None, make_batch([1] * 3, 2, all_columns(3)), -1),
    ],
    ids=["none", "small", "decode", "all columns", "prefill", "no blocks", "no sequences", "two batches"],
)
def test_round_trip(wide: Channel, args: tuple[object, ...]) -> None:
    wide.send(called, *args)
    method, got = wide.readers[0].receive(SECONDS)
    assert method is called and len(got) == len(args)
    for value, expected in zip(got, args, strict=True):
        assert_same(value, expected)


def test_arrays_that_are_views_of_others(wide: Channel) -> None:
    batch = make_batch([1] * 6, 8)
    table = np.asfortranarray(batch.tables[0])
    views = Batch(
        **{field.name: getattr(batch, field.name) for field in fields(Batch)}
        | {"tables": (table[::2, 1:5],), "slots": batch.slots[::-1]}
    )
    wide.send(called, views)
    assert_same(wide.readers[0].receive(SECONDS)[1][0], views)


def test_arrays_are_not_pickled() -> None:
    batch = make_batch([1] * 2048, 64, all_columns(2048))
    parts, pickled = struct.unpack_from("2q", inside.encode_call(called, (batch,)))
    assert parts == 1 + 9 + len(FILTERS), "the call, and every array by itself"
    assert pickled < 16 * 2048, "sequence ids, and no array"


def test_arrays_outlive_the_slots_and_the_segment() -> None:
    channel = Channel(1, num_slots=2, slot_bytes=1024)
    (reader,) = channel.readers
    batch = make_batch([1] * 8, 4, all_columns(8))
    channel.send(called, batch)
    (got,) = reader.receive(SECONDS)[1]
    for number in range(5):
        channel.send(called, bytes([255]) * 1500, number)
        reader.receive(SECONDS)
    reader.close()
    channel.close()
    assert_same(got, batch)
    for array in (got.slots, got.tables[0], got.sampling.seeds):
        assert array.flags.aligned and array.flags.writeable
        array += 1  # with views into an unmapped segment this would crash


# The ring


@settings(max_examples=40, deadline=None)
@given(
    num_slots=st.integers(1, 5),
    slot_bytes=st.integers(1, 97),
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=25),
    delays=st.lists(
        st.lists(st.sampled_from([0, 0, 0, 5e-4]), min_size=1, max_size=5), min_size=1, max_size=3
    ),
)
def test_every_reader_gets_all_in_order(
    num_slots: int, slot_bytes: int, sizes: list[int], delays: list[list[float]]
) -> None:
    """Messages of random sizes start and end at every place of the ring and wrap around at every offset."""
    expected = [(called, (number, os.urandom(size))) for number, size in enumerate(sizes)]
    with (
        opened(len(delays), num_slots=num_slots, slot_bytes=slot_bytes) as channel,
        listening(channel, len(sizes), delays) as got,
    ):
        for method, args in expected:
            channel.send(method, *args)
    assert got == [expected] * len(delays)


def test_writer_waits_for_the_slowest_reader() -> None:
    """With one slot for each message: the ring fills, nothing is overwritten, and the writer continues when
    the slowest reader has read a message.
    """
    channel = Channel(2, num_slots=4, slot_bytes=1024)
    fast, slow = readers = channel.readers.copy()
    got: dict[str, list[int]] = {"fast": [], "slow": []}

    def read(name: str, reader: ChannelReader) -> None:
        call = reader.receive(0)
        if call is not None:
            got[name].append(call[1][0])

    waits: list[int] = []
    for number in range(12):

        def slow_reads(number: int = number) -> None:
            waits.append(number)
            assert len(waits) <= 8
            read("slow", slow)

        channel.send(called, number, check_alive=slow_reads)
        read("fast", fast)
    assert got["fast"] == list(range(12))
    assert got["slow"] == list(range(8)) and waits == list(range(4, 12))
    while len(got["slow"]) < 12:
        read("slow", slow)
    assert got["slow"] == list(range(12))
    assert [reader.receive(0) for reader in readers] == [None, None]
    for reader in readers:
        reader.close()
    channel.close()


def digest_calls(reader: ChannelReader, results: Connection, pause: float) -> None:
    """A worker that answers each call with a checksum; slow if it pauses between pieces."""
    while True:
        time.sleep(pause)
        call = reader.receive(timeout=0.001)
        if call is None:
            if os.getppid() != parent_process().pid:
                return
        elif call[0] is last:
            return
        else:
            results.send((call[1][0], zlib.crc32(call[1][1].token_ids), call[1][1].seq_ids[-1]))


def test_message_far_larger_than_the_segment() -> None:
    """A prefill step of 512 prompts of 8,192 tokens, 16 MiB, through 1 MiB, between steps that fit into one
    slot.
    """
    channel = Channel(2)
    prefill, decode = make_batch([8192] * 512, 32), make_batch([1] * 512, 16, all_columns(512))
    context = get_context("spawn")
    pipes, processes = [], []
    for reader, pause in zip(channel.readers, (0, 0.003), strict=True):
        here, there = context.Pipe()
        process = context.Process(target=digest_calls, args=(reader, there, pause), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)

    def check_alive() -> None:
        assert all(process.is_alive() for process in processes)

    files = shm_files(channel)
    batches = [prefill, *[decode] * 50, prefill, decode]
    for number, batch in enumerate(batches):
        channel.send(called, number, batch, check_alive=check_alive)
    channel.send(last, check_alive=check_alive)
    for pipe in pipes:
        for number, batch in enumerate(batches):
            assert pipe.poll(SECONDS)
            assert pipe.recv() == (number, zlib.crc32(batch.token_ids), batch.seq_ids[-1])
    for process in processes:
        process.join(SECONDS)
        assert process.exitcode == 0
    del process, reader
    channel.close()
    assert not [file for file in files if file.exists()]


def test_two_channels_are_independent(channel: Channel) -> None:
    with opened(2, num_slots=4, slot_bytes=16) as other:
        assert not set(shm_files(channel)) & set(shm_files(other))
        for number in (1, 2):
            with pytest.raises(DeadWorkerError):
                channel.send(called, bytes(1000), check_alive=dead)
            with listening(other, 1) as got:
                other.send(called, number)
            assert got == [[(called, (number,))]] * 2


# Waiting and failures


def test_receive_returns_none_after_its_timeout(channel: Channel) -> None:
    reader = channel.readers[0]
    for timeout in (0, 0.1):
        start = time.monotonic()
        assert reader.receive(timeout) is None
        assert time.monotonic() - start >= timeout * 0.9  # it did wait
    with pytest.raises(DeadWorkerError):
        channel.send(called, bytes(1000), check_alive=dead)
    assert reader.receive(0.01) is None  # pieces, but no message


def test_receive_wakes_up_for_a_message(wide: Channel) -> None:
    timer = threading.Timer(0.05, wide.send, args=(called,))
    timer.start()
    assert wide.readers[0].receive(600 * SECONDS) == (called, ())
    timer.join()


def test_an_abandoned_call_is_dropped_whole(channel: Channel) -> None:
    """`check_alive` raises while the ring is full; the readers never get that call, but they get the next
    ones.
    """
    for number in range(3):
        with pytest.raises(DeadWorkerError):
            channel.send(called, os.urandom(500), check_alive=dead)
        with listening(channel, 2) as got:
            channel.send(called, number, bytes(100))
            channel.send(last, number)
        assert got == [[(called, (number, bytes(100))), (last, (number,))]] * 2


def test_one_reader_behind_is_enough_to_wait(channel: Channel) -> None:
    """However often calls are abandoned, the other reader's free slots stay the same."""
    fast, slow = channel.readers

    def fast_reads() -> None:
        assert fast.receive(0) is None
        dead()

    for _ in range(6):
        with pytest.raises(DeadWorkerError):
            channel.send(called, bytes(500), check_alive=fast_reads)
    assert slow.receive(0) is None
    with pytest.raises(DeadWorkerError):
        channel.send(called, bytes(500), check_alive=dead)
    assert inside.next_piece(channel) == 8, "4 pieces before slow reads, and 4 more after"


def test_what_cannot_be_pickled_sends_nothing(wide: Channel) -> None:
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        wide.send(called, lambda: None)
    wide.send(called, 1)
    assert wide.readers[0].receive(SECONDS) == (called, (1,))


def test_an_interrupted_send_is_never_followed_by_another(
    wide: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(inside.semaphores(wide)[0], "release", interrupt)
    with pytest.raises(KeyboardInterrupt):
        wide.send(called)
    monkeypatch.undo()
    with pytest.raises(WorkerError, match="interrupted"):
        wide.send(called)
