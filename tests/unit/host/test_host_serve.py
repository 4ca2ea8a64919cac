"""Transitions of the host with a stand-in server: taking over, stopping, starting, refusing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from host_lifecycle import (
    FAKES,
    HOST,
    cmdline,
    environ,
    free_port,
    listens,
    live_lease,
    start_by_hand,
    verbless_mode,
    wait_for,
    with_env,
    write_spec,
)

from hsx_host import (
    borrow,
    capture_server,
    patch,
    preflight,
    processes,
    procid,
    serve,
    state,
)
from hsx_host import contract as c
from hsx_host.errors import Refused, TryAgain


def test_there_and_back(spec: c.RunSpec, by_hand: list[subprocess.Popen[bytes]]) -> None:
    """Production started by hand comes back with the same arguments, environment and folder, without the plugin."""
    old = start_by_hand(spec)
    by_hand.append(old)
    args, env, cwd = cmdline(old.pid), environ(old.pid), os.readlink(f"/proc/{old.pid}/cwd")
    first = serve.ensure(spec, "production")
    assert (first.changed, first.pid, first.mode) == (False, old.pid, "production")
    live_lease(spec)
    extraction = serve.ensure(spec, "extraction")
    assert extraction.changed
    assert old.poll() is not None
    assert extraction.plugin_id == patch.source_id()
    running = environ(extraction.pid)
    plugin = str(patch.plugin_dir(spec, extraction.plugin_id))
    assert running["PYTHONPATH"] == f"{plugin}:{FAKES}"
    assert running["FROM_HAND"] == "yes"
    spool = serve.extraction_spool(spec)
    assert running["HSX_CAPTURE_SPEC"] == str(spool / "capture.json")
    assert json.loads((spool / "capture.json").read_text())["layers"] == [1, 4]
    assert os.getsid(extraction.pid) == extraction.pid
    again = serve.ensure(spec, "extraction")
    assert (again.changed, again.pid) == (False, extraction.pid)
    with pytest.raises(Refused, match="extraction server runs"):
        patch.revert(spec)
    back = serve.ensure(spec, "production")
    assert back.changed
    assert not procid.start_ticks(extraction.pid)
    assert cmdline(back.pid) == args
    assert environ(back.pid) == env
    assert os.readlink(f"/proc/{back.pid}/cwd") == cwd
    patch.revert(spec)
    assert not Path(spec.host.home, "plugin").exists()
    assert serve.ensure(spec, "production").pid == back.pid


@pytest.mark.parametrize("env", [{}, {"FAKE_NO_FREEZE": "1"}])
def test_only_an_extraction_server_leaves_its_past_out_of_garbage_collection(
    spec: c.RunSpec, env: dict[str, str]
) -> None:
    spec = with_env(spec, "extraction", **env)
    live_lease(spec)
    assert "frozen" not in Path(serve.ensure(spec, "production").log).read_text()
    assert Path(serve.ensure(spec, "extraction").log).read_text().count("garbage collection frozen") == 1
    assert serve.ensure(spec, "extraction").changed is False  # one that is there already has done so


def test_capture_settings_make_another_extraction_server(spec: c.RunSpec) -> None:
    live_lease(spec)
    first = serve.ensure(spec, "extraction")
    other = replace(spec, capture=replace(spec.capture, layers=[2]))
    second = serve.ensure(other, "extraction")
    assert second.changed
    assert second.pid != first.pid
    assert json.loads((serve.extraction_spool(other) / "capture.json").read_text())["layers"] == [2]


def test_a_server_that_an_upgrade_in_place_has_outlived_is_started_anew(
    spec: c.RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are the old version's, and would count as the new one's."""
    live_lease(spec)
    serve.ensure(spec, "extraction")
    assert not serve.ensure(spec, "extraction").changed
    monkeypatch.setattr(capture_server, "engine_version", lambda: "99.0.0")
    with pytest.raises(Refused, match=r"host\.python has 99\.0\.0"):  # the fake is of this Python still
        serve.ensure(spec, "extraction")
    assert not listens(spec.extraction.port)


