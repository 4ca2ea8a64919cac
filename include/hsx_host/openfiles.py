"""Who has something in a folder open: by descriptor, as its folder, or mapped into memory."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import psutil

Key = tuple[int, int]


def holders(folder: Path) -> list[int]:
    """Pids that hold the folder, or anything below it. Files are told by device and inode, so that another name, mount
    or container hides none. Of other users' processes only root sees what they hold."""
    known = _keys(folder)
    return sorted(pid for pid in psutil.pids() if any(key in known for key in _held(pid)))


def mounted_below(folder: Path) -> list[str]:
    """Mount points in a folder: what lies there belongs to another file system, or to another place of this one."""
    inside = os.path.realpath(folder) + "/"
    return [p for p in mount_points(Path("/proc/self/mountinfo").read_bytes()) if p.startswith(inside)]


def mount_points(mountinfo: bytes) -> list[str]:
    """The mount points of a mountinfo. The kernel writes space, tab, newline and backslash as three octal digits, and
    all other bytes as they are."""
    fields = [line.split(b" ")[4] for line in mountinfo.split(b"\n") if line]
    return [os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), f)) for f in fields]


def _keys(folder: Path) -> set[Key]:
    found = {_key(os.lstat(folder))}
    for where, folders, names in os.walk(folder):
        for name in [*folders, *names]:
            with contextlib.suppress(FileNotFoundError):
                found.add(_key(os.lstat(os.path.join(where, name))))
    return found


def _key(info: os.stat_result) -> Key:
    return info.st_dev, info.st_ino


def _held(pid: int) -> list[Key]:
    found: list[Key] = []
    with contextlib.suppress(OSError):
        found.append(_key(os.stat(f"/proc/{pid}/cwd")))
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.append(_key(os.stat(f"/proc/{pid}/fd/{fd}")))
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            fields = line.split(None, 5)
            if len(fields) == 6 and fields[4] != "0":
                major, minor = (int(n, 16) for n in fields[3].split(":"))
                found.append((os.makedev(major, minor), int(fields[4])))
    return found
