"""Compressed files: reads gzip and zstd as a stream that can be read again, and writes them.

Holds a window of a stream, whatever the file unpacks to. Knows no rows. zstd needs pyarrow, the extra `jobs`.
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
KEPT = 2**24 + 2 * CHUNK  # bytes behind the position; a row and the line after it


def packing_of(start: bytes) -> str | None:
    """How a file with these first bytes is compressed; None if it is not."""
    return next((packing for mark, packing in _MARKS.items() if start.startswith(mark)), None)


def open_rows(path: Path) -> BinaryIO:
    """Open a file for reading, and unpack it if it is compressed. OSError if it is damaged."""
    file = path.open("rb")
    packing = packing_of(file.read(4))
    file.seek(0)
    if packing is None:
        return file
    file.close()
    return cast(BinaryIO, _Unpacked(path, packing))


def unpacked_size(path: Path, name: str) -> int:
    """The size of a file, unpacked if it is compressed, for which it is read to its end.

    JobRefusedError if it is damaged, or unpacks to far more than any text does.
    """
    with open_rows(path) as file:
        if not isinstance(file, _Unpacked):
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
    """The content of a compressed file. Going back is quick for a few MiB, else it unpacks again."""

    def __init__(self, path: Path, packing: str) -> None:
        self._path, self._packing = path, packing
        self._stream: Any = None
        self._start()

    def _start(self) -> None:
        self._close_stream()
        self._stream = _reader(self._path, self._packing)
        self._window = bytearray()
        self._first = self._at = 0  # the position of the window, and within it

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._first + self._at

    def seek(self, position: int, whence: int = 0) -> int:
        """Only from the beginning (whence=0)."""
        if position < self._first:
            self._start()
        while position > self._first + len(self._window):
            self._at = len(self._window)
            if not self._fill():
                break
        self._at = min(position - self._first, len(self._window))
        return position

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes; fewer only at the end."""
        while (size < 0 or len(self._window) - self._at < size) and self._fill():
            pass
        return self._take(len(self._window) if size < 0 else self._at + size)

    def readline(self, size: int | None = -1) -> bytes:
        """A line, or its first `size` bytes."""
        most = 2**62 if size is None or size < 0 else size
        looked = self._at
        while (end := self._window.find(b"\n", looked, self._at + most)) < 0:
            looked = len(self._window) - self._at
            if looked >= most or not self._fill():
                return self._take(self._at + most)
            looked += self._at
        return self._take(end + 1)

    def close(self) -> None:
        self._close_stream()
        super().close()

    def _take(self, end: int) -> bytes:
        found = bytes(self._window[self._at : end])
        self._at += len(found)
        return found

    def _fill(self) -> bool:
        """Unpack more; whether there was more."""
        if self._at > 2 * KEPT:
            gone = self._at - KEPT
            del self._window[:gone]
            self._first, self._at = self._first + gone, KEPT
        try:
            chunk = self._stream.read(CHUNK)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise OSError(" ".join(str(error).split())) from None
        self._window += chunk
        return bool(chunk)

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()


def _reader(path: Path, packing: str) -> Any:
    if packing == "gzip":
        return gzip.open(path, "rb")
    return import_zstd(str(path)).input_stream(str(path), compression="zstd")


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
