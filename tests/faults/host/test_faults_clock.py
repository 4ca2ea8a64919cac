"""Somebody sets the clock: a lease neither lapses for it nor lives on for it."""

from __future__ import annotations

import pytest
from fault_host import MakeHost, Row
from fault_stages import AT, EXTRACT, EXTRACTION, STOP, Verb, give_back

END = "production as it was, lease free, nothing left"
NEXT: dict[str, Verb] = {
    "lease held": STOP,
    "production stopped": EXTRACTION,
    "extraction up": EXTRACTION,
    "extracting": (),
}


@pytest.mark.parametrize("stage", [pytest.param(s, id=s.replace(" ", "-")) for s in NEXT])
def test_forward_by_a_day(make_host: MakeHost, row: Row, stage: str) -> None:
    row("clock set forward by a day", stage)
    host = make_host()
    job = AT[stage].bring(host)
    guards = host.guards()
    host.clock.write_text("86400")
    host.ok("heartbeat")
    host.free()
    if job:
        assert host.end_of(job).rc == 0
    else:
        said = host.run(*NEXT[stage])
        assert said.rc == 0, said
    assert guards <= host.guards()
    give_back(host)
    host.settled()
    assert not host.told("lease lapsed")
    row(end=f"the run goes on; {END}", log="nothing")


@pytest.mark.parametrize("stage", [pytest.param(s, id=s.replace(" ", "-")) for s in NEXT])
def test_back_by_a_day_and_airflow_gone(make_host: MakeHost, row: Row, stage: str) -> None:
    row("clock set back by a day, Airflow gone for good", stage)
    host = make_host(ttl_s=10.0)
    with host.polled():
        AT[stage].bring(host)
    host.clock.write_text("-86400")
    if AT[stage].verb != EXTRACT:
        host.free()
    host.settled()
    assert host.told("lease lapsed: the guard gives the host back")
    row(
        end=f"the guard restores within the lease time all the same; {END}",
        log='journal: "lease lapsed: the guard gives the host back"',
    )
