"""Guards, the lease's clock, reboots and hosts that nobody holds."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from host_lifecycle import (
    events,
    is_given_back,
    kill,
    listens,
    living_guards,
    two_guards,
    verb,
    wait_for,
    write_spec,
)

from hsx_host import borrow, guard, guards, launch, lease, procid, serve, state
from hsx_host import contract as c
from hsx_host.errors import TryAgain


def reboot(spec: c.RunSpec) -> None:
    """As after a reboot: every process of ours is dead, and the documents are of another boot."""
    kill(*living_guards(spec))
    server = state.read_server(spec)
    if server is not None:
        kill(*(procid.ProcId(*pair) for pair in server.tree))
        state.write_server(spec, replace(server, boot_id="of-before"))
    for name in ("lease.json", "guard.json"):
        path = state.home(spec) / "state" / name
        if path.exists():
            path.write_text(json.dumps(json.loads(path.read_text()) | {"boot_id": "of-before"}))


def test_each_guard_starts_the_other_again(spec: c.RunSpec) -> None:
    borrow.acquire(spec, by_step=False)
    first = two_guards(spec)
    kill(first[0])
    second = wait_for(lambda: (g := living_guards(spec)) and len(g) == 2 and first[0] not in g and g)
    assert first[1] in second


def test_a_poll_starts_guards_that_are_gone(spec: c.RunSpec, tmp_path: Path) -> None:
    borrow.acquire(spec, by_step=False)
    kill(*two_guards(spec))
    path = write_spec(spec, tmp_path)
    verb("job", "poll", "none", "--offset", "0", "--spec", path)
    assert living_guards(spec)
    kill(*two_guards(spec))
    before = lease.read(spec)
    verb("status", "--renew", "--spec", path)
    assert living_guards(spec)
    after = lease.read(spec)
    assert before is not None
    assert after is not None
    assert after.until > before.until
    verb("status", "--spec", path)
    assert lease.read(spec) == after  # a look changes nothing


def test_production_is_not_stopped_without_a_guard(spec: c.RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    up = serve.ensure(spec, "production")
    lease.acquire(spec)
    monkeypatch.setattr(guards.jobs, "detach", lambda *a, **k: 1 << 30)
    with pytest.raises(TryAgain, match="without one nobody would bring production back"):
        serve.ensure(spec, "extraction")
    assert procid.start_ticks(up.pid)


def test_a_lease_is_never_written_before_its_guard_runs(spec: c.RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> int:
        raise OSError("no process could be started")

    monkeypatch.setattr(guards.jobs, "detach", broken)
    with pytest.raises(OSError, match="no process"):
        borrow.acquire(spec, by_step=False)
    assert lease.read(spec) is None


def test_the_job_of_a_dead_airflow_keeps_a_guard_alive(borrowed: c.RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(guards.jobs.JOB_VARIABLE, "shard-1")
    with borrow.extraction_server(borrowed):
        kill(*two_guards(borrowed))
        wait_for(lambda: living_guards(borrowed))
    assert not is_given_back(borrowed)


def test_a_lapsed_lease_is_not_revived(borrowed: c.RunSpec) -> None:
    kill(*two_guards(borrowed))
    lease.expire(borrowed)
    assert lease.renew(borrowed) is None
    assert guards.renew(borrowed) is None  # as a late poll: it starts the guards, which give back
    wait_for(lambda: is_given_back(borrowed))
    with pytest.raises(TryAgain, match="holds no lease"):
        serve.ensure(borrowed, "extraction")


def test_a_clock_that_jumps_ends_no_lease_and_prolongs_none(
    borrowed: c.RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    for jump in (86400.0, -86400.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: now + jump)
        held = lease.read(borrowed)
        assert held is not None
        assert 0 < lease.left_s(held) <= borrowed.lease_ttl_s
        assert serve.ensure(borrowed, "extraction").changed is False
        assert lease.renew(borrowed) is not None
    monkeypatch.setattr(time, "time", lambda: now - 86400.0)
    lease.expire(borrowed)
    held = lease.read(borrowed)
    assert held is not None
    assert lease.lapsed(held)


@pytest.mark.parametrize("how", ["recover", "poll", "acquire"])
def test_after_a_reboot_production_comes_back(borrowed: c.RunSpec, tmp_path: Path, how: str) -> None:
    reboot(borrowed)
    assert not listens(borrowed.production.port)
    held = lease.read(borrowed)
    assert held is not None
    assert lease.lapsed(held)
    if how == "recover":
        answer = verb("recover", "--spec", write_spec(replace(borrowed, run_id="another"), tmp_path))
        assert (answer["action"], answer["mode"], answer["problems"]) == ("restored", "production", [])
    elif how == "poll":
        verb("job", "poll", "none", "--spec", write_spec(borrowed, tmp_path))
    else:
        other = replace(borrowed, run_id="run-2")
        refused = verb("acquire", "--spec", write_spec(other, tmp_path), check=75)
        assert "brought back after run run-1 (the host was booted since)" in refused["message"]
    wait_for(lambda: is_given_back(borrowed))
    assert listens(borrowed.production.port)
    if how == "acquire":
        assert borrow.acquire(other, by_step=False).run_id == "run-2"


def test_recover_leaves_a_held_host_alone(borrowed: c.RunSpec, tmp_path: Path) -> None:
    kill(*two_guards(borrowed))
    answer = verb("recover", "--spec", write_spec(borrowed, tmp_path))
    assert answer["action"] == "guarded"
    assert living_guards(borrowed)
    assert serve.mode_now(borrowed) == "extraction"


def test_recover_does_nothing_where_nobody_borrowed(spec: c.RunSpec, tmp_path: Path) -> None:
    path = write_spec(spec, tmp_path)
    assert verb("recover", "--spec", path)["action"] == "nothing"
    serve.ensure(spec, "production")
    borrow.acquire(spec, by_step=False)
    lease.release(spec)
    reboot(spec)
    assert verb("recover", "--spec", path)["action"] == "nothing"  # production after a reboot is its owner's
    assert not listens(spec.production.port)


def test_a_lease_that_was_deleted_by_hand_does_not_strand_the_host(borrowed: c.RunSpec) -> None:
    lease.path(borrowed).unlink()
    wait_for(lambda: serve.mode_now(borrowed) == "production")
    assert "guard: the lease is gone, the extraction server is not" in events(borrowed)


def test_a_stranded_host_is_not_given_up_at_the_first_failure(
    borrowed: c.RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No lease any more, the extraction server is stopped already, and production does not start at the first try."""
    held = lease.read(borrowed)
    assert held is not None
    kill(*two_guards(borrowed))
    lease.path(borrowed).unlink()
    back, tries = borrow.give_back, []

    def give_back(spec: c.RunSpec, grant: c.Lease) -> c.ServerFacts:
        tries.append(1)
        if len(tries) == 1:
            server = state.read_server(spec)
            assert server is not None
            launch.stop(spec, server, "the test's")
            raise TryAgain("production did not come back")
        return back(spec, grant)

    monkeypatch.setattr(guard.borrow, "give_back", give_back)
    monkeypatch.setattr(guard, "_RETRY_S", 0.01)
    assert guard.run(borrowed, Namespace(since=held.since)).mode == "production"
    assert is_given_back(borrowed)


def test_an_old_guard_does_not_end_a_new_grant_of_its_run(borrowed: c.RunSpec) -> None:
    old = lease.read(borrowed)
    assert old is not None
    kill(*two_guards(borrowed))
    lease.expire(borrowed)
    lease.acquire(borrowed)  # the same run again, while the old guard is on its way
    with pytest.raises(TryAgain, match="held by run run-1"):
        borrow.give_back(borrowed, old)
    assert serve.mode_now(borrowed) == "extraction"
    assert lease.read(borrowed) is not None
