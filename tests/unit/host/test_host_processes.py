"""Owning and stopping exactly one server's processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from host_lifecycle import HOST, free_port, listens, wait_for

from hsx_host import devices, processes, procid
from hsx_host.errors import TryAgain
from hsx_host.procid import ProcId

STUBBORN = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
# Listens on argv[1] and starts two children that ignore SIGTERM; says their pids.
PARENT = f"""
import socket, subprocess, sys, time
s = socket.socket(); s.bind(("{HOST}", int(sys.argv[1]))); s.listen()
child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE)
child.stdout.readline()
late = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE)
late.stdout.readline()
print(child.pid, late.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    found: list[subprocess.Popen[str]] = []
    yield found
    for p in found:
        p.kill()
        p.wait()


def run(started: list[subprocess.Popen[str]], code: str, *args: str, session: bool = True) -> subprocess.Popen[str]:
    p = subprocess.Popen(
        [sys.executable, "-c", code, *args], stdout=subprocess.PIPE, text=True, start_new_session=session
    )
    started.append(p)
    return p


def ident(pid: int) -> ProcId:
    found = procid.identify(pid)
    assert found is not None
    return found


def parent(started: list[subprocess.Popen[str]], port: int, *, session: bool = True) -> tuple[ProcId, ProcId]:
    main, child, late = family(started, port, session=session)
    if not session:  # nothing would find it once its parent is gone
        procid.send(late, signal.SIGKILL)
    return main, child


def family(started: list[subprocess.Popen[str]], port: int, *, session: bool = True) -> list[ProcId]:
    p = run(started, PARENT, str(port), session=session)
    assert p.stdout is not None
    children = [ident(int(pid)) for pid in p.stdout.readline().split()]
    return [ident(p.pid), *children]


def test_listener_and_stop_of_the_whole_group(started: list[subprocess.Popen[str]]) -> None:
    port = free_port()
    assert processes.listeners(port) == []
    main, child = parent(started, port)
    assert processes.listeners(port) == [main.pid]
    assert f"pid {main.pid}, user" in processes.describe(main.pid)
    processes.stop(processes.owned(main), port=port, grace_s=0.5)
    assert not procid.alive(main)
    assert not procid.alive(child)
    assert not listens(port)


def test_neighbours_in_a_foreign_group_are_not_touched(started: list[subprocess.Popen[str]]) -> None:
    """A server that does not lead its group (started by a script): its siblings in the group are nobody's business."""
    port = free_port()
    neighbour = ident(run(started, "import time; time.sleep(600)", session=False).pid)
    main, child = parent(started, port, session=False)
    assert os.getpgid(main.pid) == os.getpgid(neighbour.pid) == os.getpgrp()
    processes.stop(processes.owned(main), port=port, grace_s=0.5)
    assert not procid.alive(main)
    assert not procid.alive(child)
    assert procid.alive(neighbour)


def test_orphans_of_a_killed_server_are_found_by_record_and_by_group(started: list[subprocess.Popen[str]]) -> None:
    for session in (True, False):
        port = free_port()
        main, child, late = family(started, port, session=session)
        tree = processes.owned(main)
        os.kill(main.pid, signal.SIGKILL)
        wait_for(lambda main=main: not procid.alive(main))
        assert procid.alive(child)
        known = {child} if session else {child, late}  # by the group, the other one is found without a record
        processes.stop(processes.Owned(main, tree.pgid, tree.sid, known), port=port, grace_s=0.2)
        assert not procid.alive(child)
        assert not procid.alive(late)


def test_a_group_that_may_be_somebody_elses_by_now_is_not_touched(started: list[subprocess.Popen[str]]) -> None:
    """The recorded main process is gone, and so is everything known of it: what bears its number as group and session
    may be the group of a later process with that pid, which has ended too."""
    port = free_port()
    main, *children = family(started, port)
    os.kill(main.pid, signal.SIGKILL)
    wait_for(lambda: not procid.alive(main))
    processes.stop(processes.Owned(main, main.pid, main.pid), port=port, grace_s=0.2)
    assert all(procid.alive(child) for child in children)
    for child in children:
        procid.send(child, signal.SIGKILL)


def test_what_runs_with_the_launchs_own_variable_belongs_to_it(started: list[subprocess.Popen[str]]) -> None:
    """A process of an extraction server that left its group and lost its parent before anybody looked."""
    code = (
        "import os, subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        "start_new_session=True); print(p.pid, flush=True)"
    )
    found = []
    for value in ("/spool/a/capture.json", "/spool/b/capture.json"):
        p = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HSX_CAPTURE_SPEC": value},
        )
        started.append(p)
        assert p.stdout is not None
        found.append(ident(int(p.stdout.readline())))
        main = ProcId(p.pid, found[0].start - 1)
        p.wait()
    tree = processes.Owned(main, main.pid, main.pid, variable="HSX_CAPTURE_SPEC=/spool/a/capture.json")
    processes.stop(tree, port=free_port(), grace_s=0.2)
    assert [procid.alive(p) for p in found] == [False, True]
    procid.send(found[1], signal.SIGKILL)


def test_a_reused_pid_is_somebody_else(started: list[subprocess.Popen[str]]) -> None:
    stranger = ident(run(started, "import time; time.sleep(600)").pid)
    was = ProcId(stranger.pid, stranger.start - 1)
    assert not procid.alive(was)
    assert not procid.send(was, signal.SIGKILL)
    processes.stop(processes.Owned(was, was.pid, was.pid, {was}), port=free_port(), grace_s=0.2)
    assert procid.alive(stranger)


