"""A small file system of its own (tmpfs) that can be filled and made read-only while processes write to it."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

_CHUNK = 1 << 12


class SmallDisk:
    """``size`` bytes at ``at``. Needs the right to mount; a test that has it not is skipped, and says so."""

    def __init__(self, at: Path, size: int = 16 << 20) -> None:
        self.at, self._view, self._over = at, at.with_name(f"{at.name}-view"), 0
        at.mkdir()
        self._view.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "hsx-faults", str(at)], capture_output=True
        )
        if done.returncode != 0:
            pytest.skip(f"needs the right to mount a tmpfs: {done.stderr.decode().strip()}")

    def fill(self) -> None:
        """Take every free page."""
        fd = os.open(self.at / "filler", os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            while True:
                os.write(fd, b"\0" * _CHUNK)
        except OSError as e:
            if e.errno != errno.ENOSPC:
                raise
        finally:
            os.close(fd)

    def read_only(self) -> None:
        """Lay a read-only view of the same files over them: a file system with open writers can't be remounted."""
        _mount("--bind", str(self.at), str(self._view))
        _mount("-o", "remount,bind,ro", str(self._view))
        _mount("--bind", str(self._view), str(self.at))
        _mount("-o", "remount,bind,ro", str(self.at))
        self._over = 1

    def mend(self) -> None:
        """Room again, and writable again."""
        if self._over:
            for where in (self.at, self._view):
                subprocess.run(["umount", "-l", str(where)], check=True, capture_output=True)
            self._over = 0
        (self.at / "filler").unlink(missing_ok=True)

    def close(self) -> None:
        for where in (self.at, self.at, self._view):
            subprocess.run(["umount", "-l", str(where)], capture_output=True)


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, capture_output=True)