def test_a_production_server_of_other_arguments_is_refused_by_name(
    spec: c.RunSpec, by_hand: list[subprocess.Popen[bytes]]
) -> None:
    by_hand.append(start_by_hand(spec, [*spec.production.args, "--tp", "2"], {"PYTHONPATH": str(FAKES)}))
    live_lease(spec)
    for mode in ("production", "extraction", "stopped"):
        with pytest.raises(Refused) as e:
            serve.ensure(spec, mode)
        assert "--tp-size: runs with '2', the profile says nothing" in str(e.value)
        assert "environment NCCL_PROTO: not set where it runs" in str(e.value)
    assert by_hand[0].poll() is None


def test_strangers_on_the_port_are_never_touched(spec: c.RunSpec, by_hand: list[subprocess.Popen[bytes]]) -> None:
    code = (
        f"import socket,time; s=socket.socket(); s.bind(('{HOST}',{spec.production.port})); s.listen(); time.sleep(600)"
    )
    by_hand.append(subprocess.Popen([sys.executable, "-c", code]))
    wait_for(lambda: listens(spec.production.port))
    live_lease(spec)
    for mode in ("production", "extraction", "stopped"):
        with pytest.raises(Refused, match=f"stranger: pid {by_hand[0].pid}, user .*, command"):
            serve.ensure(spec, mode)
    assert by_hand[0].poll() is None


def test_a_stranger_comes_while_the_host_changes(spec: c.RunSpec) -> None:
    """The extraction port is somebody's: refused, and production is not stopped for it."""
    with socket.socket() as s:
        s.bind((HOST, 0))
        s.listen()
        port = s.getsockname()[1]
        args = [str(port) if a == str(spec.extraction.port) else a for a in spec.extraction.args]
        spec = replace(spec, extraction=replace(spec.extraction, port=port, args=args))
        up = serve.ensure(spec, "production")
        live_lease(spec)
        with pytest.raises(Refused, match="stranger"):
            serve.ensure(spec, "extraction")
        assert serve.ensure(spec, "production").pid == up.pid


