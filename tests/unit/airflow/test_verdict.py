"""The verdict over task states."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from hsx_operators.verdict import RunFailed, VerdictOperator, judge


def test_good() -> None:
    assert judge({"plan": "success", "extract_0": "success"}, "") == []


def test_what_failed_comes_first_in_natural_order() -> None:
    states: dict[str, str | None] = {
        "verify": "upstream_failed",
        "extract_10": "failed",
        "extract_2": "failed",
        "extract_3": "success",
        "restore": "success",
    }
    assert judge(states, "") == ["Failed: extract_2, extract_10", "Did not run because of that: verify"]


def test_skips_are_wanted_or_not() -> None:
    states: dict[str, str | None] = {"gate": "success", "extract": "skipped"}
    assert judge(states, "dry run") == []
    assert judge(states, "") == ["Skipped by hand: extract"]
    assert judge({**states, "plan": "failed"}, "dry run") == ["Failed: plan"]


@pytest.mark.parametrize("meant", ["", "nothing to do"])
@pytest.mark.parametrize(
    "states", list(product(["success", "failed", "upstream_failed", "skipped", "deferred"], repeat=3))
)
def test_green_exactly_where_nothing_is_wrong(states: tuple[str, ...], meant: str) -> None:
    """Never green with a failed shard, never red without something that is wrong."""
    good = {"success", "skipped"} if meant else {"success"}
    named: dict[str, str | None] = {f"extract_{i}": state for i, state in enumerate(states)}
    assert (judge(named, meant) == []) == (set(states) <= good)


class _Ti:
    def __init__(self, states: dict[str, str] | None = None, run: Any = None, **xcoms: Any) -> None:
        self.xcoms, self.dag_id, self.run_id, self.run = xcoms, "d", "r", run
        self.states = states or {"plan": "success", "benchmark_after": "success"}

    def get_task_states(self, dag_id: str, run_ids: list[str]) -> dict[str, dict[str, str]]:
        return {"r": self.states}

    def xcom_pull(self, task_ids: str, key: str = "return_value") -> Any:
        if (task_ids, key) == ("plan", "run"):
            return self.run
        return self.xcoms.get(task_ids) if key == "return_value" else None


def test_a_production_that_came_back_slower_makes_the_run_red() -> None:
    verdict = VerdictOperator(task_id="verdict")
    slow = {"within_tolerance": False, "text": "single: 9.0 tok/s, 0.50 of the baseline 18.1"}
    with pytest.raises(RunFailed, match=r"production is slower than it was: single: 9.0"):
        verdict.execute({"ti": _Ti(benchmark_after=slow)})  # type: ignore[typeddict-item]
    good = slow | {"within_tolerance": True}
    assert verdict.execute({"ti": _Ti(benchmark_after=good)})["verdict"] == "good"  # type: ignore[typeddict-item]


def test_shards_that_the_window_left_are_the_next_runs_though_this_one_is_cleared_later() -> None:
    verdict = VerdictOperator(task_id="verdict")
    states = {"extract_0": "success", "extract_1": "skipped", "handoff": "success"}
    night = _Ti(states, {"stop_after": 1.0})
    assert verdict.execute({"ti": night})["verdict"] == "good"  # type: ignore[typeddict-item]
    for ti in (_Ti(states, {"stop_after": 0.0}), _Ti({**states, "convert": "skipped"}, {"stop_after": 1.0})):
        with pytest.raises(RunFailed, match="Skipped by hand"):
            verdict.execute({"ti": ti})  # type: ignore[typeddict-item]
