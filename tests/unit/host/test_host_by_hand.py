"""What people do on the host: restore --now, status, recover, holds."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from host_lifecycle import (
    events,
    is_given_back,
    kill,
    living_guards,
    two_guards,
    verb,
    wait_for,
    with_env,
    write_spec,
)

from hsx_host import borrow, lease, restore, serve, state
from hsx_host import contract as c
from hsx_host import status as status_verb
from hsx_host.__main__ import main
from hsx_host.errors import Refused, TryAgain


def test_by_hand_whatever_the_state(borrowed: c.RunSpec, tmp_path: Path) -> None:
    """Extraction up, its lease alive, documents broken, and another login's command without a spec."""
    program = Path(serve.__file__).parents[1]
    environment = {"HSX_HOME": borrowed.host.home, "PYTHONPATH": str(program)}
    for name in ("borrowers.json", "guard.json"):
        (state.home(borrowed) / "state" / name).write_text("{half")
    done = subprocess.run(
        [sys.executable, "-m", "hsx_host", "restore", "--now"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    answer = c.decode(c.RestoreReport, done.stdout)
    assert (answer.mode, answer.changed, answer.pristine, answer.problems) == ("production", True, True, [])
    assert is_given_back(borrowed)
    assert list((state.home(borrowed) / "state").glob("guard.json.broken-*"))
    with pytest.raises(Refused, match=r"taken back by hand .* run run-1 is refused"):
        borrow.acquire(borrowed, by_step=False)
    with pytest.raises(Refused, match="taken back by hand"), borrow.extraction_server(borrowed):
        raise AssertionError("not reached")
    other = replace(borrowed, run_id="run-2")
    assert borrow.acquire(other, by_step=False).run_id == "run-2"
    lease.release(other)
    verb("restore", "--lift", "--spec", write_spec(borrowed, tmp_path))
    assert borrow.acquire(borrowed, by_step=False).run_id == "run-1"


@pytest.mark.parametrize(
    "words",
    [
        ["restore", "--now"], ["restore"], ["recover"], ["release"], ["acquire"], ["serve", "production"],
        ["patch", "apply"], ["heartbeat"], ["status", "--renew"], ["extract", "--shard", "0"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_another_login_than_hsxs_starts_and_stops_nothing(
    spec: c.RunSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: list[str],
) -> None:
    """Root above all: production would come back as root's. The home may be anybody's: what counts is who made what
    lies in it."""
    state.folder(spec, "state")
    path = write_spec(spec, tmp_path)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 12345)
    before = sorted(state.home(spec).rglob("*"))
    assert main([words[0], "--spec", path, *words[1:]]) == 3
    told = json.loads(capfd.readouterr().out)
    assert told["field"] == "login"
    assert f"{spec.host.home}/hsx_host {words[0]}" in told["fix"]
    assert sorted(state.home(spec).rglob("*")) == before


def test_another_login_may_look_and_keeps_no_lease(
    borrowed: c.RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path, held = write_spec(borrowed, tmp_path), lease.read(borrowed)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 12345)
    assert main(["status", "--spec", path]) == 0
    assert json.loads(capfd.readouterr().out)["mode"] == "extraction"
    main(["disk", "--spec", path])
    assert lease.read(borrowed) == held


def test_by_hand_holds_off_every_run(spec: c.RunSpec, tmp_path: Path) -> None:
    path = write_spec(spec, tmp_path)
    verb("restore", "--now", "--hold", "--spec", path)
    with pytest.raises(Refused, match="every run is refused"):
        borrow.acquire(replace(spec, run_id="run-9"), by_step=False)
    assert "--now only" in verb("restore", "--hold", "--spec", path, check=2)["message"]


def test_taking_the_host_back_again_holds_off_what_was_held_off(spec: c.RunSpec) -> None:
    def refused(run_id: str) -> bool:
        try:
            lease.acquire(replace(spec, run_id=run_id))
        except Refused:
            return True
        lease.release(replace(spec, run_id=run_id))
        return False

    for run_id in ("run-1", "run-2", "run-1", "run-3"):
        lease.hold(spec, run_id, everybody=False)
    assert [refused(f"run-{i}") for i in (1, 2, 3, 4)] == [True, True, True, False]
    lease.hold(spec, "run-5", everybody=True)
    lease.hold(spec, "run-6", everybody=False)
    assert refused("run-9")
    lease.lift(spec)
    assert not any(refused(f"run-{i}") for i in range(1, 10))


def test_a_hold_of_an_older_version_is_read(spec: c.RunSpec) -> None:
    lease.hold(spec, "run-1", everybody=False)
    file = state.home(spec) / "state" / "hold.json"
    body = json.loads(file.read_text())
    del body["earlier"]
    file.write_text(json.dumps(body))
    with pytest.raises(Refused, match="run run-1 is refused"):
        lease.acquire(spec)


@pytest.mark.parametrize("name", sorted(restore._DOCUMENTS))
def test_a_broken_document_stops_neither_status_nor_recover(borrowed: c.RunSpec, tmp_path: Path, name: str) -> None:
    path = write_spec(borrowed, tmp_path)
    kill(*two_guards(borrowed))
    lease.expire(borrowed)
    file = state.home(borrowed) / "state" / name
    file.write_text("")
    told = " / ".join(verb("status", "--spec", path)["in_the_way"])
    assert name in ("borrowers.json", "launch_base.json") or name in told
    verb("recover", "--spec", path)
    wait_for(lambda: is_given_back(borrowed))
    if name != "hold.json":
        assert list(file.parent.glob(f"{name}.broken-*"))
    if name == "hold.json":  # whom it held off is not known: everybody, until a person has looked
        assert "hold.json" in " / ".join(verb("status", "--spec", path)["in_the_way"])
        verb("restore", "--now", "--spec", path)
        assert "every run is refused" in " / ".join(verb("status", "--spec", path)["in_the_way"])


def test_by_hand_in_the_middle_of_a_start(spec: c.RunSpec, tmp_path: Path) -> None:
    """A start of the extraction server that would take minutes holds the transition: it is ended, not waited for."""
    serve.ensure(spec, "production")
    borrow.acquire(spec, by_step=False)
    slow = with_env(spec, "extraction", FAKE_SILENT="1")
    starting = subprocess.Popen(
        [sys.executable, "-m", "hsx_host", "serve", "extraction", "--spec", write_spec(slow, tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ},
    )
    wait_for(lambda: (s := state.read_server(spec)) is not None and (s.mode, s.phase) == ("extraction", "starting"))
    answer = verb("restore", "--now", "--spec", write_spec(spec, tmp_path, "now.json"))
    assert answer["mode"] == "production"
    assert starting.wait(30) == 75
    assert is_given_back(spec)
    assert "transition ended by hand" in events(spec)


@pytest.mark.parametrize("how", ["full", "read-only"])
def test_by_hand_on_a_disk_that_takes_nothing_says_what_stays(
    borrowed: c.RunSpec, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Production comes back, the run loses the host where a file can be removed, and what could not be done is told."""
    two_guards(borrowed)

    def no_room(path: Path, data: bytes, mode: int = 0o644) -> None:
        if how == "read-only":
            raise OSError(30, "Read-only file system", str(path))
        raise TryAgain("no space", field="disk", value=path.parent, fix="make room")

    unlink = Path.unlink

    def fixed(path: Path, missing_ok: bool = False) -> None:
        if path == lease.path(borrowed):
            raise OSError(30, "Read-only file system", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(state, "write_whole", no_room)
    if how == "read-only":
        monkeypatch.setattr(Path, "unlink", fixed)
    report = restore.by_hand(borrowed, everybody=False)
    monkeypatch.undo()
    assert report.mode == "production"
    told = "\n".join(report.problems)
    assert "run run-1 is not refused, mark it failed in Airflow" in told
    assert ("can't be ended, it may take the host away again" in told) == (how == "read-only")
    assert (lease.read(borrowed) is None) == (how == "full")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_by_hand_and_cut_off_is_finished_by_guards(spec: c.RunSpec, tmp_path: Path, number: signal.Signals) -> None:
    """Where nobody had the host too: production was down, or hung, by itself."""
    broken = tmp_path / "broken"
    spec = replace(with_env(spec, "production", FAKE_DIE_WHILE=str(broken)), lease_ttl_s=3.0)
    up = serve.ensure(spec, "production")
    os.kill(up.pid, signal.SIGKILL)
    broken.touch()
    command = [sys.executable, "-m", "hsx_host", "restore", "--now", "--spec", write_spec(spec, tmp_path)]
    person = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    wait_for(lambda: "production did not come back" in events(spec))
    person.send_signal(number)
    person.wait(60)
    broken.unlink()
    wait_for(lambda: is_given_back(spec))
    wait_for(lambda: not living_guards(spec))


def test_by_hand_in_vain_leaves_nobody_at_it_who_was_not_there_before(
    spec: c.RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_PAUSES_S", (0.01, 0.01))
    broken = tmp_path / "broken"
    broken.touch()
    spec = replace(with_env(spec, "production", FAKE_DIE_WHILE=str(broken)), lease_ttl_s=3.0)
    with pytest.raises(TryAgain, match="for now"):
        restore.by_hand(spec, everybody=False)
    assert lease.read(spec) is None
    wait_for(lambda: not living_guards(spec))


def test_the_command_for_people_and_what_status_says(borrowed: c.RunSpec, tmp_path: Path) -> None:
    """``<home>/hsx_host``: no spec, no PYTHONPATH, from any folder; says who holds the host and what is in the way."""
    command = str(state.home(borrowed) / "hsx_host")
    folder = tmp_path / "of somebody else"
    folder.mkdir()
    for module in ("psutil", "requests", "torch", "hsx_host"):  # nothing of the folder is imported
        (folder / f"{module}.py").write_text("raise SystemExit('PLANTED')\n")

    def ask(*words: str) -> dict[str, object]:
        done = subprocess.run(
            [command, *words], cwd=folder, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    two_guards(borrowed)
    status = ask("status", "--health")
    held = status["lease"]
    assert isinstance(held, dict)
    assert (status["mode"], status["healthy"], held["run_id"]) == ("extraction", True, "run-1")
    assert status["in_the_way"] == []
    assert sorted(status["guards"]) == sorted(p.pid for p in living_guards(borrowed))  # type: ignore[call-overload]
    kill(*two_guards(borrowed))
    os.kill(int(str(status["pid"])), signal.SIGKILL)
    ways = " / ".join(ask("status")["in_the_way"])  # type: ignore[arg-type]
    assert "no guard of the lease lives" in ways
    assert "the extraction server on record" in ways
    assert ask("restore", "--now")["mode"] == "production"
    after = ask("status", "--health")
    assert (after["mode"], after["lease"], after["healthy"]) == ("production", None, True)
    assert "taken back by hand" in str(after["in_the_way"])
    text = "\n".join(status_verb.lines(c.from_dict(c.StatusResult, after)))
    assert text.startswith("mode: production running, pid ")
    assert "held by: nobody" in text
    assert "lease released" in text
    ask("restore", "--lift")
    assert ask("status")["in_the_way"] == []


def test_by_hand_outlives_its_terminal(spec: c.RunSpec, tmp_path: Path) -> None:
    """It goes on by itself. Production does not inherit that."""
    now = subprocess.Popen(
        [sys.executable, "-m", "hsx_host", "restore", "--now", "--spec", write_spec(spec, tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: (s := state.read_server(spec)) is not None and s.phase == "starting")
    now.send_signal(signal.SIGHUP)
    out, _ = now.communicate()
    assert now.returncode == 0, out
    answer = json.loads(out)
    assert answer["problems"] == []
    ignored = next(w for w in Path(f"/proc/{answer['pid']}/status").read_text().splitlines() if w.startswith("SigIgn"))
    assert not int(ignored.split()[1], 16) & 1 << (signal.SIGHUP - 1)


def test_status_names_a_stranger_and_a_broken_document(spec: c.RunSpec, tmp_path: Path) -> None:
    path = write_spec(spec, tmp_path)
    with socket.socket() as s:
        s.bind(("127.0.0.1", spec.production.port))
        s.listen()
        (state.folder(spec, "state") / "lease.json").write_text("{")
        ways = " / ".join(verb("status", "--spec", path)["in_the_way"])
    assert f"port {spec.production.port} is held by pid {os.getpid()}" in ways
    assert "lease.json" in ways
    (state.folder(spec, "state") / "lease.json").unlink()
