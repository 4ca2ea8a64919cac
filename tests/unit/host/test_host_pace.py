"""What was measured before: the rate of the last shards, and what production's absence took beside extracting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from host_data import make_spec

from hsx_host import pace, state
from hsx_host.pace import Stint, pace_of


def stint(begun: float, ended: float, tokens: int = 1000, profile: str = "p") -> Stint:
    return Stint(profile, "r", tokens, begun, ended)


def event(time: float, what: str, mode: str) -> dict[str, Any]:
    return {"time": time, "event": what, "mode": mode}


STOP, START, BACK = "stopping server", "server ready", "server ready"


def test_nothing_is_foretold_before_the_first_shard() -> None:
    assert pace_of([], [event(0, STOP, "production"), event(9, BACK, "production")]) is None


def test_rate_and_overhead_of_the_last_absence_in_which_something_was_extracted() -> None:
    journal = [
        event(100, STOP, "production"), event(130, START, "extraction"), event(160, STOP, "extraction"),
        event(190, BACK, "production"),
        event(500, STOP, "production"), event(510, BACK, "production"),  # nothing was extracted in between
    ]  # fmt: skip
    found = pace_of([stint(140, 150), stint(150, 155, tokens=500)], journal)
    assert found is not None
    assert (found.tok_s, found.tokens, found.shards, found.at) == (100.0, 1500, 2, 155)
    assert found.overhead_s == 90 - 15


def test_a_host_that_is_not_back_yet_has_no_overhead() -> None:
    found = pace_of([stint(140, 150)], [event(100, STOP, "production"), event(130, START, "extraction")])
    assert found is not None
    assert (found.tok_s, found.overhead_s) == (100.0, 0.0)


def test_time_of_shards_that_overlap_is_counted_once() -> None:
    found = pace_of([stint(0, 10), stint(5, 15), stint(20, 25)], [])
    assert found is not None
    assert found.tok_s == 150.0


def test_only_the_own_profile_counts_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, tmp_path / "data.jsonl")
    assert pace.measured(spec) is None
    pace.keep(spec, 1000, 0.0, 10.0)
    pace.keep(replace(spec, profile="other"), 9000, 0.0, 10.0)
    with (state.folder(spec, "state") / "pace.jsonl").open("a") as f:
        f.write('{"profile": "')
    found = pace.measured(spec)
    assert found is not None
    assert (found.tok_s, found.shards) == (100.0, 1)
