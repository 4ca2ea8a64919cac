"""Servers that hang, die or don't come back, and steps that meet each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fault_host import SAMPLES, MakeHost, Row, until
from fault_stages import ACQUIRE, AT, EXTRACT, EXTRACTION, PRODUCTION, give_back

from hsx_host import lease

SHORT_TTL_S = 6.0
END = "production as it was, lease free, nothing left"


@pytest.mark.parametrize("how", ["start", "die"], ids=["hangs", "dies"])
def test_the_extraction_server_does_not_start(make_host: MakeHost, row: Row, how: str) -> None:
    row(f"extraction server {'hangs' if how == 'start' else 'dies'} in start", "extraction starting")
    host = make_host(start_timeout_s=5.0)
    host.hold(f"extraction-{how}", "1")
    host.ok(*ACQUIRE)
    said = host.run(*EXTRACTION)
    assert (said.rc, said.document["kind"]) == (75, "again"), said
    assert host.mode() == "none", "what failed to start is stopped"
    host.free()
    assert host.run(*EXTRACTION).rc == 0
    give_back(host)
    host.settled()
    row(
        end=f"stopped at the deadline, the next try starts it; {END}",
        log=f"exit 75: {said.document['message'].splitlines()[0][:70]}",
    )


def test_the_extraction_server_dies_at_the_100th_request(make_host: MakeHost, row: Row) -> None:
    row("extraction server dies at the 100th request", "extracting")
    host = make_host()
    host.ok("plan")
    host.hold("die-at", "100")
    host.ok(*ACQUIRE)
    assert host.run(*EXTRACTION).rc == 0
    said = host.run(*EXTRACT)
    assert (said.rc, said.document["kind"]) == (75, "again"), said
    before = host.published()
    assert 90 <= before < 100
    host.free()
    again = host.run(*EXTRACT)
    assert again.rc == 0, again
    assert again.document["extracted"] == SAMPLES - before
    give_back(host)
    host.settled()
    row(
        end=f"nothing published is lost, the next try does the rest; {END}",
        log="exit 75: the extraction server is gone ... samples of shard 00000 are left",
    )


@pytest.mark.parametrize("how", ["die", "start"], ids=["dies", "hangs"])
@pytest.mark.parametrize("who", ["teardown", "guard"])
def test_production_does_not_come_back_at_the_first_try(make_host: MakeHost, row: Row, how: str, who: str) -> None:
    row(f"production {'ends' if how == 'die' else 'hangs'} at its first start", f"production starting, by the {who}")
    host = make_host(ttl_s=SHORT_TTL_S if who == "guard" else 60.0, start_timeout_s=5.0)
    with host.polled():
        AT["extraction up"].bring(host)
        host.hold(f"production-{how}", "1")
        job = host.start("restore") if who == "teardown" else ""
        if job:
            until(lambda: host.told("production did not come back", attempt=1), host.story)
            host.free()
            assert host.end_of(job).rc == 0
    if who == "guard":
        until(lambda: host.told("production did not come back", attempt=1), host.story)
        host.free()
    host.settled()
    row(end=f"started again until it is back; {END}", log='journal: "production did not come back", attempt 1')


def test_production_comes_back_at_the_fourth_start(make_host: MakeHost, row: Row) -> None:
    row("production ends at its first three starts", "production starting, by the teardown")
    host = make_host()
    AT["extraction up"].bring(host)
    host.hold("production-die", "3")
    said = host.run("restore")
    assert (said.rc, said.document["kind"]) == (75, "again"), said
    assert lease.read(host.spec) is not None, "the lease is kept: the guards go on where no try is left"
    give_back(host)
    host.settled()
    row(end=f"restore's next try brings it back; {END}", log="exit 75 with the end of the server's log")


def test_production_does_not_come_back_and_airflow_is_gone(make_host: MakeHost, row: Row, tmp_path: Path) -> None:
    """Nobody is left but the guards: they go on, and wake somebody by the profile's command, once."""
    row("production ends at each start, Airflow gone for good", "production starting, by the guard")
    host, pages = make_host(ttl_s=SHORT_TTL_S), tmp_path / "pages.txt"
    host.pages_to(pages)
    AT["extraction up"].bring(host)
    host.hold("production-die", "1000")
    until(lambda: len([e for e in host.journal() if "guard: production is not back" in e["event"]]) >= 2, host.story)
    (page,) = pages.read_text().splitlines()
    assert "PRODUCTION MAY BE DOWN" in page
    host.free()
    host.settled()
    until(lambda: len(pages.read_text().splitlines()) == 2, host.story)
    assert "production is back" in pages.read_text()
    row(
        end=f"the guards go on and page by alerts.host_command, once; mended, {END}",
        log='journal: "somebody was paged", "guard: production is not back yet"',
    )


