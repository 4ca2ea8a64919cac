"""The lease: one holder, re-entrant, taken over once it lapsed."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from host_lifecycle import events, living_guards, verb, wait_for, write_spec

from hsx_host import borrow, guard, lease, procid, release, serve, state
from hsx_host import contract as c
from hsx_host.errors import BadInput, Refused, TryAgain


def test_one_run_holds_it(spec: c.RunSpec) -> None:
    mine = lease.acquire(spec)
    assert lease.acquire(spec).since == mine.since
    with pytest.raises(TryAgain, match="held by run run-1 until"):
        lease.acquire(replace(spec, run_id="run-2"))
    assert lease.renew(replace(spec, run_id="run-2")) is None
    assert lease.release(replace(spec, run_id="run-2")) is None
    assert lease.read(spec) is not None
    assert lease.release(spec) is not None
    assert lease.read(spec) is None
    assert lease.acquire(replace(spec, run_id="run-2")).run_id == "run-2"


def test_a_lapsed_lease_is_taken_over_and_the_journal_says_so(spec: c.RunSpec) -> None:
    lease.acquire(replace(spec, lease_ttl_s=0.0))
    taken = lease.acquire(replace(spec, run_id="run-2"))
    assert taken.run_id == "run-2"
    assert taken.boot_id == procid.boot_id()
    assert "lapsed lease taken over" in events(spec)
    assert lease.renew(spec) is None


def test_a_lapsed_lease_of_the_same_run_is_a_new_grant(spec: c.RunSpec) -> None:
    first = lease.acquire(replace(spec, lease_ttl_s=0.0))
    second = lease.acquire(spec)
    assert not lease.same_grant(second, first)
    assert lease.release(spec, first) is None
    assert lease.read(spec) == second


def test_another_machines_home_is_refused_before_anything_is_done(
    spec: c.RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home on NFS: to the second machine, the first one's lease looks like one from before a boot."""
    machine = tmp_path / "machine-id"
    monkeypatch.setattr(state, "_MACHINE_ID", machine)
    machine.write_text("a" * 32 + "\n")
    mine = lease.acquire(spec)
    machine.write_text("b" * 32 + "\n")
    other = replace(spec, run_id="run-2")
    for act in (lease.acquire, borrow.give_back, lease.release, lease.take_back):
        with pytest.raises(BadInput, match="two machines can't share one") as told:
            act(other)
        assert told.value.doc.field == "host.home"
        assert os.uname().nodename in told.value.doc.fix
    assert lease.read(spec) == mine
    machine.unlink()  # a machine that has no id is not told apart
    assert lease.acquire(spec).since == mine.since
    machine.write_text("a" * 32 + "\n")
    assert lease.release(spec) is not None


def test_two_runs_at_once(spec: c.RunSpec, tmp_path: Path) -> None:
    paths = [write_spec(replace(spec, run_id=f"run-{i}"), tmp_path, f"{i}.json") for i in range(4)]
    racing = [
        subprocess.Popen([sys.executable, "-m", "hsx_host", "acquire", "--spec", p], stdout=subprocess.PIPE, text=True)
        for p in paths
    ]
    answers = [p.communicate()[0] for p in racing]
    assert sorted(p.returncode for p in racing) == [0, 75, 75, 75]
    winner = lease.read(spec)
    assert winner is not None
    for process, answer in zip(racing, answers, strict=True):
        assert process.returncode == 0 or winner.run_id in c.decode(c.ErrorDoc, answer).message


def test_verbs(spec: c.RunSpec, tmp_path: Path) -> None:
    path = write_spec(spec, tmp_path)
    assert verb("heartbeat", "--spec", path, check=75)["field"] == "lease"
    first = verb("acquire", "--spec", path)
    guards = wait_for(lambda: (g := living_guards(spec)) and len(g) == 2 and g)
    verb("acquire", "--spec", path)
    assert living_guards(spec) == guards  # two a grant
    assert verb("heartbeat", "--spec", path)["expires"] > first["expires"]
    other = write_spec(replace(spec, run_id="run-2"), tmp_path, "other.json")
    assert "run-1" in verb("acquire", "--spec", other, check=75)["message"]
    assert "run-1" in verb("heartbeat", "--spec", other, check=75)["message"]
    assert verb("status", "--spec", path)["lease"]["run_id"] == "run-1"
    assert verb("release", "--spec", path)["run_id"] == "run-1"
    assert verb("release", "--spec", path)["expires"] == 0.0
    assert verb("status", "--spec", path)["lease"] is None
    wait_for(lambda: not any(procid.alive(g) for g in guards))  # they end after a release


def test_a_guard_outlives_a_disk_that_is_full(spec: c.RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever giving back raises, the guard tries again: nobody else would."""
    granted = lease.acquire(replace(spec, lease_ttl_s=0.01))
    tries = []

    def give_back(spec: c.RunSpec, grant: c.Lease) -> c.ServerFacts:
        tries.append(1)
        if len(tries) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return c.ServerFacts("production", True, 1, 1, "", 0.0, "", "")

    monkeypatch.setattr(guard.borrow, "give_back", give_back)
    monkeypatch.setattr(guard, "_RETRY_S", 0.01)
    wait_for(lambda: lease.lapsed(granted))
    assert guard.run(spec, Namespace(since=granted.since)).mode == "production"
    assert len(tries) == 3


def test_a_lease_is_not_released_while_production_is_stopped(spec: c.RunSpec) -> None:
    lease.acquire(spec)
    serve.ensure(spec, "stopped")
    serve.ensure(spec, "production")
    serve.ensure(spec, "stopped")
    with pytest.raises(Refused, match="production is not up"):
        release.run(spec, Namespace(abandon=False))
    assert release.run(spec, Namespace(abandon=True)).run_id == "run-1"
    assert lease.read(spec) is None


@pytest.mark.parametrize("long", [1, 500, 5000, 100_000])
def test_the_tail_of_the_journal_is_whole_lines(spec: c.RunSpec, long: int) -> None:
    for event in ("one", "two", "three"):
        state.journal(spec, event, command=["x" * long])
    file = state.home(spec) / "state" / "journal.jsonl"
    with file.open("ab") as f:
        f.write(b'{"time": 1, "run_id": "x", "pid"')  # a power cut
    state.journal(spec, "four")
    told = state.journal_tail(spec, 4)
    assert [json.loads(line)["event"] for line in told if line.endswith("}")] == ["two", "three", "four"]
    for lines in range(1, 8):
        assert state.journal_tail(spec, lines) == file.read_text().splitlines()[-lines:]
    assert state.journal_tail(spec, 0) == []
