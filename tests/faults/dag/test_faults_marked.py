"""What a person does to a run that is at work: mark and clear. The run's colour is right, the host is given back."""

from __future__ import annotations

from fault_dag import SAMPLES, DagRun, Row, Stand, until

from hsx_demo.stack import DAG_ID

LEASE_S = 600  # so that it is never the guard that gives the host back here
END = "production as it was, lease free, nothing left"


def job_ended(run: DagRun, pid: int) -> None:
    """The remote job of a task that was marked is ended by the trigger's on_kill."""
    from hsx_demo import processes
    from hsx_demo.processes import Child

    job = run.job()
    until(lambda: not processes.alive(Child("job", pid, job["start"], "")), run.story)


def held_in_mid_shard(stand: Stand) -> DagRun:
    stand.hold("capture-20")
    run = stand.trigger()
    run.in_mid_shard()
    return run


def test_task_marked_failed_and_then_the_whole_run_cleared(stand: Stand, row: Row) -> None:
    row("task marked failed", "extracting")
    run = held_in_mid_shard(stand)
    run.mark("extract", "failed", 0)
    job_ended(run, run.job()["pid"])
    stand.free()
    assert run.end() == "failed", run.story()
    states = run.states()
    assert (states["extract.0"], states["restore"], states["verdict"]) == ("failed", "success", "failed"), run.story()
    assert "Failed: extract_0" in run.log("verdict")
    stand.settled()
    row(end=f"remote job ended by on_kill, run red; {END}", log='verdict: "Failed: extract_0"')


def test_one_shard_cleared_only_failed(stand: Stand, row: Row) -> None:
    """The failed shard alone: setups and restore are not run again, so it borrows the host and gives it back itself."""
    row("one shard cleared, only failed", "after the run")
    run = held_in_mid_shard(stand)
    run.mark("extract", "failed", 0)
    stand.free()
    assert run.end() == "failed", run.story()
    restored = run.tasks()["restore"].try_number
    run.clear("extract", 0, only_failed=True)
    assert run.end() == "success", run.story()
    assert run.manifest() == SAMPLES
    assert run.tasks()["extract.0"].try_number == 2, "the job that was ended with the task counted for a try"
    assert run.tasks()["restore"].try_number == restored
    stand.settled()
    row(end=f"it borrows the host itself, run green; {END}", log="the shard: this step borrows the host itself")


def test_one_shard_cleared_with_its_setups(stand: Stand, row: Row) -> None:
    row("one shard cleared, not only failed", "after the run")
    run = held_in_mid_shard(stand)
    run.mark("extract", "failed", 0)
    stand.free()
    assert run.end() == "failed", run.story()
    restored = run.tasks()["restore"].try_number
    run.clear("extract", 0, only_failed=False)
    assert run.end() == "success", run.story()
    assert run.manifest() == SAMPLES
    assert run.tasks()["extract.0"].try_number == 2
    assert run.tasks()["restore"].try_number > restored
    stand.settled()
    row(end=f"setups and restore run again around it, run green; {END}", log="restore: production is up")


def test_task_marked_success_is_not_green(stand: Stand, row: Row) -> None:
    """A shard that a person calls done is not: verify finds what is missing."""
    row("task marked success", "extracting")
    run = held_in_mid_shard(stand)
    run.mark("extract", "success", 0)
    job_ended(run, run.job()["pid"])
    stand.free()
    assert run.end() == "failed", run.story()
    states = run.states()
    assert (states["verify"], states["restore"], states["verdict"]) == ("failed", "success", "failed"), run.story()
    stand.settled()
    row(end=f"remote job ended, verify finds what is missing, run red; {END}", log='verdict: "Failed: verify"')


def test_run_marked_failed_and_then_cleared_whole(stand: Stand, row: Row) -> None:
    row("run marked failed, then cleared whole", "extracting")
    run = held_in_mid_shard(stand)
    pid = run.job()["pid"]
    stand.client.set_run_state(DAG_ID, run.id, "failed")
    job_ended(run, pid)
    stand.free()
    until(lambda: run.states()["verdict"] in ("failed", "success"), run.story, 600)
    assert run.end() == "failed", run.story()
    assert run.states()["restore"] == "success", run.story()
    stand.settled()
    stand.client.post(f"dags/{DAG_ID}/dagRuns/{run.id}/clear", {"dry_run": False, "only_failed": False})
    assert run.end() == "success", run.story()
    assert run.manifest() == SAMPLES
    stand.settled()
    row(end=f"restore runs, run red; cleared, it does the rest and is green; {END}", log='verdict: "Failed: ..."')


def test_production_does_not_come_back_at_the_first_try(stand: Stand, row: Row) -> None:
    """The host program starts it three times; then the task's next try does."""
    row("production ends at its first three starts", "restore (teardown)")
    run = held_in_mid_shard(stand)
    stand.hold("production-die", "3")
    (stand.control / "capture-20").unlink()
    assert run.end() == "success", run.story()
    assert run.tasks()["restore"].try_number == 2, run.story()
    (alert,) = stand.alerts()
    assert "is tried again" in alert
    assert run.id in alert
    stand.free()
    stand.settled()
    row(
        end=f"alert by callback, restore's next try brings it back, run green; {END}",
        log="restore, try 1: the end of the server's log",
    )


def test_production_does_not_come_back_at_all(stand: Stand, row: Row) -> None:
    """Every try of restore fails: somebody is woken, and the guards go on where the run has ended."""
    row("production ends at each start", "restore (teardown)")
    before = len(stand.alerts())
    run = held_in_mid_shard(stand)
    stand.hold("production-die", "1000")
    (stand.control / "capture-20").unlink()
    assert run.end() == "failed", run.story()
    states = run.states()
    assert (states["restore"], states["verdict"]) == ("failed", "failed"), run.story()
    told = stand.alerts()[before:]
    assert ["is tried again" in told[0], "has no try left" in told[-1]] == [True, True], told
    assert all("PRODUCTION MAY BE DOWN" in text and run.id in text for text in told)
    stand.free()  # whatever was wrong with it is mended
    stand.give_back_by_hand()
    stand.settled()
    row(
        end=f"alert by callback at the first and the last try, run red; mended, restore --now by hand: {END}",
        log="restore: PRODUCTION MAY BE DOWN ...",
    )
