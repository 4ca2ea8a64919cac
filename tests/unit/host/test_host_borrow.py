"""A step borrows the host and gives it back; leases, steps and guards that meet on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from host_lifecycle import (
    events,
    free_port,
    live_lease,
    living_guards,
    verb,
    verbless_mode,
    wait_for,
    write_spec,
)

from hsx_host import (
    borrow,
    guards,
    lease,
    procid,
    release,
    serve,
    state,
)
from hsx_host import contract as c
from hsx_host.errors import TryAgain


def test_a_step_borrows_and_gives_back(spec: c.RunSpec) -> None:
    serve.ensure(spec, "production")
    with borrow.extraction_server(spec) as facts:
        assert facts.mode == "extraction"
        held = lease.read(spec)
        assert held is not None
        assert held.run_id == spec.run_id
    assert verbless_mode(spec) == "production"
    assert lease.read(spec) is None
    assert not Path(spec.host.home, "plugin").exists()
    with pytest.raises(ZeroDivisionError), borrow.extraction_server(spec):
        raise ZeroDivisionError
    assert verbless_mode(spec) == "production"
    assert lease.read(spec) is None


def test_a_step_leaves_the_server_of_its_setup(spec: c.RunSpec) -> None:
    borrow.acquire(spec, by_step=False)
    up = serve.ensure(spec, "extraction")
    with borrow.extraction_server(spec) as facts:
        assert facts.pid == up.pid
        os.kill(up.pid, signal.SIGKILL)
    with borrow.extraction_server(spec) as facts:  # it crashed: brought about again, still the setup's
        assert facts.pid != up.pid
    assert verbless_mode(spec) == "extraction"
    assert lease.read(spec) is not None


def test_of_two_borrowing_steps_the_last_gives_back(spec: c.RunSpec, tmp_path: Path) -> None:
    serve.ensure(spec, "production")
    code = (
        "import sys; from hsx_host.__main__ import read_spec; from hsx_host import borrow\n"
        "with borrow.extraction_server(read_spec(sys.argv[1])) as f: print(f.pid, flush=True); sys.stdin.readline()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, write_spec(spec, tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    pid = int(other.stdout.readline())
    with borrow.extraction_server(spec) as facts:
        assert facts.pid == pid
    assert verbless_mode(spec) == "extraction"
    other.communicate("go\n")
    assert other.returncode == 0
    assert verbless_mode(spec) == "production"


@pytest.mark.parametrize(
    ("gives_back", "who"),
    [
        ("step", "step"),
        ("step", "step that serves"),
        ("step", "setup"),
        ("step", "setup that serves"),
        ("teardown", "step"),
        ("teardown", "step that serves"),
        ("teardown", "setup that serves"),
    ],
)
def test_a_host_that_is_borrowed_anew_while_it_is_given_back_keeps_its_lease(
    spec: c.RunSpec, monkeypatch: pytest.MonkeyPatch, gives_back: str, who: str
) -> None:
    """By a step or a setup of the same run, while production is up again and the lease not released yet."""
    spec = replace(spec, lease_ttl_s=300.0)
    serve.ensure(spec, "production")

    def meanwhile(spec: c.RunSpec) -> None:
        if who.startswith("step"):
            assert borrow._enter(spec), "the step borrows the host itself"
        else:
            borrow.acquire(spec, by_step=False)
        if who.endswith("serves"):
            serve.ensure(spec, "extraction")

    monkeypatch.setattr(borrow.leftovers, "remove", meanwhile)
    if gives_back == "step":
        with borrow.extraction_server(spec):
            pass
    else:
        borrow.acquire(spec, by_step=False)
        serve.ensure(spec, "extraction")
        borrow.give_back(spec)
    assert lease.read(spec) is not None
    assert serve.ensure(spec, "extraction").mode == "extraction"
    assert living_guards(spec)
    monkeypatch.undo()
    if who.startswith("step"):
        borrow._give_back_or_let_lapse(spec)
    else:
        borrow.give_back(spec)
    assert lease.read(spec) is None
    assert verbless_mode(spec) == "production"


def test_a_step_that_comes_as_the_last_one_leaves_borrows_the_host_itself(spec: c.RunSpec) -> None:
    """The extraction server is still up then; it is not a setup's."""
    assert borrow._enter(spec)
    serve.ensure(spec, "extraction")
    assert borrow._leave(spec)
    assert borrow._enter(spec)


