"""Parts of Airflow, and the way to the host, die and come back while one run is at work: it goes on where it was.

The tests are one story of one run whose shard is held in the middle, in this order.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from fault_dag import SAMPLES, DagRun, Row, Stand, until

from hsx_demo.components import COMPONENTS
from hsx_demo.stack import DAG_ID

LEASE_S = 900
OUTAGE_S = 180.0


@pytest.fixture(scope="module")
def run(stand: Stand) -> DagRun:
    """A run that stands in the middle of its shard until the last tests let it go."""
    return in_mid_shard(stand)


@pytest.fixture(scope="module")
def job(run: DagRun) -> int:
    """The one remote job of the shard."""
    return int(run.job()["pid"])


def in_mid_shard(stand: Stand) -> DagRun:
    stand.hold("capture-20")
    run = stand.trigger()
    run.in_mid_shard()
    assert stand.told_in_commands() == []
    return run


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text, f"{file} has no {old}"
    file.write_text(text.replace(old, new))


def goes_on(stand: Stand, run: DagRun, job: int, since: float) -> None:
    """The same remote job, the same task's try, and polls that have renewed the lease since."""
    until(lambda: stand.renewed() > since, run.story, 300)
    assert run.state() == "running", run.story()
    assert run.job()["pid"] == job
    assert run.tasks()["extract.0"].try_number == 1, run.story()


def test_the_dag_and_the_profile_are_changed(stand: Stand, run: DagRun, job: int, row: Row) -> None:
    """The plan is frozen: what runs goes on as it began."""
    row("DAG file and profile changed in mid-run", "extracting")
    change(stand.profiles / "faults.yaml", "layers: [1, 4]", "layers: [2, 5]")
    change(stand.dags / "hsx_extraction.py", '"hidden-states", ', '"hidden-states", "changed", ')
    tags = lambda: [t["name"] for t in stand.client.get(f"dags/{DAG_ID}")["tags"]]  # noqa: E731
    until(lambda: "changed" in tags(), "the DAG file is read again")
    goes_on(stand, run, job, time.time())
    row(end="the run goes on with the plan that it was started with", log="handoff: layers as planned")


def test_the_triggerer_is_killed(stand: Stand, run: DagRun, job: int, row: Row) -> None:
    row("triggerer killed and started again", "extracting")
    stand.kill("triggerer")
    stand.start_again("triggerer")
    goes_on(stand, run, job, time.time())
    row(end="the same remote job is watched on, its log goes on where it was", log="extract: no line twice")


def test_the_scheduler_is_killed(stand: Stand, run: DagRun, job: int, row: Row) -> None:
    row("scheduler killed and started again", "extracting")
    stand.kill("scheduler")
    stand.start_again("scheduler")
    goes_on(stand, run, job, time.time())
    row(end="the run goes on", log="nothing")


def test_the_ssh_server_is_down_for_three_minutes(stand: Stand, run: DagRun, job: int, row: Row) -> None:
    row("SSH server down for 3 minutes and back", "extracting")
    stand.door_closed()
    closed = time.time()
    until(lambda: time.time() - closed > OUTAGE_S, "the outage", OUTAGE_S + 60)
    assert run.state() == "running", run.story()
    stand.door_open()
    goes_on(stand, run, job, time.time())
    assert "no answer over SSH" in run.log("extract.0")
    row(end="waited out, the same remote job is watched on", log="extract: no answer over SSH ...: trying again")


def test_a_second_run_waits(stand: Stand, run: DagRun, job: int, row: Row) -> None:
    """Two runs at once: the second is queued until the first has ended, and goes by the profile as it is then."""
    row("two runs at once", "extracting")
    second = stand.trigger(dataset=run.conf["dataset"])
    goes_on(stand, run, job, time.time())
    assert second.state() == "queued"
    stand.free()
    assert run.end() == "success", run.story()
    assert run.manifest() == SAMPLES
    stand.settled()
    assert second.end() == "success", second.story()
    assert stand.client.xcom(DAG_ID, second.id, "handoff")["layers"] == [2, 5]  # the profile as it is now
    stand.settled()
    row(end="the second is queued until the first has ended, both green; production as it was", log="nothing")


