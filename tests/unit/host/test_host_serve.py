"""Transitions of the host with a stand-in server: taking over, stopping, starting, refusing, giving back."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from host_lifecycle import (
    FAKES,
    HOST,
    clean_up,
    cmdline,
    environ,
    events,
    free_port,
    listens,
    live_lease,
    living_guards,
    make_spec,
    start_by_hand,
    verb,
    wait_for,
    with_env,
    write_spec,
)

from hsx_host import (
    borrow,
    capture_server,
    guards,
    health,
    inherited,
    lease,
    patch,
    preflight,
    processes,
    procid,
    release,
    restore,
    serve,
    state,
)
from hsx_host import contract as c
from hsx_host.errors import Refused, TryAgain


@pytest.fixture
def by_hand() -> Iterator[list[subprocess.Popen[bytes]]]:
    found: list[subprocess.Popen[bytes]] = []
    yield found
    for p in found:
        p.kill()
        p.wait()


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


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_PAUSES_S", (0.01, 0.01))


def test_production_that_does_not_come_back_at_the_first_try(spec: c.RunSpec, tmp_path: Path, no_pauses: None) -> None:
    once = with_env(spec, "production", FAKE_DIE_ONCE=str(tmp_path / "died"))
    assert serve.ensure(once, "production").changed
    assert events(spec).count("production did not come back") == 1
    assert verbless_mode(spec) == "production"


@pytest.mark.usefixtures("no_pauses")
def test_a_server_that_dies_in_the_soak_is_told_and_stopped(spec: c.RunSpec) -> None:
    """Healthy, a first token, and then it dies at the 100th request."""
    bad = with_env(spec, "extraction", FAKE_DIE_AT="100")
    bad = replace(bad, extraction=replace(bad.extraction, soak_requests=128))
    live_lease(spec)
    with pytest.raises(TryAgain, match=r"answers /health, but request \d+ of 128 of the soak failed"):
        serve.ensure(bad, "extraction")
    assert verbless_mode(spec) == "stopped"
    assert not listens(spec.extraction.port)


def test_a_soak_that_fails_does_not_wait_for_its_rest(spec: c.RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def slow(settings: c.ServerSettings, ids: list[int], timeout_s: float) -> str:
        asked.append(1)
        return "no answer"

    monkeypatch.setattr(health, "_generate", slow)
    with pytest.raises(TryAgain, match="request 1 of 1000"):
        health.soak(replace(spec.production, soak_requests=1000), "production")
    assert len(asked) < 1000


def test_production_comes_back_word_by_word(spec: c.RunSpec, by_hand: list[subprocess.Popen[bytes]]) -> None:
    """Its own spelling of flags, its umask, its limits and CPUs, and its way to name the interpreter."""
    args = [*spec.production.args, "--tp", "1"]
    spec = replace(spec, production=replace(spec.production, args=[*spec.production.args, "--tp-size=1"]))
    how = (
        "import os, resource, sys; os.umask(0o027); resource.setrlimit(resource.RLIMIT_NOFILE, (700, 900));"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); os.nice(3); os.execvp('python', sys.argv[1:])"
    )
    old = subprocess.Popen(
        [sys.executable, "-c", how, "python", "-m", "sglang.launch_server", *args],
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "FROM": "hand", **spec.production.env},
        cwd="/usr",
        start_new_session=True,
    )
    by_hand.append(old)
    wait_for(lambda: listens(spec.production.port))

    def facts(pid: int) -> tuple[object, ...]:
        p = psutil.Process(pid)
        umask = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("Umask")]
        limit = p.rlimit(resource.RLIMIT_NOFILE)
        return cmdline(pid), environ(pid), os.readlink(f"/proc/{pid}/cwd"), umask, limit, p.cpu_affinity(), p.nice()

    before = facts(old.pid)
    assert cmdline(old.pid)[0] == "python"
    serve.ensure(spec, "production")
    live_lease(spec)
    serve.ensure(spec, "extraction")
    back = serve.ensure(spec, "production")
    assert back.pid != old.pid
    assert facts(back.pid) == before
    assert restore.proved(spec, back).problems == []


def test_what_is_not_as_it_was_is_told(spec: c.RunSpec, by_hand: list[subprocess.Popen[bytes]]) -> None:
    by_hand.append(start_by_hand(spec))
    serve.ensure(spec, "production")
    live_lease(spec)
    serve.ensure(spec, "stopped")
    other = start_by_hand(spec, env={**spec.production.env, "FROM_HAND": "no", "HF_HOME": "/x"})
    by_hand.append(other)
    up = serve.ensure(spec, "production")
    told = inherited.differences(spec, procid.ProcId(up.pid, 0), [])
    assert told == []  # taken over: it is what production is now
    kept = state.read_document(inherited.LaunchBase, Path(spec.host.home, "state", "launch_base.json"))
    assert kept is not None
    kept = replace(kept, env=kept.env | {"FROM_HAND": "yes"}, umask=0o077, argv=[*kept.argv, "--tp", "1"])
    state.write_document(Path(spec.host.home, "state", "launch_base.json"), kept)
    text = "; ".join(inherited.differences(spec, procid.ProcId(up.pid, 0), []))
    assert "its environment differs in FROM_HAND" in text
    assert "its umask is 0022, not 0077" in text


def test_cpus_nice_and_user_of_production_are_compared(spec: c.RunSpec, by_hand: list[subprocess.Popen[bytes]]) -> None:
    """What nobody can give back (a user, a lower nice) is told as well; an older record says nothing."""
    by_hand.append(start_by_hand(spec))
    proc = procid.ProcId(serve.ensure(spec, "production").pid, 0)
    file = Path(spec.host.home, "state", "launch_base.json")
    kept = state.read_document(inherited.LaunchBase, file)
    assert kept is not None
    has = psutil.Process(proc.pid)
    assert (kept.affinity, kept.nice) == (has.cpu_affinity(), has.nice())
    assert (kept.uid, kept.gid) == (os.geteuid(), os.getegid())
    for other, word in (
        (replace(kept, affinity=[*kept.affinity, 4095]), "CPUs"),
        (replace(kept, nice=has.nice() - 1), f"its nice is {has.nice()}, not {has.nice() - 1}"),
        (replace(kept, uid=4711), f"its user id is {os.geteuid()}, not 4711"),
        (replace(kept, gid=4711), f"its group id is {os.getegid()}, not 4711"),
    ):
        state.write_document(file, other)
        told = inherited.differences(spec, proc, [])
        assert len(told) == 1
        assert word in told[0]
    older = json.loads(file.read_text())
    for name in ("nice", "uid", "gid"):
        del older[name]
    file.write_text(json.dumps(older))
    assert inherited.differences(spec, proc, []) == []


@pytest.fixture
def own_disk(tmp_path: Path) -> Iterator[Path]:
    """The host's home as a file system of its own, small; only where this user may mount one."""
    home = tmp_path / "home"
    home.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(home)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    yield home
    while os.path.ismount(home):  # lazily: a server may still have its folder there
        subprocess.run(["umount", "--lazy", str(home)], check=True)