def test_production_that_dies_while_the_lease_is_given_up_is_the_guards(
    spec: c.RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(spec, lease_ttl_s=300.0)
    borrow.acquire(spec, by_step=False)
    serve.ensure(spec, "extraction")

    def meanwhile(spec: c.RunSpec) -> None:
        server = state.read_server(spec)
        assert server is not None
        os.kill(server.pid, signal.SIGKILL)
        wait_for(lambda: procid.start_ticks(server.pid) is None)

    monkeypatch.setattr(borrow.leftovers, "remove", meanwhile)
    borrow.give_back(spec)
    wait_for(lambda: verbless_mode(spec) == "production" and lease.read(spec) is None)


@pytest.mark.parametrize("gone", ["lease", "guard"])
def test_lease_and_guard_are_looked_at_again_right_before_production_is_stopped(
    spec: c.RunSpec, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    up = serve.ensure(spec, "production")
    live_lease(spec)

    def meanwhile(*_: object) -> None:
        if gone == "lease":
            lease.expire(spec)
        else:
            monkeypatch.setattr(guards.jobs, "detach", lambda *a, **k: 1 << 30)
            for guard in living_guards(spec):
                os.kill(guard.pid, signal.SIGKILL)
                wait_for(lambda guard=guard: not procid.alive(guard))

    monkeypatch.setattr(serve, "_refuse_foreign_production", meanwhile)
    with pytest.raises(TryAgain, match="holds no lease" if gone == "lease" else "guard of the lease can't be started"):
        serve.ensure(spec, "extraction")
    assert procid.start_ticks(up.pid)


def test_the_lease_is_not_released_in_the_middle_of_a_transition(
    spec: c.RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve.ensure(spec, "production")
    live_lease(spec)
    monkeypatch.setattr(release, "_WAIT_S", 0.0)
    with state.transition(spec, wait_s=1.0), pytest.raises(TryAgain, match="a transition of this host"):
        release.run(spec, Namespace(abandon=False))
    assert lease.read(spec) is not None
    assert release.run(spec, Namespace(abandon=False)).expires
    assert lease.read(spec) is None


def test_another_run_holds_the_host(spec: c.RunSpec) -> None:
    live_lease(replace(spec, run_id="run-2"))
    with pytest.raises(TryAgain, match="run-2"), borrow.extraction_server(spec):
        raise AssertionError("not reached")


def test_the_guard_gives_the_host_back_when_the_lease_lapses(spec: c.RunSpec) -> None:
    spec = replace(spec, lease_ttl_s=3.0)
    borrow.acquire(spec, by_step=False)
    serve.ensure(spec, "extraction")
    wait_for(lambda: verbless_mode(spec) == "production" and lease.read(spec) is None)
    assert not Path(spec.host.home, "plugin").exists()
    assert "lease lapsed: the guard gives the host back" in events(spec)
    assert serve.ensure(spec, "production").changed is False


def test_a_stopped_step_leaves_the_restore_to_the_guard(spec: c.RunSpec) -> None:
    serve.ensure(spec, "production")
    with pytest.raises(KeyboardInterrupt), borrow.extraction_server(spec):
        raise KeyboardInterrupt
    assert "lease ended early: the guard takes over" in events(spec)
    wait_for(lambda: verbless_mode(spec) == "production" and lease.read(spec) is None)


def test_release_is_refused_while_extraction_runs(spec: c.RunSpec, tmp_path: Path) -> None:
    live_lease(spec)
    serve.ensure(spec, "extraction")
    path = write_spec(spec, tmp_path)
    assert "serve production first" in verb("release", "--spec", path, check=3)["fix"]
    status = verb("status", "--health", "--spec", path)
    assert (status["mode"], status["phase"], status["healthy"]) == ("extraction", "running", True)
    assert free_port()
