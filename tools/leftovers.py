"""What a closed engine must not leave behind: processes, shared memory segments, ports."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
GONE_SECONDS = 5.0  # time in which leftovers disappear by themselves


def listening_ports() -> set[int]:
    """The TCP ports that this process listens on."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except FileNotFoundError:
            continue
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    ports = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.add(int(fields[1].rsplit(":", 1)[1], 16))
    return ports


def shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir() if path.name.startswith(("psm_", "sem.mp-"))}


def leftovers() -> list[str]:
    """Processes, segments and ports of engines that are still in this process."""
    processes = [f"process {child.pid}" for child in multiprocessing.active_children()]
    segments = [
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "psm_" in line
    ]
    return processes + segments + [f"port {port}" for port in listening_ports()]


def wait_until_nothing_is_left() -> list[str]:
    """Wait for leftovers to disappear and return what remains: an interrupted start holds its port a little
    longer.
    """
    deadline = time.monotonic() + GONE_SECONDS
    while (left := leftovers()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
