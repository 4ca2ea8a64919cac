"""Who a process is: its pid and its start time together, so that a reused pid is never taken for the old process."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcId:
    """One process. ``start`` is field 22 of /proc/PID/stat (clock ticks since boot), which no clock change moves."""

    pid: int
    start: int


def boot_id() -> str:
    """The kernel's id of this boot: pids and start times mean nothing across boots."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int | None:
    """Start time of a living process in ticks since boot; None where it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(")") + 2 :].split()  # the name may hold spaces and brackets
    return None if fields[0] in "ZX" else int(fields[19])


def identify(pid: int) -> ProcId | None:
    """The living process with this pid, or None."""
    start = start_ticks(pid)
    return None if start is None else ProcId(pid, start)


def alive(proc: ProcId) -> bool:
    """Whether exactly this process still runs (a zombie does not)."""
    return start_ticks(proc.pid) == proc.start


def session(leader: ProcId) -> list[ProcId]:
    """The living processes of the session that ``leader`` leads or led; a session's id outlives its leader."""
    now = start_ticks(leader.pid)
    if now is not None and now != leader.start:
        return []  # a pid is free for another process only once nothing of its session is left
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            same = os.getsid(int(name)) == leader.pid
        except ProcessLookupError:
            continue
        one = identify(int(name)) if same else None
        if one is not None and one.start >= leader.start:
            found.append(one)
    return found


def send(proc: ProcId, number: signal.Signals) -> bool:
    """Signal exactly this process; False where it is gone or another user's.

    A pidfd closes the gap between the check and the signal.
    """
    try:
        handle = os.pidfd_open(proc.pid)
    except ProcessLookupError:
        return False
    try:
        if not alive(proc):
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(handle)


def age_s(proc: ProcId) -> float:
    """Seconds since a process started, by the clock of its start time: a change of the time of day does not count."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - proc.start / os.sysconf("SC_CLK_TCK")
