"""``kill -9`` of the client, of the scheduler, of the whole server and of all at once, at seeded moments of a run each.

After resume the data set equals an uninterrupted one, file by file, and nothing unfinished is left.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import crashes
import extraction_host
import pytest
from crashes import LENGTHS, VICTIMS, Setting
from extraction_host import Host

MOMENTS = int(os.environ.get("HSX_CRASH_MOMENTS", "1"))
SEED = int(os.environ.get("HSX_CRASH_SEED", "0"))


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Iterator[Setting]:
    root = tmp_path_factory.mktemp("crash")
    data = extraction_host.write_data(root / "whole.jsonl", LENGTHS, seed=11)
    spec = extraction_host.spec_of(root, tiny_llama, data, shard_size=len(LENGTHS), concurrency=4)
    host = Host(root, spec)
    host.verb("acquire")
    try:
        host.verb("serve", "extraction")
        host.verb("plan")
        host.verb("extract", "--shard", "0")
        yield Setting(host, host, data)
    finally:
        host.verb("serve", "stopped")
        host.verb("release", "--abandon")


@pytest.mark.parametrize("moment", range(MOMENTS))
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_killed_run_resumes_to_the_same_data_set(setting: Setting, victim: str, moment: int) -> None:
    crashes.crash(setting, victim, SEED + moment)