def listening(address: str, port: int) -> subprocess.Popen[bytes]:
    """A stranger who listens there, as a proxy in front of production does, or a second replica beside it."""
    code = (
        "import socket,sys,time; s=socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)\n"
        "s.bind((sys.argv[1], int(sys.argv[2]))); s.listen(); time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, address, str(port)])
    wait_for(lambda: child.pid in processes.listeners(port))
    return child


def own_extraction_port(spec: c.RunSpec) -> c.RunSpec:
    port = free_port()
    args = [str(port) if a == str(spec.extraction.port) else a for a in spec.extraction.args]
    return replace(spec, extraction=replace(spec.extraction, port=port, args=args))


@pytest.mark.parametrize("how", ["recorded", "not recorded"])
@pytest.mark.parametrize("mode", ["extraction", "stopped"])
def test_production_is_not_stopped_beside_a_stranger_on_its_port(
    spec: c.RunSpec, by_hand: list[subprocess.Popen[bytes]], how: str, mode: str
) -> None:
    """Its port would be the stranger's when it shall come back, or the extraction server be reached through the proxy:
    refused by every step that comes before."""
    by_hand += [start_by_hand(spec), listening("127.0.0.2", spec.production.port)]
    if how == "recorded":
        serve.ensure(spec, "production")
    with pytest.raises(Refused, match=f"beside production, port .* by a stranger: pid {by_hand[1].pid}"):
        preflight.run(spec, Namespace())
    with pytest.raises(Refused, match="beside production"):
        borrow.acquire(spec, by_step=False)
    live_lease(spec)
    with pytest.raises(Refused, match=r"beside production.*extraction\.port"):
        serve.ensure(spec, mode)
    assert [p.poll() for p in by_hand] == [None, None]
    assert serve.ensure(spec, "production").pid == by_hand[0].pid


def test_a_proxy_in_front_of_production_is_in_nobodys_way(
    spec: c.RunSpec, by_hand: list[subprocess.Popen[bytes]]
) -> None:
    """It has production's port on another address, and extraction has a port of its own."""
    spec = own_extraction_port(spec)
    by_hand += [start_by_hand(spec), listening("127.0.0.2", spec.production.port)]
    borrow.acquire(spec, by_step=False)
    serve.ensure(spec, "extraction")
    assert borrow.give_back(spec).mode == "production"
    assert by_hand[1].poll() is None


def test_a_stranger_that_comes_to_another_address_keeps_production_from_nothing(
    spec: c.RunSpec, by_hand: list[subprocess.Popen[bytes]]
) -> None:
    borrow.acquire(spec, by_step=False)
    serve.ensure(spec, "extraction")
    by_hand.append(listening("127.0.0.2", spec.production.port))
    assert borrow.give_back(spec).mode == "production"
    assert by_hand[0].poll() is None


def test_memory_that_the_driver_counts_for_the_dead_keeps_production_from_nothing(
    spec: c.RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way to extraction ends there, the way back does not, whether the dead one was stopped or found dead."""
    up = serve.ensure(spec, "production")
    borrow.acquire(spec, by_step=False)
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat {tmp_path}/counted\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(processes, "_DEVICE_WAIT_S", 0.2)
    (tmp_path / "counted").write_text(f"{up.pid}, 500\n")
    with pytest.raises(TryAgain, match="device memory is still held"):
        serve.ensure(spec, "extraction")
    assert serve.ensure(spec, "production").pid != up.pid
    (tmp_path / "counted").write_text("")
    gone = serve.ensure(spec, "extraction").pid
    (tmp_path / "counted").write_text(f"{gone}, 500\n")
    assert borrow.give_back(spec).mode == "production"
    told = [json.loads(line) for line in state.journal_tail(spec, 100)]
    assert any(f"500 MiB: pid {gone}" in str(line.get("device_memory_of_others")) for line in told)


@pytest.mark.parametrize("which", ["geteuid", "getegid"])
def test_production_of_another_user_is_not_taken_over(
    spec: c.RunSpec, by_hand: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """It would come back as hsx's user."""
    by_hand.append(start_by_hand(spec))
    mine = getattr(os, which)()
    monkeypatch.setattr(os, which, lambda: mine + 12345)
    with pytest.raises(Refused, match=rf"runs as user \d+, group \d+, and hsx as .*{mine + 12345}") as e:
        preflight.run(spec, Namespace())
    assert "production.manager" in str(e.value)
    with pytest.raises(Refused, match="as another's"):
        borrow.acquire(spec, by_step=False)
    assert by_hand[0].poll() is None


def test_a_crashed_server_and_its_orphan_are_cleared_before_the_next(spec: c.RunSpec) -> None:
    shm = f"/dev/shm/hsx-test-{os.getpid()}-{spec.production.port}"
    live_lease(spec)
    bad = with_env(spec, "extraction", FAKE_ORPHAN="1", FAKE_SHM=shm)
    crashed = serve.ensure(bad, "extraction")
    recorded = state.read_server(spec)
    assert recorded is not None
    assert shm in recorded.shm
    orphan = next(pid for pid, _ in recorded.tree if pid != crashed.pid)
    os.kill(crashed.pid, signal.SIGKILL)
    wait_for(lambda: procid.start_ticks(crashed.pid) is None)
    with pytest.raises(TryAgain, match="no extraction server"):
        serve.extraction_spool(spec)
    assert procid.start_ticks(orphan)
    back = serve.ensure(spec, "production")
    assert back.mode == "production"
    assert procid.start_ticks(orphan) is None
    assert not os.path.exists(shm)


def test_a_proxy_of_the_shell_is_not_asked(spec: c.RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert serve.ensure(spec, "production").changed


@pytest.mark.usefixtures("no_pauses")
def test_a_server_that_dies_ends_the_wait_with_its_log(spec: c.RunSpec) -> None:
    with pytest.raises(TryAgain, match="asked to"):
        serve.ensure(with_env(spec, "production", FAKE_DIE="1"), "production")
    assert verbless_mode(spec) == "stopped"
    assert serve.ensure(spec, "production").changed


@pytest.mark.usefixtures("no_pauses")
def test_a_server_that_is_never_healthy_is_stopped_at_the_deadline(spec: c.RunSpec) -> None:
    silent = with_env(spec, "production", FAKE_SILENT="1")
    silent = replace(silent, production=replace(silent.production, start_timeout_s=2.0))
    with pytest.raises(TryAgain, match=r"not ready after .*health answers 503"):
        serve.ensure(silent, "production")
    assert not listens(spec.production.port)


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ("error", "no such seam"),
        ("none", "0 of 1 scheduler processes"),
        ("old", r"runs SGLang 0\.0\.1, host\.python has"),
    ],
)
def test_an_unproved_plugin_is_refused_and_production_comes_back(spec: c.RunSpec, how: str, word: str) -> None:
    serve.ensure(spec, "production")
    live_lease(spec)
    with pytest.raises(Refused, match=word):
        serve.ensure(with_env(spec, "extraction", FAKE_READY=how), "extraction")
    assert not listens(spec.production.port)
    assert serve.ensure(spec, "production").changed


def test_a_half_started_server_is_waited_for(spec: c.RunSpec) -> None:
    """The starter was killed after the launch: the next one finds the server by its record."""
    first = serve.ensure(spec, "production")
    recorded = state.read_server(spec)
    assert recorded is not None
    state.write_server(spec, replace(recorded, phase="starting", tree=[]))
    again = serve.ensure(spec, "production")
    assert again.pid == first.pid
    recorded = state.read_server(spec)
    assert recorded is not None
    assert recorded.phase == "running"


def test_an_extraction_server_without_a_record_is_known_by_its_capture_spec(spec: c.RunSpec) -> None:
    live_lease(spec)
    lost = serve.ensure(spec, "extraction")
    state.server_path(spec).unlink()
    back = serve.ensure(spec, "production")
    assert back.mode == "production"
    assert procid.start_ticks(lost.pid) is None


def test_the_lease_decides(spec: c.RunSpec) -> None:
    up = serve.ensure(spec, "production")
    with pytest.raises(TryAgain, match="holds no lease"):
        serve.ensure(spec, "extraction")
    live_lease(replace(spec, run_id="run-2"))
    for mode in ("production", "extraction", "stopped"):
        with pytest.raises(TryAgain, match="held by run run-2"):
            serve.ensure(spec, mode)
    assert serve.ensure(replace(spec, run_id="run-2"), "production").pid == up.pid


def test_production_of_another_profile_is_not_stopped(spec: c.RunSpec) -> None:
    serve.ensure(spec, "production")
    live_lease(spec)
    other = with_env(spec, "production", NCCL_PROTO="Simple")
    with pytest.raises(Refused, match="another profile"):
        serve.ensure(other, "extraction")
    assert serve.ensure(other, "production").changed  # asked for: the profile was changed


def test_two_serves_at_once_act_once(spec: c.RunSpec, tmp_path: Path) -> None:
    path = write_spec(spec, tmp_path)
    racing = [
        subprocess.Popen(
            [sys.executable, "-m", "hsx_host", "serve", "production", "--spec", path], stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    answers = [json.loads(p.communicate()[0]) for p in racing]
    assert [a["type"] for a in answers] == ["ServerFacts"] * 3, answers
    assert sorted(a["changed"] for a in answers) == [False, False, True]
    assert len({a["pid"] for a in answers}) == 1


def test_stopped(spec: c.RunSpec) -> None:
    live_lease(spec)
    assert not serve.ensure(spec, "stopped").changed
    serve.ensure(spec, "production")
    assert serve.ensure(spec, "stopped").changed
    assert not listens(spec.production.port)
