"""A host of a test's own, with a stand-in server; and no test leaves a process.

Guards, and the servers that they bring back, outlive what started them, as they should.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from host_lifecycle import clean_up, make_spec

from hsx_host import contract as c


@pytest.fixture
def spec(tmp_path: Path) -> Iterator[c.RunSpec]:
    """A run against a home of its own; what it leaves is stopped by its records."""
    spec = make_spec(tmp_path)
    yield spec
    clean_up(spec)


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