@pytest.mark.parametrize("how", ["full", "read-only"])
def test_production_comes_back_where_the_disk_takes_nothing(
    own_disk: Path, tmp_path: Path, how: str, by_hand: list[subprocess.Popen[bytes]]
) -> None:
    """No record, no journal, no log can be written: the guard brings production up all the same."""
    spec = replace(make_spec(tmp_path), lease_ttl_s=10.0)
    try:
        by_hand.append(start_by_hand(spec))
        serve.ensure(spec, "production")
        borrow.acquire(spec, by_step=False)
        gone = serve.ensure(spec, "extraction").pid
        if how == "full":
            with suppress(OSError), (own_disk / "ballast").open("wb", buffering=0) as f:
                while True:
                    f.write(bytes(4096))
        else:
            subprocess.run(["mount", "--bind", str(own_disk), str(own_disk)], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", str(own_disk)], check=True)
        with pytest.raises(OSError, match=r"No space left|Read-only"):
            (own_disk / "proof").write_text("x" * 8192)
        wait_for(lambda: not procid.start_ticks(gone) and not health.problem(spec.production))
        up = processes.listeners(spec.production.port)
        if how == "full":
            wait_for(lambda: lease.read(spec) is None)
            (own_disk / "ballast").unlink()
        else:
            subprocess.run(["umount", "--lazy", str(own_disk)], check=True)
        wait_for(lambda: lease.read(spec) is None)
        again = serve.ensure(spec, "production")
        assert (again.changed, [again.pid]) == (False, up)
        assert restore.proved(spec, again).problems == []
    finally:
        clean_up(spec)


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


def verbless_mode(spec: c.RunSpec) -> str:
    """The mode on record, "stopped" where the server does not live."""
    server = state.read_server(spec)
    if server is None or server.phase == "stopped" or not procid.alive(procid.ProcId(server.pid, server.start)):
        return "stopped"
    return server.mode if server.phase == "running" else "starting"
