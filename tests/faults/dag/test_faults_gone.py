"""Airflow is killed for good in mid-extraction: the host is given back by itself, within the lease time."""

from __future__ import annotations

import time

from fault_dag import SAMPLES, DagRun, Row, Stand, until

from hsx_demo.components import COMPONENTS

LEASE_S = 60
END = "production as it was, lease free, nothing left"


def held_in_mid_shard(stand: Stand) -> DagRun:
    stand.hold("capture-20")
    run = stand.trigger()
    run.in_mid_shard()
    return run


def after(stand: Stand, run: DagRun) -> None:
    """Airflow comes back: the run's own tries do the rest, and the host is given back again."""
    stand.free()
    stand.start_again(*COMPONENTS)
    if run.end() != "success":  # the shard's tries were used up: a person clears it
        assert "Failed: extract_0" in run.log("verdict"), run.story()
        run.clear("extract", 0, only_failed=True)
        assert run.end() == "success", run.story()
    assert run.manifest() == SAMPLES
    stand.settled()


def test_airflow_is_killed_for_good(stand: Stand, row: Row) -> None:
    row("Airflow killed (all its processes)", "extracting")
    run = held_in_mid_shard(stand)
    stand.kill_all_of_airflow()
    began, lines = time.monotonic(), len(stand.journal())
    stand.settled()
    took = time.monotonic() - began
    assert stand.told("lease lapsed: the guard gives the host back", lines)
    after(stand, run)
    row(end=f"the guard restored after {took:.0f} s (lease {LEASE_S} s); Airflow back, the run ends green; {END}",
        log='journal: "lease lapsed: the guard gives the host back"')  # fmt: skip


def test_airflow_and_the_guards_are_killed(stand: Stand, row: Row) -> None:
    """Nobody is left on the host but the job, which watches the guards."""
    row("Airflow and the guards killed", "extracting")
    run = held_in_mid_shard(stand)
    stand.kill_all_of_airflow()
    stand.kill_guards()
    until(lambda: stand.guards(), stand.story, 120)
    stand.settled()
    after(stand, run)
    row(end=f"the shard's job starts other guards, which restore; {END}", log='journal: "lease lapsed: ..."')


def test_airflow_is_killed_and_production_does_not_come_back(stand: Stand, row: Row) -> None:
    """No task is left that could alert: the guards page from the host, and go on."""
    row("Airflow killed, and production ends at each start", "extracting")
    run = held_in_mid_shard(stand)
    stand.kill_all_of_airflow()
    stand.hold("production-die", "1000")
    until(lambda: "PRODUCTION MAY BE DOWN" in stand.pages(), stand.story)
    assert run.id in stand.pages()
    stand.free()  # whatever was wrong with it is mended
    stand.settled()
    until(lambda: "production is back" in stand.pages(), stand.story)
    after(stand, run)
    row(
        end=f"the guards page by alerts.host_command and go on; mended, {END}; Airflow back, the run ends green",
        log='journal: "somebody was paged"',
    )
