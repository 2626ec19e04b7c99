"""Channel: broadcasts rank 0's calls to the worker processes of one host through shared memory.

Owns the segment, the semaphores and the wire format. A message is a function, by its qualified name, and its
arguments; it reaches every reader once, in order and whole, whatever its size. Starts no process, never
answers, imports no torch.
"""

# The segment is a ring of slots for pieces of messages. Each reader has two counting semaphores: pieces
# written for it, and slots that it has emptied. So the writer waits for the slowest reader, and overwrites
# nothing unread.
#
# The semaphores are the only synchronisation and memory ordering. The writer stores a piece before its
# `release`, and the reader loads it after the matching `acquire`; the same holds for emptied slots. POSIX
# semaphores order memory at both operations, on arm64 and x86-64.
#
# An `Event` would not do: its `set` waits for an answer from the process that it wakes, and hangs forever if
# that process was killed in `wait`. `release` waits for no one, and no process holds a lock that could die
# with it.

from __future__ import annotations

import os
import pickle
import struct
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from multiprocessing import get_context
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.synchronize import Semaphore
from time import monotonic
from typing import Any

from nanovllm.errors import EngineClosedError, WorkerError
from nanovllm.parallel.owned import finalize

_CHECK_SECONDS = 0.1  # how often a waiting writer checks that its readers are alive
ALIGNMENT = 8  # bytes; of every array in a message, for the widest dtype

Received = tuple[Callable[..., Any], tuple[Any, ...]]  # a function and its arguments

_SLOT_HEADER = struct.Struct("qqq")  # the piece's number, its offset in the message, the message's length


class Channel:
    """Rank 0's end: the only writer, used by one thread.

    num_readers: the number of workers. `readers` has a handle for each, an argument of its process.
    num_slots, slot_bytes: the size of the ring; WorkerError if /dev/shm has no room for it. A decode step of
    512 sequences fits into one slot; a message larger than the ring passes through it in pieces.
    """

    def __init__(self, num_readers: int, num_slots: int = 16, slot_bytes: int = 64 * 1024) -> None:
        context = get_context("spawn")
        self._num_slots = num_slots
        self._slot_bytes = slot_bytes
        # The system chooses a free name, and the resource tracker registers it. If rank 0 is killed before it
        # unlinks the segment, the tracker unlinks it as soon as rank 0 and all its children are gone.
        self._segment = _create(num_slots * (_SLOT_HEADER.size + slot_bytes))
        self._unlink = finalize(self, _close_and_unlink, self._segment)
        self._written = [context.Semaphore(0) for _ in range(num_readers)]
        self._emptied = [context.Semaphore(num_slots) for _ in range(num_readers)]
        self.readers = [
            ChannelReader(self._segment.name, num_slots, slot_bytes, written, emptied)
            for written, emptied in zip(self._written, self._emptied, strict=True)
        ]
        self._next_piece = 0
        self._claimed = [False] * num_readers  # whether the reader has emptied the slot of the next piece
        self._sending = False

    def send(
        self, call: Callable[..., object], *args: object, check_alive: Callable[[], None] | None = None
    ) -> None:
        """Write a call for every reader: arrays as raw bytes, everything else pickled.

        While the slowest reader is a whole ring behind, this waits and calls `check_alive` every
        _CHECK_SECONDS. If `check_alive` raises, the call was not made (readers drop its pieces), and the
        channel stays usable. After any other exception, such as KeyboardInterrupt, some readers may have the
        call, so all later calls raise WorkerError. To avoid this, block SIGINT during the call, and raise it
        from `check_alive`. EngineClosedError after `close`.
        """
        if not self._unlink.alive:
            raise EngineClosedError(f"{call.__name__!r} was called after the workers' channel was closed")
        if self._sending:
            raise WorkerError("the workers are out of step: an earlier call was interrupted during sending")
        message = memoryview(_encode(call, args))
        self._sending = True
        for offset in range(0, len(message), self._slot_bytes):
            self._claim_slot(check_alive)
            self._write_piece(message, offset)
        self._sending = False

    def close(self) -> None:
        """Unlink the segment and the semaphores, once the workers have ended; a second call does nothing."""
        self._unlink()
        self.readers.clear()
        self._written.clear()
        self._emptied.clear()

    def _claim_slot(self, check_alive: Callable[[], None] | None) -> None:
        """Wait until every reader has emptied the next piece's slot; claims are kept if this raises."""
        for index, emptied in enumerate(self._emptied):
            while not self._claimed[index]:
                self._claimed[index] = emptied.acquire(True, _CHECK_SECONDS)
                if not self._claimed[index] and check_alive is not None:
                    self._sending = False
                    check_alive()
                    self._sending = True

    def _write_piece(self, message: memoryview, offset: int) -> None:
        buffer = self._segment.buf
        assert buffer is not None
        piece = message[offset : offset + self._slot_bytes]
        slot = self._next_piece % self._num_slots * (_SLOT_HEADER.size + self._slot_bytes)
        start = slot + _SLOT_HEADER.size
        _SLOT_HEADER.pack_into(buffer, slot, self._next_piece, offset, len(message))
        buffer[start : start + len(piece)] = piece
        self._next_piece += 1
        self._claimed = [False] * len(self._claimed)
        for written in self._written:
            written.release()


