"""Production under a systemd unit (with a stand-in for systemctl that runs real processes) and under two commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from host_lifecycle import (
    FAKES,
    clean_up,
    cmdline,
    environ,
    listens,
    make_spec,
    start_by_hand,
    verb,
    wait_for,
    write_spec,
)

from hsx_host import borrow, health, lease, managers, procid, restore, serve, state
from hsx_host import contract as c
from hsx_host.errors import BadInput, Refused, TryAgain

SYSTEMCTL = FAKES / "systemctl.py"
UNIT = "sglang@kimi.service"


class Units:
    """The folder of one unit and what was asked of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.command = [sys.executable, str(SYSTEMCTL), str(folder)]

    def define(self, spec: c.RunSpec, **body: Any) -> None:
        unit = {
            "name": UNIT,
            "argv": [spec.host.python, "-m", "sglang.launch_server", *spec.production.args],
            "env": {"PATH": "/usr/bin:/bin", "NOTIFY_SOCKET": "/run/notify", **spec.production.env},
        }
        (self.folder / "unit.json").write_text(json.dumps(unit | body))

    def systemctl(self, verb: str) -> None:
        subprocess.run([*self.command, verb, UNIT], check=True)

    def main(self) -> int:
        return int((self.folder / "main").read_text())

    def asked(self) -> list[str]:
        return [v for v in (self.folder / "asked").read_text().split() if v != "show"]


@pytest.fixture
def units(tmp_path: Path) -> Iterator[Units]:
    folder = tmp_path / f"unit-{os.getpid()}"
    folder.mkdir()
    units = Units(folder)
    yield units
    if (folder / "unit.json").exists():
        units.systemctl("stop")


@pytest.fixture
def spec(tmp_path: Path, units: Units) -> Iterator[c.RunSpec]:
    spec = make_spec(tmp_path)
    spec = replace(spec, manager="systemd", service=c.ServiceSettings(unit=UNIT, systemctl=units.command))
    yield spec
    clean_up(spec)


def up(spec: c.RunSpec, units: Units, **body: Any) -> int:
    units.define(spec, **body)
    units.systemctl("start")
    wait_for(lambda: listens(spec.production.port))
    return units.main()


def test_a_unit_is_stopped_and_started_by_systemd(spec: c.RunSpec, units: Units) -> None:
    old = up(spec, units)
    before = cmdline(old), {k: v for k, v in environ(old).items() if k != "INVOCATION_ID"}
    first = serve.ensure(spec, "production")
    assert (first.pid, first.changed) == (old, False)
    lease.acquire(spec)
    extraction = serve.ensure(spec, "extraction")
    assert not procid.start_ticks(old)
    assert units.asked() == ["start", "stop"]
    inherited = environ(extraction.pid)
    assert "NOTIFY_SOCKET" not in inherited  # what was meant for the unit's own process
    assert "INVOCATION_ID" not in inherited
    back = serve.ensure(spec, "production")
    assert units.asked() == ["start", "stop", "start"]
    assert back.pid == units.main()
    assert (cmdline(back.pid), {k: v for k, v in environ(back.pid).items() if k != "INVOCATION_ID"}) == before
    assert restore.proved(spec, back).problems == []
    assert serve.ensure(spec, "production").changed is False


def test_a_unit_that_its_owner_restarts_is_known_again(spec: c.RunSpec, units: Units) -> None:
    up(spec, units)
    serve.ensure(spec, "production")
    units.systemctl("stop")
    units.systemctl("start")
    wait_for(lambda: not health.problem(spec.production))
    now = serve.ensure(spec, "production")
    assert (now.pid, now.changed) == (units.main(), False)
    assert units.asked() == ["start", "stop", "start"]  # hsx asked for nothing: it is up


def test_what_a_unit_leaves_behind_is_ended(spec: c.RunSpec, units: Units) -> None:
    """KillMode=process and a stubborn child: it belonged to the unit, and holds what the next server needs."""
    spec = replace(spec, production=replace(spec.production, env=spec.production.env | {"FAKE_ORPHAN": "1"}))
    up(spec, units, leave=True)
    serve.ensure(spec, "production")
    recorded = state.read_server(spec)
    assert recorded is not None
    child = next(procid.ProcId(*pair) for pair in recorded.tree if pair[0] != recorded.pid)
    lease.acquire(spec)
    serve.ensure(spec, "stopped")
    assert not procid.alive(child)


