"""``kill -9`` of the client, of the scheduler, of the whole server and of all at once, at seeded moments of a run each.

After resume the data set equals an uninterrupted one, file by file, and nothing unfinished is left.
"""

from __future__ import annotations

import os

import crashes
import pytest
from crashes import VICTIMS, Setting

MOMENTS = int(os.environ.get("HSX_CRASH_MOMENTS", "1"))
SEED = int(os.environ.get("HSX_CRASH_SEED", "0"))


@pytest.mark.parametrize("moment", range(MOMENTS))
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_killed_run_resumes_to_the_same_data_set(setting: Setting, victim: str, moment: int) -> None:
    crashes.crash(setting, victim, SEED + moment)
