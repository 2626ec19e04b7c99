"""Compressed files: reads gzip and zstd as a stream, and writes them.

Holds a part of a stream, whatever the file unpacks to. Knows no rows. zstd needs pyarrow, the extra `jobs`.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from nanovllm.jobs.errors import JobRefusedError

PACKINGS = {".gz": "gzip", ".zst": "zstd"}  # by the ending of a name
_MARKS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}  # the first bytes of a file
MAX_RATIO = 1000  # of the unpacked to the packed bytes, for a file that unpacks to more than this:
MAX_UNPACKED_FREELY = 2**30
CHUNK = 2**20


def packing_of(start: bytes) -> str | None:
    """How a file with these first bytes is compressed; None if it is not."""
    return next((packing for mark, packing in _MARKS.items() if start.startswith(mark)), None)


def open_rows(path: Path) -> io.BufferedReader:
    """Open a file for reading, once, and unpack it if it is compressed. OSError if it is damaged."""
    file = path.open("rb")
    packing = packing_of(file.read(4))
    file.seek(0)
    if packing is None:
        return file
    file.close()
    return io.BufferedReader(_Unpacked(path, packing), CHUNK)


def unpacked_size(path: Path, name: str) -> int:
    """The size of a file, unpacked if it is compressed, for which it is read to its end.

    JobRefusedError if it is damaged, or unpacks to far more than any text does.
    """
    with open_rows(path) as file:
        if not isinstance(file.raw, _Unpacked):
            return path.stat().st_size
        most = max(MAX_UNPACKED_FREELY, MAX_RATIO * path.stat().st_size)
        size = 0
        try:
            while (chunk := file.read(CHUNK)) and size <= most:
                size += len(chunk)
        except OSError as error:
            raise JobRefusedError(
                f"{name} is compressed and damaged: {error}; replace it by a good copy"
            ) from None
    if size > most:
        raise JobRefusedError(
            f"{name} unpacks to more than {MAX_RATIO:,} times its size, as no text does; if it is right, "
            "unpack it"
        )
    return size


class _Unpacked(io.RawIOBase):
    """The content of a compressed file, from its beginning to its end."""

    def __init__(self, path: Path, packing: str) -> None:
        self._stream: Any
        if packing == "gzip":
            self._stream = gzip.GzipFile(path, "rb")
        else:
            self._stream = import_zstd(str(path)).input_stream(str(path), compression="zstd")
        self._position = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        try:
            chunk = self._stream.read(len(buffer))
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise OSError(" ".join(str(error).split())) from None
        buffer[: len(chunk)] = chunk
        self._position += len(chunk)
        return len(chunk)

    def close(self) -> None:
        self._stream.close()
        super().close()


@contextmanager
def packed(file: BinaryIO, packing: str | None) -> Iterator[BinaryIO]:
    """Yield a file whose content goes to `file`, compressed. Equal contents have equal bytes."""
    if packing is None:
        yield file
    elif packing == "gzip":
        with gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) as target:
            yield cast(BinaryIO, target)
    else:
        with import_zstd("").CompressedOutputStream(_Kept(file), "zstd") as target:
            yield target


class _Kept(io.RawIOBase):
    """A file that is left open when a compressor closes it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._file.write(data)


def import_zstd(name: str) -> Any:
    """Return pyarrow, which has zstd. JobRefusedError if it is not installed."""
    try:
        import pyarrow
    except ImportError as error:
        raise JobRefusedError(
            f"{name or '.zst'} needs the package pyarrow ({error}); pip install 'nanovllm[jobs]'"
        ) from None
    return pyarrow