def test_a_server_on_the_port_that_is_not_the_units_is_a_stranger(spec: c.RunSpec, units: Units) -> None:
    units.define(spec)
    stranger = start_by_hand(spec)
    try:
        lease.acquire(spec)
        for mode in ("production", "stopped"):
            with pytest.raises(Refused, match=f"stranger: pid {stranger.pid}"):
                serve.ensure(spec, mode)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_unit_that_does_not_come_back_is_told_and_tried_again(
    spec: c.RunSpec, units: Units, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_PAUSES_S", (0.01, 0.01))
    up(spec, units)
    serve.ensure(spec, "production")
    lease.acquire(spec)
    serve.ensure(spec, "stopped")
    units.define(spec, argv=[sys.executable, "-c", "raise SystemExit('no')"])
    with pytest.raises(TryAgain):
        serve.ensure(spec, "production")
    assert units.asked().count("start") == 4
    units.define(spec)
    assert serve.ensure(spec, "production").changed


def test_what_systemd_refuses_is_said(spec: c.RunSpec, units: Units) -> None:
    old = up(spec, units, fails=["stop"])
    serve.ensure(spec, "production")
    lease.acquire(spec)
    with pytest.raises(TryAgain, match=r"Interactive authentication required.*sudo"):
        serve.ensure(spec, "stopped")
    assert procid.start_ticks(old)  # not killed behind systemd's back
    units.define(spec)
    with pytest.raises(BadInput, match="not-found"):
        managers.main(replace(spec, service=replace(spec.service, unit="other.service")))


def test_profile_words_that_are_missing_are_named(spec: c.RunSpec) -> None:
    for manager, field in (("systemd", "unit"), ("command", "start_command"), ("docker", "manager")):
        with pytest.raises(BadInput, match=rf"production\.{field}"):
            serve.ensure(replace(spec, manager=manager, service=c.ServiceSettings()), "production")


def test_two_commands_of_the_owner(tmp_path: Path) -> None:
    """As for a container: hsx knows neither how it is started nor as whom; the port and the pid prove it."""
    spec = make_spec(tmp_path)
    pid_file = tmp_path / "pid"
    code = (
        "import os, subprocess, sys\n"
        f"p = subprocess.Popen({[spec.host.python, '-m', 'sglang.launch_server', *spec.production.args]!r},"
        f" env={spec.production.env | {'PATH': '/usr/bin', 'FROM': 'a container'}!r}, start_new_session=True,"
        " cwd='/usr')\n"
        f"open({str(pid_file)!r}, 'w').write(str(p.pid))\n"
    )
    stop = (
        f"import os, signal, time\npid = int(open({str(pid_file)!r}).read())\nos.kill(pid, signal.SIGTERM)\n"
        "while os.path.exists(f'/proc/{pid}') and open(f'/proc/{pid}/stat').read().split()[2] != 'Z': time.sleep(0.05)"
    )
    service = c.ServiceSettings(start_command=[sys.executable, "-c", code], stop_command=[sys.executable, "-c", stop])
    for pid_command in ([], ["cat", str(pid_file)]):
        used = replace(spec, manager="command", service=replace(service, pid_command=pid_command))
        try:
            first = serve.ensure(used, "production")
            assert first.pid == int(pid_file.read_text())
            borrow.acquire(used, by_step=False)
            extraction = serve.ensure(used, "extraction")
            assert not procid.start_ticks(first.pid)
            assert "FROM" not in environ(extraction.pid)  # a container's environment means nothing outside
            report = verb("restore", "--spec", write_spec(used, tmp_path))
            assert (report["mode"], report["problems"], report["pid"]) == ("production", [], int(pid_file.read_text()))
            assert lease.read(used) is None
        finally:
            clean_up(used)
            if listens(spec.production.port):
                os.kill(int(pid_file.read_text()), signal.SIGKILL)
                wait_for(lambda: not listens(spec.production.port))
