"""``kill -9`` of the client, of the scheduler, of the whole server and of all at once, at seeded moments of a run each.

After resume the data set equals an uninterrupted one, file by file, and nothing unfinished is left.
"""

from __future__ import annotations

import os
import shutil

import crashes
import pytest
from crashes import VICTIMS, Setting

MOMENTS = int(os.environ.get("HSX_CRASH_MOMENTS", "1"))
SEED = int(os.environ.get("HSX_CRASH_SEED", "0"))


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("moment", range(MOMENTS))  # turn by turn: a run that is cut off has struck all of them
def test_a_killed_run_resumes_to_the_same_data_set(setting: Setting, victim: str, moment: int) -> None:
    crashes.crash(setting, victim, SEED + moment)


def test_one_at_a_time_the_files_are_the_same_to_the_bit(setting: Setting) -> None:
    """What differs above is the company that a sample had in its batch: without any, no bit does."""
    data = setting.data.with_name("single.jsonl")
    shutil.copy(setting.data, data)
    whole = setting.host.with_data(data, concurrency=1)
    whole.verb("plan")
    whole.verb("extract", "--shard", "0")
    tally = crashes.crash(Setting(whole, whole, data), "client", SEED, "client, one sample at a time")
    assert (tally.equal, tally.differing) == (len(crashes.LENGTHS), 0)
