"""The journal: a small JSON file beside the output that describes the job; and the lock on both.

Only the job that the journal describes can resume its output. Holds and counts no answers. `versions` names
the packages that answers depend on, and imports none of them.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import xxhash

from nanovllm.jobs.errors import JobRefusedError
from nanovllm.jobs.side_files import open_own, own_file, replaced

_ABOUT = (
    "The state of a `nanovllm run` job. The same command resumes it. To start over and keep these answers, "
    "choose another -o."
)
# These keys define a job; other keys may change.
_JOB_KEYS = ("input", "model", "options", "sampling", "prompt", "format")
_INFORMATIVE = ("path", "files")  # keys within these that may change too
CHUNK = 2**20


class Journal:
    """The journal of one output: `OUTPUT.job.json`."""

    def __init__(self, output: Path, rows: Path) -> None:
        """rows: the JSON Lines file, from which an output in another format is exported."""
        self.path = output.with_name(output.name + ".job.json")
        self._output = output
        self._rows = rows
        self.state: dict[str, Any] = {}
        self.began_with: Mapping[str, Any] = {}  # the options that may change, as the job had them before

    def read(self) -> dict[str, Any] | None:
        """Return the stored journal, None if there is none. JobRefusedError if the file is not a journal."""
        try:
            with os.fdopen(open_own(self.path, os.O_RDONLY, self._output, self._rows), "rb") as file:
                found = json.loads(file.read())
            if not isinstance(found, dict) or not {*_JOB_KEYS} <= found.keys():
                raise ValueError("it lacks the keys of a journal")
            return found
        except FileNotFoundError:
            return None
        except FileExistsError as error:  # by another user
            raise JobRefusedError(str(error.strerror)) from None
        except (OSError, ValueError, RecursionError) as error:
            raise JobRefusedError(
                f"{self.path} cannot be read as a journal ({error}); restore it from a copy, or choose "
                f"another -o, which keeps the answers in {self._output}"
            ) from None

    def begin(
        self,
        job: Mapping[str, Any],
        defaults: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        extend: Callable[[Mapping[str, Any]], object] | None = None,
    ) -> dict[str, Any] | None:
        """Resume the existing job and return its previous journal, or write a new journal and return None.

        job: its description with the keys that define a job, and further keys to store. defaults: for some of
        these, the values that are not given. extend: called with the journal's `input` if only the input
        differs; it raises JobRefusedError unless the job may go on with it. JobRefusedError if the output
        belongs to another job, or to none.
        """
        found = self.read()
        files = [path for path in (self._output, self._rows) if path.exists() and path.stat().st_size]
        if not files:
            self.state = {"about": _ABOUT, "state": "", **job, "started": _now()}
        elif found is None:
            raise JobRefusedError(
                f"{files[0]} exists and has no journal, so it is no output of this job; choose another -o, "
                "which keeps it as it is"
            )
        else:
            different = list(_differences(found, job, defaults))
            other_input = {**found, "input": job["input"]}
            if different and (extend is None or list(_differences(other_input, job, defaults))):
                raise JobRefusedError(
                    f"{self._output} belongs to another job: {'; '.join(different)}. Choose another -o, "
                    "which keeps its answers"
                )
            if not self._rows.exists():
                raise JobRefusedError(
                    f"{self._rows} is gone, from which {self._output} was made; restore it from a copy, or "
                    f"choose another -o, which keeps the answers in {self._output}"
                )
            if different and extend is not None:
                extend(found["input"])
            self.state, self.began_with = {**found, **job}, found.get("other_options", {})
        self.update(state="running", pid=os.getpid())
        return found if files else None

    def update(self, **values: Any) -> None:
        """Change values of the journal and write it to disk."""
        self.state |= {**values, "updated": _now()}
        text = json.dumps(self.state, indent=2, ensure_ascii=False) + "\n"
        # Write bytes of arguments that are not UTF-8 as escapes.
        with replaced(self.path, self._output, self._rows) as file:
            file.write(text.encode(errors="backslashreplace"))


def _differences(
    found: Mapping[str, Any], job: Mapping[str, Any], defaults: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    """Yield the differences between two jobs, as text. A default that is given is none, nor is a larger
    `limit`."""
    least, limit = found.get("limit"), job.get("limit")
    if limit is not None and (least is None or limit < least):
        yield f"its limit is {json.dumps(least)}, and {limit} is less"
    for name in _JOB_KEYS:
        one, other = found[name], job[name]
        if isinstance(one, dict) and isinstance(other, dict):
            one, other = ({**defaults.get(name, {}), **each} for each in (one, other))
        else:
            one, other = {"": one}, {"": other}
        for key in sorted({*one, *other} - {*_INFORMATIVE}):
            if one.get(key) != other.get(key):
                where = f"{name}.{key}" if key else name
                yield f"its {where} is {json.dumps(one.get(key))}, not {json.dumps(other.get(key))}"


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """Keep other processes from the output and its journal, with a lock on a file beside it.

    The system frees it when the process ends, however it ends. JobRefusedError when another one has it, or
    when the folder cannot be written.
    """
    path = own_file(output, "lock")
    descriptor = _lock(path, output)
    try:
        with suppress(OSError):  # on a full disk the journal's error is the clearer one
            os.truncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(path: Path, output: Path) -> int:
    while True:
        try:
            descriptor = open_own(path, os.O_RDWR | os.O_CREAT, output)
        except FileExistsError as error:
            if error.filename is not None:  # another process has just made it
                continue
            raise JobRefusedError(f"{output} cannot be written: {error.strerror}") from None
        except OSError as error:
            raise JobRefusedError(
                f"{output} cannot be written: {path.parent}: {error.strerror}; choose another -o"
            ) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BlockingIOError:
            holder = os.read(descriptor, 20).decode().strip() or "another process"
            os.close(descriptor)
            raise JobRefusedError(
                f"{output} is being written by process {holder}; wait for it, or choose another -o"
            ) from None
        except FileNotFoundError:
            pass
        except OSError as error:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise JobRefusedError(
                f"{path} cannot be locked: {error.strerror}; choose an -o on a file system with locks, such "
                "as a local disk"
            ) from None
        os.close(descriptor)  # the process that held the lock has just deleted its file


def hash_file(path: Path, size: int | None = None) -> str:
    """The XXH3 (128 bits) of a whole file, or of its first `size` bytes, in hexadecimal."""
    digest = xxhash.xxh3_128()
    for chunk in chunks(path, size):
        digest.update(chunk)
    return digest.hexdigest()


def chunks(path: Path, size: int | None = None) -> Iterator[bytes]:
    """The bytes of a whole file, or its first `size`."""
    with path.open("rb") as file:
        while chunk := file.read(CHUNK if size is None else min(CHUNK, size)):
            size = None if size is None else size - len(chunk)
            yield chunk


def _now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


_PACKAGES = ("nanovllm", "torch", "transformers", "tokenizers", "triton", "numpy")


def versions(more: tuple[str, ...] = ()) -> dict[str, str]:
    """The versions of Python, of the packages that answers depend on, and of the packages `more`, by name."""
    found = {"python": platform.python_version()}
    for name in (*_PACKAGES, *more):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
