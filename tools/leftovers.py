"""What a closed engine must not leave behind: processes, shared memory, ports."""

from __future__ import annotations

import multiprocessing
import os
import time
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
GONE_SECONDS = 5.0  # time in which leftovers disappear by themselves


def listening_addresses(pid: int) -> list[str]:
    """The addresses that a process listens on with TCP, such as 127.0.0.1:80 and :::80."""
    links = []
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                links.append(os.readlink(entry))
    except (FileNotFoundError, PermissionError):  # it has just ended
        return []
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    addresses = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                words, port = fields[1].split(":")
                raw = b"".join(bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8))
                addresses.append(f"{ip_address(raw)}:{int(port, 16)}")
    return addresses


def listening_ports() -> set[int]:
    """The TCP ports that this process listens on."""
    return {int(address.rsplit(":", 1)[1]) for address in listening_addresses(os.getpid())}


def shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir() if path.name.startswith(("psm_", "sem.mp-"))}


def leftovers() -> list[str]:
    """Processes, segments and ports of engines that are still in this process."""
    processes = [f"process {child.pid}" for child in multiprocessing.active_children()]
    segments = [
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "psm_" in line
    ]
    folders = [str(folder) for folder in SHARED_MEMORY.glob(f"nanovllm-{os.getpid()}-*")]
    return processes + segments + folders + [f"port {port}" for port in listening_ports()]


def wait_until_nothing_is_left() -> list[str]:
    """Wait for leftovers to disappear and return what remains: an interrupted start holds its port a little
    longer.
    """
    deadline = time.monotonic() + GONE_SECONDS
    while (left := leftovers()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
