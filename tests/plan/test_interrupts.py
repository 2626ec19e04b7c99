"""Ctrl-C takes effect after the block, as it would within it, and never if the block itself raises."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from threads import in_threads

from nanovllm.lifecycle import held_interrupts, no_full_collections


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def handler_is_put_back() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) == before


def test_it_acts_after_the_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), held_interrupts():  # noqa: PT012
        interrupt()
        done.append("the rest of the block")
    assert done
    with held_interrupts():
        pass  # nothing is left over


def test_blocks_in_blocks() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), held_interrupts():  # noqa: PT012
        with held_interrupts():
            interrupt()
            done.append(1)
        done.append(2)
    assert done == [1, 2]


def test_an_error_of_the_block_comes_first() -> None:
    with pytest.raises(ZeroDivisionError), held_interrupts():  # noqa: PT012
        interrupt()
        _ = 1 / 0


def test_the_callers_own_handler_is_called() -> None:
    calls = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        with held_interrupts():
            interrupt()
            interrupt()
            assert calls == []
        assert calls == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with held_interrupts():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_change_nothing() -> None:
    def handler(_: int) -> object:
        with held_interrupts():
            return signal.getsignal(signal.SIGINT)

    assert in_threads(1, handler) == [signal.getsignal(signal.SIGINT)]


def test_full_collections_are_delayed() -> None:
    """Other collections become rare. The thresholds come back however the block ends, and in any order of
    several blocks.
    """
    before = gc.get_threshold()
    first = no_full_collections()
    with pytest.raises(ZeroDivisionError), no_full_collections():  # noqa: PT012
        held = gc.get_threshold()
        with no_full_collections():
            assert gc.get_threshold() == held
        1 / 0  # noqa: B018
    assert before[0] < held[0] < 10**6
    assert held[1] == before[1]
    assert held[2] > 10**6 > before[2]
    assert gc.get_threshold() == before
    with first:
        second = no_full_collections()
        second.__enter__()
    assert gc.get_threshold() == before
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before
