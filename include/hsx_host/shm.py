"""Shared memory in /dev/shm: which segments only a server holds, and their removal once it is gone.

A segment's name has no slash (shm_open(3)). What lies in a folder below /dev/shm is somebody's file: a model that was
put there to load faster, a log, a data set.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from hsx_host.progress import log

FOLDER = "/dev/shm/"


def held_only_by(pids: set[int]) -> dict[str, int]:
    """The segments that these processes have mapped or open and nobody else has, with their inodes."""
    own = {path for pid in pids for path in _of(pid)}
    if not own:
        return {}
    others = _of_everybody(without=pids)
    inodes = {path: _inode(path) for path in own - others}
    return {path: inode for path, inode in inodes.items() if inode is not None}


def remove(segments: dict[str, int]) -> None:
    """Remove recorded segments that are still the same file and that no process holds."""
    left = {path: inode for path, inode in segments.items() if _inode(path) == inode}
    held = _of_everybody() if left else set()
    for path in sorted(set(left) - held):
        Path(path).unlink(missing_ok=True)
        log(f"removed the shared memory that the server left: {path}")


def _of_everybody(without: set[int] | None = None) -> set[str]:
    return {path for pid in psutil.pids() if pid not in (without or set()) for path in _of(pid)}


def _of(pid: int) -> set[str]:
    """Segments that a process has mapped or open; deleted ones are of no interest."""
    found = set()
    try:
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            if FOLDER in line:
                found.add(line[line.index(FOLDER) :])
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(fd)
            if target.startswith(FOLDER):
                found.add(target)
    except OSError:
        pass  # gone meanwhile, or another user's
    return {path for path in found if "/" not in path.removeprefix(FOLDER) and not path.endswith(" (deleted)")}


def _inode(path: str) -> int | None:
    try:
        return os.lstat(path).st_ino
    except FileNotFoundError:
        return None
