"""A dry run's answer: what, how long, what would be deleted."""

from __future__ import annotations

from typing import Any

import pytest

from hsx_operators.foretold import foretell

PLAN = {
    "todo": 10_000, "done": 40, "valid": 10_040, "todo_tokens": 17_300_000, "todo_bytes": 924 << 30,
    "dataset_id": "kimi-x", "dataset_dir": "/data/kimi-x",
}  # fmt: skip
PACE = {"tok_s": 5000.0, "tokens": 1, "shards": 1, "overhead_s": 900.0, "at": 1.0}
DISK = {
    "verdict": "fits", "needed_bytes": 924 << 30, "free_bytes": 2 << 40, "reserve_bytes": 0, "old_states": [],
    "text": "It fits.",
}  # fmt: skip
OLD = {"path": "/old/a", "bytes": 1 << 40, "files": 7, "device": 1, "inode": 2, "newest": 3.0}


def answer(policy: str = "never", **changes: Any) -> dict[str, Any]:
    plan = {**PLAN, "pace": PACE, **{k: v for k, v in changes.items() if k in {*PLAN, "pace"}}}
    disk = {**DISK, **{k: v for k, v in changes.items() if k in DISK}}
    return foretell({"cleanup_policy": policy}, plan, [{}] * 20, disk)


def test_what_and_how_long() -> None:
    said = answer()
    assert said["extract_s"] == 3460.0
    assert said["down_s"] == 4360.0
    assert said["lines"] == [
        "Would extract 10,000 samples in 20 shards: 17,300,000 tokens, 924.0 GiB; 40 samples are done.",
        "Extraction would take 58 min at the measured 5,000 tokens/s.",
        "Production would be down for about 73 min: the extraction, and 15 min to stop, start, prove, verify and "
        "restore, as the last time.",
        "It fits.",
        "Nothing would be deleted.",
    ]


@pytest.mark.parametrize(("pace", "knows"), [(None, False), ({**PACE, "overhead_s": 0.0}, True)])
def test_what_was_never_measured_is_not_made_up(pace: Any, knows: bool) -> None:
    said = answer(pace=pace)
    assert said["down_s"] is None
    assert (said["extract_s"] is not None) == knows
    assert ("is not known" in said["lines"][1]) != knows
    assert not any("down" in line for line in said["lines"])


@pytest.mark.parametrize(
    ("policy", "verdict", "deleted", "says"),
    [
        ("ask", "cleanup", 1, "Would delete one folder of old states, 1.0 TiB, after a person's approval"),
        ("auto", "cleanup", 1, "without asking"),
        ("never", "cleanup", 0, "would stop at the disk check"),
        ("auto", "short", 0, "would stop at the disk check"),
    ],
)
def test_what_would_be_deleted(policy: str, verdict: str, deleted: int, says: str) -> None:
    said = answer(policy, verdict=verdict, old_states=[OLD])
    assert len(said["deletes"]) == deleted
    assert says in said["lines"][-1]


def test_nothing_to_do() -> None:
    nothing = {"todo": 0, "todo_tokens": 0, "todo_bytes": 0}
    said = answer(valid=40, **nothing)
    assert said["lines"] == ["Nothing to do: all 40 samples of kimi-x are published. Production would not be touched."]
    said = answer(**nothing)  # such as of the failed shards, where none has failed
    assert said["lines"][0].startswith(
        "Nothing to do in the shards that were asked for, where 40 of the 10,040 samples"
    )
