"""No test leaves a process: guards and the servers that they bring back outlive what started them, as they should."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ends what still has the test's own folder on its command line, until nothing does: guards start each other."""
    if "tmp_path" not in request.fixturenames:
        yield
        return
    folder = os.fsencode(request.getfixturevalue("tmp_path"))
    yield
    while left := _with_argument(folder):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _with_argument(folder: bytes) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if folder + b"/" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found
