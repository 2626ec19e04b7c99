"""Side files: what is written beside a file that the user named, such as locks and journals.

The one place that opens them: never through a link, only regular files of this user or of the named file's
owner, and with that file's mode and owner. Does not know what they hold.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe is opened without waiting, and then refused
_NOT_REGULAR = "a link, a folder, a pipe or a device"


def own_file(path: Path, use: str) -> Path:
    """A file beside `path` that exists only for a while. No other program gives a file such a name, so a file
    that is there is left from a process that was killed."""
    return path.with_name(f"{path.name}.nanovllm.{use}")


def open_own(path: Path, flags: int, *like: Path) -> int:
    """Open a side file and return its descriptor; with O_CREAT it is made if it is not there.

    like: the named files; the first that exists gives a new file its mode and owner. OSError that
    names the file, if it is a link, no regular file, or of another owner.
    """
    try:
        descriptor = os.open(path, flags & ~os.O_CREAT | _SAFE)
    except FileNotFoundError:
        if flags & os.O_CREAT:
            return _create(path, flags, _first(like))
        raise
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _refused(path, _NOT_REGULAR) from None
        raise
    try:
        _check(path, os.fstat(descriptor), _first(like))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def new_file(path: Path, *like: Path) -> BinaryIO:
    """Make a side file, in the place of what a killed process left. like, OSError: as for `open_own`."""
    named = _first(like)
    with suppress(FileNotFoundError):
        _check(path, path.lstat(), named)
        path.unlink()
    return os.fdopen(_create(path, os.O_WRONLY, named), "wb")


@contextmanager
def replaced(path: Path, *like: Path, use: str = "tmp") -> Iterator[BinaryIO]:
    """Yield a new file; after the block it is on disk, and replaces `path` atomically.

    like: as for `open_own`; `path` itself by default. use: part of its name until then.
    """
    temporary = own_file(path, use)
    new = new_file(temporary, *(like or (path,)))
    try:
        with new as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def check_name(path: Path, longest: str) -> None:
    """ValueError if the folder takes no name as long as that of `path` with `longest` after it."""
    size, most = len(os.fsencode(path.name + longest)), 255
    with suppress(OSError, ValueError):
        most = os.pathconf(path.parent, "PC_NAME_MAX")
    if size > most:
        raise ValueError(
            f"the name {path.name[:20]}... is {size - most} bytes too long: files beside it need {size} "
            f"bytes, and the folder takes {most}; choose a shorter name"
        )


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _first(paths: tuple[Path, ...]) -> os.stat_result | None:
    """The first of these that is a file."""
    for path in paths:
        with suppress(OSError):
            if stat.S_ISREG((found := path.lstat()).st_mode):
                return found
    return None


def _check(path: Path, found: os.stat_result, named: os.stat_result | None) -> None:
    owners = {os.geteuid()} if named is None else {os.geteuid(), named.st_uid}
    if not stat.S_ISREG(found.st_mode):
        raise _refused(path, _NOT_REGULAR)
    if found.st_uid not in owners:
        raise _refused(path, f"a file of user {found.st_uid}")
    if found.st_nlink > 1 and (named is None or not os.path.samestat(found, named)):
        raise _refused(path, "another name of some file")


def _refused(path: Path, what: str) -> OSError:
    return OSError(
        errno.EEXIST,
        f"{path} is {what}, so it is neither read nor written: another user may have put it there; remove it",
    )


def _create(path: Path, flags: int, named: os.stat_result | None) -> int:
    mode = 0o666 if named is None else 0o600  # less the umask
    descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL | _SAFE, mode)
    if named is not None:
        _take(descriptor, named)
    return descriptor


def _take(descriptor: int, named: os.stat_result) -> None:
    """Give a file the owner, as far as this user may, and the mode of another."""
    for uid, gid in ((-1, named.st_gid), (named.st_uid, -1)):
        with suppress(PermissionError):
            os.fchown(descriptor, uid, gid)
    os.fchmod(descriptor, stat.S_IMODE(named.st_mode))
