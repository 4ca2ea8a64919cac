"""What an error says that a file gave: of what the file holds, of the host that reads it, or of the room beside it.

Only the first may be noted as damage: an ``extract`` deletes what is noted, and a file that another login may not read
is as good as it was.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeGuard

from hsx_host.errors import Refused, TryAgain

_OF_CONTENT = {
    errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL,
}  # fmt: skip
# what a network's file system says whose server is away (ENOTCONN, ESHUTDOWN: FUSE and Lustre; ETIMEDOUT: a soft mount)
_OF_A_MOUNT = (errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN, errno.ETIMEDOUT)
_FIXES = {
    errno.EACCES: "make it readable for this login, then start it again",
    errno.EPERM: "make it readable for this login, then start it again",
    errno.EMFILE: "raise the limit of open files (ulimit -n), then start it again",
    errno.ENFILE: "raise the host's limit of open files (fs.file-max), then start it again",
    errno.ENOMEM: "free memory, then start it again",
    errno.EIO: "look at the disk or file server (dmesg), then start it again",
    **dict.fromkeys(_OF_A_MOUNT, "look at the file server's mount, then start it again"),
}
#: Errors that pass once the host is looked after, whatever a verb was at; a missing right is told by what it was for.
PASSING = _FIXES.keys() - {errno.EACCES, errno.EPERM}
_NFS = re.compile(r"\.nfs[0-9a-f]+")


def reason(path: Path, error: Exception) -> str:
    """Why a file is not what it should be, as an error of its reader says it: for a note that it is damaged.

    :raises TryAgain: the error is the host's (no right, no more open files, a disk's or server's fault), so that it
        says nothing of what the file holds. Nothing may be noted then.
    """
    if isinstance(error, OSError) and of_the_host(error):
        raise unreadable(path, error) from None
    return (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__


def content(path: Path) -> bytes | None:
    """What a file of lines holds; None where there is none.

    :raises TryAgain: where the host can't read it now.
    :raises Refused: where what has its name is no file.
    """
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        if of_the_host(e):
            raise unreadable(path, e) from None
        fix = "move it away, then start it again: what it should name is made anew"
        raise Refused(f"is no file ({e.strerror})", field=path.name, value=path, fix=fix) from None


def of_the_host(error: OSError) -> bool:
    """Whether an error says nothing of what the file holds. One without a number is a library's, of the content."""
    return error.errno is not None and error.errno not in _OF_CONTENT


def unreadable(path: Path, error: OSError) -> TryAgain:
    """That a file can't be read now, and what helps."""
    return TryAgain(
        f"can't be read: {error.strerror}; nothing is said of what it holds",
        field="file",
        value=path,
        fix=_FIXES.get(error.errno or 0, _FIXES[errno.EIO]),
    )


def is_nfs_own(name: str) -> bool:
    """Whether a file is the file system's: on NFS, one that was removed while open. It goes when it is closed."""
    return _NFS.fullmatch(name) is not None


def is_full(error: BaseException) -> TypeGuard[OSError]:
    """Whether the disk or a quota is full. The library datasets says so without a number."""
    return isinstance(error, OSError) and (error.errno in (errno.ENOSPC, errno.EDQUOT) or "disk space" in str(error))


@contextmanager
def room(folder: Path, needed: int, what: str) -> Iterator[None]:
    """Write ``needed`` bytes below a folder that is there: TryAgain, which names both, where they are not free, before
    the first of them or on the way."""
    if _free_bytes(folder) < needed:
        raise _no_room(folder, needed, what)
    try:
        yield
    except OSError as e:
        if not is_full(e):
            raise
        raise _no_room(folder, needed, f"{what} ({e.strerror or e})") from None


def _free_bytes(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def _no_room(folder: Path, needed: int, what: str) -> TryAgain:
    return TryAgain(
        f"no space: {needed} bytes are needed for {what}, {_free_bytes(folder)} are free",
        field="disk", value=folder, fix="make room, then start it again: what is done stays done",
    )  # fmt: skip
