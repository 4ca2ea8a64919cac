"""The verdict over task states."""

from __future__ import annotations

from hsx_operators.verdict import judge


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