def test_the_ssh_session_is_gone(make_host: MakeHost, row: Row) -> None:
    """All processes of the session that started guard and job are killed with it; those two live on."""
    row("SSH session killed", "acquire and extracting")
    host = make_host()
    host.ok("plan")
    host.in_a_session_that_dies("acquire", after=lambda: len(host.guards()) > 0)
    guards = host.guards()
    assert guards
    assert host.run(*EXTRACTION).rc == 0
    host.hold("capture-40")
    job = ("job", "start", "extract-s", "--", *EXTRACT)
    host.in_a_session_that_dies(*job, after=lambda: host.published() >= 30)
    host.free()
    assert host.end_of("extract-s").rc == 0
    assert guards <= host.guards()
    assert host.published() == SAMPLES
    give_back(host)
    host.settled()
    row(end=f"guard and job live on; {END}", log="nothing: the next poll goes on")


def test_two_runs_at_once(make_host: MakeHost, row: Row) -> None:
    row("two runs at once", "acquire")
    host = make_host()
    other = host.another("run-2")
    racing = [host.popen("acquire"), host.popen("acquire", spec=other)]
    ends = {p: json.loads(p.communicate()[0]) for p in racing}
    assert sorted(p.returncode for p in racing) == [0, 75], ends
    winner = next(p for p in racing if p.returncode == 0)
    loser = next(d for p, d in ends.items() if p.returncode == 75)
    assert f"held by run {ends[winner]['run_id']}" in loser["message"]
    mine = host.spec_path if ends[winner]["run_id"] == "run-1" else other
    theirs = other if mine == host.spec_path else host.spec_path
    assert host.verb(*EXTRACTION, spec=theirs).rc == 75
    host.ok("release", spec=mine)
    host.ok("acquire", spec=theirs)
    host.ok(*PRODUCTION, spec=theirs)
    host.ok("release", spec=theirs)
    host.settled()
    row(end=f"one gets it, the other is told who holds it; {END}", log="exit 75: the host is held by run X until T")


def test_two_jobs_of_one_shard_at_once(make_host: MakeHost, row: Row) -> None:
    row("a second copy of a shard's job", "extracting")
    host = make_host()
    job = AT["extracting"].bring(host)
    said = host.run(*EXTRACT)
    assert (said.rc, said.document["kind"]) == (75, "again"), said
    again = host.ok("job", "start", job, "--", *EXTRACT).document
    assert again["pid"] == host.runner(job)
    host.free()
    assert host.end_of(job).rc == 0
    assert host.published() == SAMPLES
    give_back(host)
    host.settled()
    row(
        end=f"the same id finds the first, another id waits its turn; {END}",
        log="exit 75: another process is busy with shard 00000",
    )


def test_the_acquire_is_killed_in_the_middle(make_host: MakeHost, row: Row) -> None:
    """Its guard is there and the lease is not yet written: the guard ends by itself, and the next try has the host."""
    row("acquire killed before the lease is written", "acquire")
    host = make_host()
    host.killed_before_it_writes("lease.json", *ACQUIRE, after=host.guards)
    until(lambda: not host.guards(), host.story)
    assert lease.read(host.spec) is None
    host.ok(*ACQUIRE)
    assert host.guards()
    give_back(host)
    host.settled()
    row(end=f"the next try has the host; {END}", log="guard.log: nothing to guard")
