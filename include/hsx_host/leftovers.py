"""Unfinished sample files that a killed step left: removed when the host is given back, where no step works on them.

Such a file has no final name and counts for nothing; the next step of the same shard would remove it too. But the last
run of a data set has no next step, and its samples are gigabytes.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from hsx_host import fingerprint, state
from hsx_host.contract import RunSpec
from hsx_host.errors import HsxError
from hsx_host.progress import log
from hsx_host.shards import ShardFiles


def remove(spec: RunSpec) -> None:
    """Remove the unfinished files of the spec's data set, but for what a living step holds; never raises for a disk."""
    with contextlib.suppress(HsxError, OSError):  # no plan, no model any more, a disk that can't be written
        dataset, _ = fingerprint.opened(spec)
        for folder in sorted((dataset / "tmp").glob("*")):
            lock = _lock_of(dataset, folder.name)
            with contextlib.suppress(HsxError), state.locked(lock, wait_s=0, what=folder.name):
                shutil.rmtree(folder)
                log(f"removed the unfinished files of a step that was killed: {folder}")


def _lock_of(dataset: Path, name: str) -> Path:
    """The lock that the step holds which writes to ``<dataset>/tmp/<name>``."""
    number = name.removeprefix("shard-")
    return ShardFiles(dataset, int(number)).lock if number.isdigit() else dataset / f"{name}.lock"
