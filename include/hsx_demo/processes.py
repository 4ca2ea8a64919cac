"""Processes that the demo starts, kept by pid and start time, and ended by process group and session.

A pid alone may be another process by the time ``make down`` runs; with its start time it names one process only.
Linux: /proc tells the start time, the session and the group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hsx_demo.errors import DemoError


@dataclass(frozen=True)
class Child:
    """A started process, leader of its own session. ``ticks`` is its start time in clock ticks since boot."""

    name: str
    pid: int
    ticks: int
    log: str


def start(
    command: Sequence[str],
    *,
    log: Path,
    name: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Child:
    """Start ``command`` in a session of its own; stdout and stderr are appended to ``log``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        p = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=None if env is None else dict(env),
            cwd=cwd,
            start_new_session=True,
        )
    stat = _stat(p.pid)
    return Child(name=name, pid=p.pid, ticks=stat.ticks if stat else 0, log=str(log))


def alive(child: Child) -> bool:
    """Whether that very process still runs (a zombie does not)."""
    _reap(child.pid)
    stat = _stat(child.pid)
    return stat is not None and stat.ticks == child.ticks and stat.state != "Z"


def stop(*children: Child, grace_s: float = 20.0) -> None:
    """SIGTERM to the processes, then to what is left of their descendants and sessions, then SIGKILL.

    Descendants are listed before the first signal: sshd gives each connection a session of its own, and a process
    whose parent is gone can no longer be tied to us. Does nothing where everything is gone.
    """
    family = {c for child in children for c in _descendants(child)}
    for child in children:
        if alive(child):
            _signal(child.pid, signal.SIGTERM)
    _wait_gone(children, grace_s)
    for sig, pause in ((signal.SIGTERM, min(grace_s, 3.0)), (signal.SIGKILL, 3.0)):
        # a session's id can't be used anew while members live, so what carries ours is ours
        left = [c for c in {*family, *_sessions(children)} if alive(c)]
        for c in left:
            _signal(c.pid, sig)
        _wait_gone(left, pause)
    for child in children:
        _reap(child.pid)


def wait_until(ready: Callable[[], bool], child: Child, *, what: str, timeout_s: float) -> float:
    """Wait for ``ready``; the seconds it took. Fails at once, with the log's end, where the process ends before."""
    began = time.monotonic()
    while not ready():
        if not alive(child):
            raise DemoError(f"{what} ended while starting; the end of {child.log}:\n{tail(child.log)}")
        if time.monotonic() - began > timeout_s:
            raise DemoError(f"{what} was not ready after {timeout_s:.0f} s; the end of {child.log}:\n{tail(child.log)}")
        time.sleep(0.2)
    return time.monotonic() - began


def with_variable(name: str, value: str) -> list[Child]:
    """Session leaders first, all processes that were started with ``name=value`` in their environment.

    Only a token that nobody else has is a proof of belonging; this process itself is never among them.
    """
    wanted = f"{name}={value}".encode()
    found = []
    for pid, stat in _processes().items():
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if wanted in environ and pid != os.getpid():
            found.append((stat.session != pid, Child(command.strip()[:80], pid, stat.ticks, "")))
    return [child for _, child in sorted(found, key=lambda item: (item[0], item[1].ticks))]


def tail(path: str | Path, lines: int = 25) -> str:
    """The last lines of a log, or a word on why there are none."""
    try:
        with Path(path).open("rb") as f:
            f.seek(max(0, os.fstat(f.fileno()).st_size - 16384))
            text = f.read().decode(errors="replace")
    except OSError as e:
        return f"(no log: {e})"
    return "\n".join(text.splitlines()[-lines:])


@dataclass(frozen=True)
class _Stat:
    state: str
    parent: int
    session: int
    ticks: int


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # the command stands in brackets and may hold anything; fields are counted from its end (proc(5): state is field 3)
    fields = text[text.rindex(")") + 2 :].split()
    return _Stat(state=fields[0], parent=int(fields[1]), session=int(fields[3]), ticks=int(fields[19]))


def _sessions(children: Sequence[Child]) -> list[Child]:
    """Living members of the children's sessions that are not older than them (an older one would be a stranger's)."""
    table = _processes()
    # a pid that another process has by now was free before: then no member of our session lived any more
    leaders = {c.pid: c for c in children if c.pid not in table or table[c.pid].ticks == c.ticks}
    found = []
    for pid, stat in table.items():
        leader = leaders.get(stat.session)
        if leader and stat.ticks >= leader.ticks > 0:
            found.append(Child(leader.name, pid, stat.ticks, leader.log))
    return found


def _descendants(child: Child) -> list[Child]:
    """The child and everything below it, as long as the child lives."""
    if not alive(child):
        return []
    table, found, front = _processes(), {child.pid}, {child.pid}
    while front:
        front = {pid for pid, stat in table.items() if stat.parent in front} - found
        found |= front
    return [Child(child.name, pid, table[pid].ticks, child.log) for pid in found if pid in table]


def _processes() -> dict[int, _Stat]:
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return {pid: stat for pid in pids if (stat := _stat(pid)) is not None and stat.state != "Z"}


def _wait_gone(children: Sequence[Child], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(alive(c) for c in children) and time.monotonic() < deadline:
        time.sleep(0.05)


def _signal(pid: int, sig: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, sig)


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
