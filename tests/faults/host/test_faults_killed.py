"""Whatever is killed at whatever stage: production comes back as it was, and nothing of ours is left."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import pytest
from fault_host import SAMPLES, FaultHost, MakeHost, Row, until
from fault_stages import EXTRACT, EXTRACTION, STAGES, Stage, give_back, next_run

SHORT_TTL_S = 6.0
BUSY = [s for s in STAGES if s.verb]
SERVED = [s for s in STAGES if s.name != "production stopped"]
END = "production as it was, lease free, nothing left"


def of(stages: list[Stage], *quick: str) -> list[object]:
    """The stages as parameters; those named are in ``make test`` too."""
    return [pytest.param(s, id=s.name.replace(" ", "-"), marks=[pytest.mark.quick] if s.name in quick else [])
            for s in stages]  # fmt: skip


def kill_job(host: FaultHost, job: str) -> None:
    """The verb and its runner, as the out-of-memory killer ends a session."""
    with suppress(ProcessLookupError):
        os.killpg(host.runner(job), signal.SIGKILL)


def kill_server(host: FaultHost) -> None:
    """The main process; its child is reparented and lives on."""
    server = host.server()
    if server is not None and server.phase != "stopped":
        host.kill(server.pid)
    elif host.owner is not None and host.owner.poll() is None:
        host.kill(host.owner.pid)
    if host.owner is not None and (server is None or server.pid == host.owner.pid):
        host.owner.wait()


@pytest.mark.parametrize("stage", of(BUSY, "extracting"))
def test_the_verb_is_killed(make_host: MakeHost, row: Row, stage: Stage) -> None:
    """The job's processes die; the task's next try does the same verb again, and the run goes on."""
    row("host program killed (verb and runner)", stage.name)
    host = make_host()
    job = stage.bring(host)
    kill_job(host, job)
    host.free()
    assert host.end_of(job).rc == -1, "a killed job must be told from one that ended"
    again = host.run(*stage.verb)
    assert again.rc == 0, again
    if stage.verb == EXTRACT:
        assert host.published() == SAMPLES
    give_back(host)
    host.settled()
    row(end=f"the next try does the rest; {END}", log='poll: "dead"; the task: "gone without an exit code"')


@pytest.mark.parametrize("stage", of(SERVED, "extraction starting"))
def test_the_server_is_killed(make_host: MakeHost, row: Row, stage: Stage) -> None:
    """kill -9 of the server's main process; its child is reparented and must go too."""
    row("server killed (main process; its child lives on)", stage.name)
    host = make_host()
    job = stage.bring(host)
    kill_server(host)
    host.free()
    if job:
        said = host.end_of(job)
        if said.rc:
            assert (said.rc, said.document["kind"]) == (75, "again"), said
            assert host.run(*stage.verb).rc == 0
        if stage.verb == EXTRACT:
            assert host.published() == SAMPLES
    elif stage.name == "extraction up":
        assert host.run(*EXTRACTION).rc == 0
    give_back(host)
    host.settled()
    row(end=f"the next step starts it anew; {END}", log='journal: "server found dead", or the verb: exit 75')


@pytest.mark.parametrize("stage", of(STAGES, "extracting"))
def test_airflow_is_gone(make_host: MakeHost, row: Row, stage: Stage) -> None:
    """Nobody polls any more: the lease lapses, and the guard gives the host back by itself."""
    row("Airflow gone for good", stage.name)
    host = make_host(ttl_s=SHORT_TTL_S)
    with host.polled():
        stage.bring(host)
    if stage.verb != EXTRACT:  # the shard stays in the middle: the guard ends its server
        host.free()
    host.settled()
    assert host.told("lease lapsed: the guard gives the host back")
    row(
        end=f"the guard restores within the lease time; {END}",
        log='journal: "lease lapsed: the guard gives the host back"',
    )


@pytest.mark.parametrize("stage", of(STAGES))
def test_the_guards_are_killed_and_then_airflow_is_gone(make_host: MakeHost, row: Row, stage: Stage) -> None:
    """kill -9 of both guards: the run's next poll starts others, which restore when Airflow is gone too."""
    row("guards killed, later Airflow gone for good", stage.name)
    host = make_host(ttl_s=SHORT_TTL_S)
    with host.polled():
        stage.bring(host)
        host.kill_guards()
        host.ok("heartbeat")
        until(lambda: len(host.guards()) == 2, host.story)
    if stage.verb != EXTRACT:
        host.free()
    host.settled()
    assert host.told("lease lapsed: the guard gives the host back")
    row(
        end=f"the next poll starts other guards, which restore; {END}",
        log='journal: "lease lapsed: the guard gives the host back"',
    )


@pytest.mark.parametrize("stage", of(STAGES, "extraction up"))
def test_all_is_killed_and_another_run_wants_the_host(make_host: MakeHost, row: Row, stage: Stage) -> None:
    """Verb, guards and server at once, and Airflow never comes back: the next run's acquire sees to it."""
    row("verb, guards and server killed, Airflow gone", stage.name)
    host = make_host(ttl_s=SHORT_TTL_S)
    with host.polled():
        job = stage.bring(host)
        if job:
            kill_job(host, job)
        kill_server(host)
        host.kill_guards()
    host.free()
    next_run(host)
    host.settled()
    row(
        end=f"the next acquire waits until production is back; {END}",
        log="acquire, exit 75: production is being brought back after run ...",
    )


@pytest.mark.parametrize("stage", of([s for s in STAGES if not s.verb]))
@pytest.mark.parametrize("when", ["before", "after"])
def test_nobody_is_left_but_the_timer(make_host: MakeHost, row: Row, stage: Stage, when: str) -> None:
    """Both guards killed, Airflow gone, no job at work: the unit of docs/operations.md sees to it, whether it strikes
    before the lease has lapsed (it starts guards) or after."""
    row("guards killed, Airflow gone, no job at work", f"{stage.name}; the timer strikes {when} the lease has lapsed")
    host = make_host(ttl_s=SHORT_TTL_S if when == "after" else 20.0)
    with host.polled():
        stage.bring(host)
    host.kill_guards()
    if when == "after":
        until(host.lapsed, host.story)
        assert not host.guards()
        assert host.mode() == stage_mode(stage), "nobody is there who could give it back"
    said = host.by_the_timer()
    assert (said.rc, said.document["action"]) == (0, "guarded" if when == "before" else "restored"), said
    host.settled()
    row(
        end=f"recover, run by the unit, {'starts guards, which restore' if when == 'before' else 'restores'}; {END}",
        log='status: "no guard of the lease lives: recover starts them"',
    )


def stage_mode(stage: Stage) -> str:
    """What ``mode`` says of a stage between two steps."""
    return {"extraction up": "extraction running", "production stopped": "none"}.get(stage.name, "production running")


@pytest.mark.parametrize("stage", of(STAGES, "production starting"))
def test_the_host_is_booted_anew(make_host: MakeHost, row: Row, stage: Stage) -> None:
    """A power cut: no process lives, and what stands on the disk is of another boot."""
    row("reboot (other boot id, dead pids)", stage.name)
    host = make_host()
    stage.bring(host)
    host.kill_everything()
    host.other_boot()
    host.free()
    said = host.ok("recover")
    assert said.document["action"] == "restored"
    host.settled()
    row(end=f"recover restores at once; {END}", log='journal: "the host was booted since"')
