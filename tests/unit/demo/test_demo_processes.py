"""What was started is ended with all that hangs below it; what is not ours is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from hsx_demo.errors import DemoError
from hsx_demo.processes import Child, alive, start, stop, wait_until, with_variable

SLEEP = "import time; time.sleep(600)"
# a process that ignores SIGTERM and has a grandchild in a session of its own
STUBBORN = f"""
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
p = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True)
print(p.pid, flush=True)
time.sleep(600)
"""


def test_stop_ends_the_process_and_a_grandchild_of_another_session(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = start([sys.executable, "-c", STUBBORN], log=log, name="stubborn")
    wait_until(lambda: log.read_text().strip().isdigit(), child, what="it", timeout_s=30)
    pid = int(log.read_text())
    grandchild = Child("grandchild", pid, int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]), "")
    assert alive(grandchild)
    stop(child, grace_s=0.2)
    assert not alive(child)
    assert not alive(grandchild)


def test_a_reused_pid_is_not_stopped(tmp_path: Path) -> None:
    child = start([sys.executable, "-c", SLEEP], log=tmp_path / "log", name="another")
    try:
        stop(replace(child, ticks=child.ticks - 1), grace_s=0.1)
        assert alive(child)
    finally:
        stop(child)


def test_waiting_ends_at_once_with_the_log_where_the_process_ends(tmp_path: Path) -> None:
    child = start([sys.executable, "-c", "print('why'); raise SystemExit(3)"], log=tmp_path / "log", name="x")
    with pytest.raises(DemoError, match=r"the thing ended while starting(?s:.*)why"):
        wait_until(lambda: False, child, what="the thing", timeout_s=60)


def test_marked_processes_are_found_and_others_are_not(tmp_path: Path) -> None:
    token = uuid.uuid4().hex
    marked = start([sys.executable, "-c", SLEEP], log=tmp_path / "a", name="a", env={**os.environ, "T_MARK": token})
    other = start(
        [sys.executable, "-c", SLEEP], log=tmp_path / "b", name="b", env={**os.environ, "T_MARK": token + "x"}
    )
    try:
        wait_until(lambda: bool(with_variable("T_MARK", token)), marked, what="exec", timeout_s=30)
        assert [c.pid for c in with_variable("T_MARK", token)] == [marked.pid]
    finally:
        stop(marked)
        stop(other)


def test_a_zombie_is_not_alive(tmp_path: Path) -> None:
    p = subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
    child = start([sys.executable, "-c", "pass"], log=tmp_path / "log", name="short")
    os.kill(p.pid, signal.SIGKILL)
    p.wait()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not alive(child)