@dataclass(eq=False)
class ChannelReader:
    """A worker's end, passed to its process. The first `receive` attaches it to the segment."""

    _name: str  # of the segment
    _num_slots: int
    _slot_bytes: int
    _written: Semaphore
    _emptied: Semaphore
    _segment: SharedMemory | None = None
    _next_piece: int = 0
    _message: bytearray = field(default_factory=bytearray)  # the received part of it

    def receive(self, timeout: float) -> Received | None:
        """Return the next call as (function, arguments); None if it is not complete after `timeout` seconds.

        Its arrays lie in the message's own memory, outside the segment, and can be kept. Raises
        FileNotFoundError if rank 0 closed the channel before the first `receive`.
        """
        if self._segment is None:
            self._segment = _attach(self._name)
        deadline = monotonic() + timeout
        while self._written.acquire(True, max(0.0, deadline - monotonic())):
            if self._read_piece(self._segment):
                message, self._message = self._message, bytearray()
                return _decode(message)
        return None

    def close(self) -> None:
        """Detach from the segment; a second call does nothing."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _read_piece(self, segment: SharedMemory) -> bool:
        """Copy the next piece out of its slot; True if it is the last of its message."""
        buffer = segment.buf
        assert buffer is not None
        slot = self._next_piece % self._num_slots * (_SLOT_HEADER.size + self._slot_bytes)
        start = slot + _SLOT_HEADER.size
        number, offset, length = _SLOT_HEADER.unpack_from(buffer, slot)
        assert number == self._next_piece, f"piece {number} is where {self._next_piece} should be"
        if offset == 0:  # drops the pieces of a message that rank 0 gave up
            self._message = bytearray(length)
        end = min(offset + self._slot_bytes, length)
        self._message[offset:end] = buffer[start : start + end - offset]
        self._next_piece += 1
        self._emptied.release()
        return end == length


def _create(size: int) -> SharedMemory:
    """Create a fully allocated segment: a write beyond the room of /dev/shm would end the process with
    SIGBUS."""
    segment: SharedMemory | None = None
    try:
        segment = SharedMemory(create=True, size=size)
        os.posix_fallocate(segment._fd, 0, size)  # type: ignore[attr-defined]
    except OSError as error:
        if segment is not None:
            _close_and_unlink(segment)
        raise WorkerError(
            f"tensor_parallel_size above 1 needs {size / 2**20:.1f} MiB of shared memory, and /dev/shm gives "
            f"none ({error.strerror}); free space there, or give a container more (docker run --shm-size=1g)"
        ) from error
    return segment


def _close_and_unlink(segment: SharedMemory) -> None:
    segment.close()
    segment.unlink()


def _attach(name: str) -> SharedMemory:
    """Map rank 0's segment for a reader, without the resource tracker.

    Before Python 3.13 attaching registers the name again. This has no effect, because rank 0 and its children
    share one tracker, which keeps a set of names. Unregistering would remove rank 0's own entry.
    """
    if sys.version_info >= (3, 13):
        return SharedMemory(name, track=False)
    return SharedMemory(name)


# A message: the number of parts, their lengths, and the parts, each at a multiple of ALIGNMENT. The first one
# is the pickled (function, arguments); the others are its arrays, which pickle keeps out of band (PEP 574).


def _encode(call: Callable[..., object], args: tuple[object, ...]) -> bytearray:
    arrays: list[memoryview] = []
    pickled = pickle.dumps((call, args), protocol=5, buffer_callback=lambda each: arrays.append(each.raw()))
    parts: list[bytes | memoryview] = [pickled, *arrays]
    lengths = [len(part) for part in parts]
    message = bytearray(array("q", [len(parts), *lengths]))
    for part in parts:
        message += part
        message += bytes(-len(part) % ALIGNMENT)
    return message


def _decode(message: bytearray) -> Received:
    view = memoryview(message)
    (count,) = struct.unpack_from("q", view)
    lengths = struct.unpack_from(f"{count}q", view, ALIGNMENT)
    starts = accumulate((length + -length % ALIGNMENT for length in lengths), initial=ALIGNMENT * (count + 1))
    pickled, *arrays = (view[start : start + length] for start, length in zip(starts, lengths, strict=False))
    call, args = pickle.loads(pickled, buffers=arrays)
    return call, args
