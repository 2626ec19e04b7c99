"""The end of a channel or of its processes: the writer is never blocked, and no file or worker is left."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
from channels import SECONDS, DeadWorkerError, called, shm_files, wait_for_calls

from nanovllm.errors import EngineClosedError, WorkerError
from nanovllm.parallel.channel import Channel


def test_a_reader_killed_while_it_waits_does_not_block_the_writer() -> None:
    channel = Channel(1, num_slots=2, slot_bytes=1024)
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=wait_for_calls, args=(channel.readers[0], there), daemon=True)
    process.start()
    assert here.recv() is None
    time.sleep(0.05)
    process.kill()
    process.join(SECONDS)

    def check_alive() -> None:
        if not process.is_alive():
            raise DeadWorkerError

    channel.send(called, check_alive=check_alive)
    channel.send(called, check_alive=check_alive)
    with pytest.raises(DeadWorkerError):
        channel.send(called, check_alive=check_alive)
    channel.close()


def test_close_leaves_nothing_and_can_be_repeated() -> None:
    channel = Channel(3)
    files = shm_files(channel)
    assert len(files) == 7 and all(file.exists() for file in files)
    reader = channel.readers[0]
    channel.send(called)
    assert reader.receive(SECONDS) == (called, ())
    reader.close()
    reader.close()
    del reader
    channel.close()
    channel.close()
    assert not [file for file in files if file.exists()]
    with pytest.raises(EngineClosedError):
        channel.send(called)


def test_shared_memory_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    created: list[Path] = []

    def full(descriptor: int, offset: int, size: int) -> None:
        created.append(Path(f"/proc/self/fd/{descriptor}").resolve())
        assert created[0].stat().st_size == size
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        WorkerError, match=r"needs 1\.0 MiB of shared memory.*\(No space left on device\); free space"
    ):
        Channel(2)
    assert created and not created[0].exists()


def test_a_channel_that_is_dropped_is_unlinked() -> None:
    channel = Channel(1)
    files = shm_files(channel)
    del channel
    assert not [file for file in files if file.exists()]


def test_attaching_to_a_closed_channel_is_an_error() -> None:
    channel = Channel(1)
    (reader,) = channel.readers
    channel.close()
    with pytest.raises(FileNotFoundError):
        reader.receive(0)


ENGINE = """
import time
from multiprocessing import get_context
from nanovllm.parallel.channel import Channel
from channels import called, shm_files, wait_for_calls

if __name__ == "__main__":
    context = get_context("spawn")
    channel = Channel(2)
    processes = []
    for reader in channel.readers:
        here, there = context.Pipe()
        processes.append(context.Process(target=wait_for_calls, args=(reader, there), daemon=True))
        processes[-1].start()
        here.recv()
    channel.send(called)
    print(*shm_files(channel), sep="\\n")
    print(flush=True)
    if input() == "close":
        for process in processes:
            process.kill()
            process.join()
        channel.close()
"""


@pytest.mark.parametrize("end", ["close", "forget", "kill -9"])
def test_end_of_rank_0(end: str, tmp_path: Path) -> None:
    """However rank 0 ends, the segment, the semaphores and its workers are gone within seconds. Unless it is
    killed, nothing is printed on stderr.
    """
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    path = os.pathsep.join(str(folder) for folder in Path(__file__).parents[1:3])
    process = subprocess.Popen(
        [sys.executable, script],
        env=os.environ | {"PYTHONPATH": path},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    files = [Path(line.strip()) for line in iter(process.stdout.readline, "\n")]
    assert len(files) == 5 and all(file.exists() for file in files)
    if end == "kill -9":
        process.send_signal(signal.SIGKILL)
    # Workers and the resource tracker hold stderr open, so end of file means that they are gone.
    _, errors = process.communicate(None if end == "kill -9" else f"{end}\n", timeout=SECONDS)
    assert not [file for file in files if file.exists()]
    if end == "kill -9":
        assert process.returncode == -signal.SIGKILL and "leaked shared_memory" in errors
    else:
        assert process.returncode == 0 and not errors