def test_how_the_run_ended(stand: Stand, run: DagRun, row: Row) -> None:
    """After all of that: the planned layers, each log line once, one try of the shard."""
    row("all of the above, one after the other", "the end of the run")
    handoff = stand.client.xcom(DAG_ID, run.id, "handoff")
    assert handoff["layers"] == [1, 4], handoff
    shown = Counter(
        line[line.index("extract: ") :] for line in run.log("extract.0").splitlines() if "extract: " in line
    )
    assert shown
    assert not shown - run.told_by_the_job(), "lines were shown twice"
    assert run.tasks()["extract.0"].try_number == 1
    row(end="run green, planned layers, one try of the shard; production as it was", log="extract: no line twice")


def test_the_worker_is_killed(stand: Stand, row: Row) -> None:
    """Worker and task die while the shard is submitted: the next try finds the remote job."""
    row("worker killed", "extract, before it is deferred")
    stand.hold("capture-20")
    run = stand.trigger()
    until(lambda: run.manifest() >= 5 or run.state() not in ("queued", "running"), run.story, 900)
    assert run.states()["extract.0"] == "running", run.story()  # eight seconds, in which the worker watches
    for pid in stand.worker_of_a_task():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job = run.job()["pid"]
    until(lambda: run.tasks()["extract.0"].try_number == 2, run.story, 600)
    run.in_mid_shard()
    assert run.job()["pid"] == job, "a second copy of the job was started"
    stand.free()
    assert run.end() == "success", run.story()
    assert "found the job" in run.log("extract.0")
    assert run.manifest() == SAMPLES
    stand.settled()
    row(
        end="the next try finds the same remote job, run green; production as it was",
        log="extract, try 2: found the job",
    )


def test_a_nightly_run_while_a_manual_one_holds_the_host(stand: Stand, row: Row) -> None:
    """The night has a DAG of its own: the pool keeps it back while a task of the manual run waits, then the lease."""
    row("nightly run while a manual one holds the host", "extracting")
    run = in_mid_shard(stand)
    job = run.job()["pid"]
    night = stand.a_night_soon()
    goes_on(stand, run, job, time.time())
    assert night.state() in ("queued", "running")
    stand.free()
    assert run.end() == "success", run.story()
    night.past_the_wait_for_the_host()
    assert night.end() == "success", night.story()
    stand.settled()
    row(end="it waits until the host is free, both green; production as it was", log="acquire: held by run manual__...")


def test_another_airflow_holds_the_host(stand: Stand, row: Row) -> None:
    """The lease holds against runs that this Airflow knows nothing of: acquire tells the holder and tries again."""
    row("another Airflow's run holds the host", "acquire")
    give_up = stand.acquired_from_a_shell("someone-else")
    run = stand.trigger()
    until(lambda: run.states().get("acquire") == "up_for_retry", run.story, 600)
    assert "held by run someone-else" in run.log("acquire")
    assert stand.stack.production_healthy()
    give_up()
    run.clear("acquire", only_failed=False)
    assert run.end() == "success", run.story()
    stand.settled()
    row(end="waits, tells who holds it, goes on once it is free; production as it was", log="acquire: held by run ...")


def test_airflow_comes_back_within_the_lease(stand: Stand, row: Row) -> None:
    row("Airflow killed, back before the lease lapses", "extracting")
    run = in_mid_shard(stand)
    job = run.job()["pid"]
    stand.kill_all_of_airflow()
    stand.start_again(*COMPONENTS)
    stand.free()
    assert run.end() == "success", run.story()
    assert run.manifest() == SAMPLES
    stand.settled()
    assert run.job()["pid"] == job
    row(end="the run goes on with the same remote job, green; production as it was", log="nothing")


def test_no_secret_was_told(stand: Stand) -> None:
    """After all of these runs: none in Airflow's database (XComs, rendered fields, task states, triggers), logs, data
    sets, or a file of the host that is not private."""
    assert (stand.work / "s" / "airflow" / "airflow.db").stat().st_size > 0
    assert stand.told_in_files() == []
    assert stand.told_in_commands() == []