def test_own_shared_memory_goes_and_others_stays(started: list[subprocess.Popen[str]]) -> None:
    own, shared = (f"/dev/shm/hsx-test-{os.getpid()}-{name}" for name in ("own", "shared"))
    folder = Path(f"/dev/shm/hsx-test-{os.getpid()}")
    folder.mkdir()
    log = folder / "server.log"  # as a model, or a data set, that somebody keeps in memory
    holder = "import sys, time; kept = [open(p, 'w') for p in sys.argv[1:]]; print('up', flush=True); time.sleep(600)"
    main, other = run(started, holder, own, shared, str(log)), run(started, holder, shared)
    for p in (main, other):
        assert p.stdout is not None
        p.stdout.readline()
    try:
        tree = processes.owned(ident(main.pid))
        assert set(tree.shm) == {own}
        processes.stop(tree, port=free_port(), grace_s=2.0)
        assert not os.path.exists(own)
        assert os.path.exists(shared)
        assert log.exists(), "a file in a folder is no segment"
    finally:
        shutil.rmtree(folder)
        for path in (own, shared):
            Path(path).unlink(missing_ok=True)


def test_recorded_shared_memory_that_is_another_file_now_stays() -> None:
    path = Path(f"/dev/shm/hsx-test-{os.getpid()}-again")
    path.write_text("somebody else's")
    try:
        gone = ProcId(2**22 + 1, 1)
        tree = processes.Owned(gone, gone.pid, gone.pid, set(), {str(path): path.stat().st_ino + 1})
        processes.stop(tree, port=free_port(), grace_s=0.1)
        assert path.exists()
    finally:
        path.unlink()


def smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for nvidia-smi, through PATH."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_stop_waits_until_the_driver_frees_the_memory(
    started: list[subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    main, _ = parent(started, port)
    count = tmp_path / "asked"
    lines = f"echo '{main.pid}, 1000'; echo '1, 5'"  # pid 1 holds memory too: not ours, not waited for
    smi(tmp_path, f"echo x >> {count}; [ $(wc -l < {count}) -ge 3 ] && echo '1, 5' || {{ {lines}; }}", monkeypatch)
    processes.stop(processes.owned(main), port=port, grace_s=0.5)
    assert len(count.read_text().split()) == 3


def test_memory_that_is_never_freed_is_an_error(
    started: list[subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    main, _ = parent(started, port)
    smi(tmp_path, f"echo '{main.pid}, 1000'", monkeypatch)
    monkeypatch.setattr(processes, "_DEVICE_WAIT_S", 0.2)
    with pytest.raises(TryAgain, match="device memory is still held"):
        processes.stop(processes.owned(main), port=port, grace_s=0.5)
    held = processes.stop(processes.Owned(main, main.pid, main.pid), port=port, grace_s=0.5, memory_proved=False)
    assert len(held) == 1
    assert held[0].startswith(f"1000 MiB: pid {main.pid}")


def test_a_server_that_ends_by_itself_as_it_is_stopped(
    started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the signal the last process of the group may go."""
    port = free_port()
    main, _, _ = family(started, port)

    def gone(pgid: int, number: int) -> None:
        killpg(pgid, signal.SIGKILL)
        raise ProcessLookupError

    killpg = os.killpg
    monkeypatch.setattr(processes.os, "killpg", gone)
    assert processes.stop(processes.owned(main), port=port, grace_s=5.0) == []
    assert not procid.alive(main)


@pytest.mark.parametrize(
    ("listens_on", "host", "in_the_way"),
    [
        ("127.0.0.2", "127.0.0.1", False),
        ("127.0.0.1", "127.0.0.1", True),
        ("0.0.0.0", "127.0.0.1", True),
        ("127.0.0.2", "0.0.0.0", True),
        ("127.0.0.1", "::", True),
        ("::", "127.0.0.1", True),
        ("::1", "127.0.0.1", False),
        ("::ffff:127.0.0.1", "127.0.0.1", True),
        ("fe80::1", "fe80::1%lo", True),
        ("127.0.0.1", "localhost", True),
        ("127.0.0.2", "no-such-name.invalid", True),
        ("127.0.0.2", "", True),
    ],
)
def test_who_is_in_the_way_of_a_server(
    listens_on: str, host: str, in_the_way: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = SimpleNamespace(pid=77, status="LISTEN", laddr=SimpleNamespace(port=7, ip=listens_on))
    monkeypatch.setattr(processes.psutil, "net_connections", lambda kind: [other])
    assert processes.listeners(7, host) == ([77] if in_the_way else [])


def test_no_driver_no_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert devices.compute_apps() == []
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    smi(tmp_path, "echo 'no driver' >&2; exit 9", monkeypatch)
    assert devices.compute_apps() == []
    smi(tmp_path, "echo '77, [N/A]'", monkeypatch)
    assert devices.compute_apps() == [devices.DeviceUse(77, 0)]


def test_a_dying_socket_is_no_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil finds no owner of a socket whose process dies while it looks; an owner that stays hidden is a stranger."""
    dying = SimpleNamespace(pid=None, status="LISTEN", laddr=SimpleNamespace(port=7, ip=HOST))
    looks = [[dying], []]
    monkeypatch.setattr(processes, "_DYING_S", 0.0)
    monkeypatch.setattr(processes.psutil, "net_connections", lambda kind: looks.pop(0))
    assert processes.listeners(7) == []
    monkeypatch.setattr(processes.psutil, "net_connections", lambda kind: [dying])
    assert processes.listeners(7) == [0]
