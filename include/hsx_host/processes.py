"""A server's processes: who listens on a port, what belongs to a server, and stopping exactly that.

A process belongs to a server when it is its main process, a descendant, a member of the process group or session that
the main process leads, or was one of these when hsx last looked (a reparented scheduler). Names decide nothing.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hsx_host import devices, procid
from hsx_host.errors import TryAgain
from hsx_host.procid import ProcId
from hsx_host.progress import log

SHM = "/dev/shm/"
_KILL_WAIT_S = 30.0
_DEVICE_WAIT_S = 180.0
_DYING_S = 0.5


@dataclass
class Owned:
    """The processes of one server. ``shm`` maps the /dev/shm files that only they hold to their inodes."""

    main: ProcId
    pgid: int
    sid: int
    members: set[ProcId] = field(default_factory=set)
    shm: dict[str, int] = field(default_factory=dict)

    def refresh(self) -> None:
        """Add what belongs to the server now; what was known before stays known."""
        found = self.members | {self.main}
        living = {p for p in found if procid.alive(p)}
        for proc in living:
            found |= _descendants(proc)
        found |= self._group_and_session()
        mine = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
        self.members = {p for p in found if p.pid not in mine}
        self.shm.update(_shm_held_only_by(self.living()))

    def living(self) -> set[ProcId]:
        return {p for p in self.members | {self.main} if procid.alive(p)}

    def _group_and_session(self) -> set[ProcId]:
        """Members of the group and the session that the main process leads (or led: ids outlive their leader)."""
        leads_group, leads_session = self.pgid == self.main.pid, self.sid == self.main.pid
        now = procid.start_ticks(self.main.pid)
        if not (leads_group or leads_session) or (now is not None and now != self.main.start):
            return set()  # the pid went to another process: its group is another group
        found = set()
        for pid, start, pgid, sid in _all_processes():
            same = (leads_group and pgid == self.pgid) or (leads_session and sid == self.sid)
            if same and start >= self.main.start:
                found.add(ProcId(pid, start))
        return found


def owned(main: ProcId) -> Owned:
    """The tree of a running server."""
    server = Owned(main, os.getpgid(main.pid), os.getsid(main.pid))
    server.refresh()
    return server


def listeners(port: int) -> list[int]:
    """Pids that listen on a TCP port; 0 stands for a listener whose process this user may not see."""
    found = _listeners(port)
    if 0 in found:  # a socket whose process died during the look has no owner either, and is gone a moment later
        time.sleep(_DYING_S)
        found = _listeners(port)
    return sorted(found)


def _listeners(port: int) -> set[int]:
    return {
        c.pid or 0 for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port
    }


def describe(pid: int) -> str:
    """Pid, user and command of a process, for an error message."""
    if pid == 0:
        return "a process of another user"
    try:
        p = psutil.Process(pid)
        return f"pid {pid}, user {p.username()}, command {' '.join(p.cmdline())[:300]!r}"
    except psutil.Error:
        return f"pid {pid}"


def stop(server: Owned, *, port: int, grace_s: float) -> None:
    """End a server and prove it: no process left, port closed, no device memory held, no shared memory left.

    SIGTERM goes to the main process's own group (to the main process alone where it leads none), ``grace_s`` seconds
    later SIGKILL to what is left, each process by pid and start time. TryAgain where something can't be ended.
    """
    server.refresh()
    if procid.alive(server.main):
        if server.pgid == server.main.pid:
            os.killpg(server.pgid, signal.SIGTERM)
        else:
            procid.send(server.main, signal.SIGTERM)
        _wait(server, grace_s)
    else:  # a crashed main process: what it left behind gets its own chance to end
        for proc in server.living():
            procid.send(proc, signal.SIGTERM)
        _wait(server, min(grace_s, 10.0))
    left = server.living()
    if left:
        log(
            f"after {grace_s:.0f} s still there, SIGKILL: " + "; ".join(describe(p.pid) for p in sorted(left, key=_pid))
        )
        deadline = time.monotonic() + _KILL_WAIT_S
        while left and time.monotonic() < deadline:
            for proc in left:
                procid.send(proc, signal.SIGKILL)
            time.sleep(0.1)
            server.refresh()
            left = server.living()
    if left:
        raise TryAgain(
            "processes of the server can't be ended: " + "; ".join(describe(p.pid) for p in sorted(left, key=_pid)),
            field="server",
            value=server.main.pid,
            fix="look what keeps them in the kernel (a hung device or file system)",
        )
    _prove_gone(server, port)
    _remove_shm(server.shm)


def _wait(server: Owned, seconds: float) -> None:
    """Until no process of the server is left; looks again each time, since a dying server may still start some."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not server.living():
            server.refresh()
            if not server.living():
                return
        time.sleep(0.1)
        if procid.alive(server.main):
            server.members |= _descendants(server.main)


def _prove_gone(server: Owned, port: int) -> None:
    """The port is no longer this server's, and the driver counts no memory for its processes."""
    pids = {p.pid for p in server.members} | {server.main.pid}
    deadline = time.monotonic() + _DEVICE_WAIT_S
    while time.monotonic() < deadline:
        uses = devices.compute_apps()
        holding = [u for u in uses if u.pid in pids and not _reused(u.pid, server)]
        listening = [p for p in listeners(port) if p in pids and not _reused(p, server)]
        if not holding and not listening:
            for use in uses:
                log(f"device memory of somebody else, left alone: {use.mebibytes} MiB, {describe(use.pid)}")
            return
        time.sleep(1.0)
    raise TryAgain(
        f"the server's processes ended, but port {port} or device memory is still held: {holding or listening}",
        field="server",
        value=server.main.pid,
        fix="look at nvidia-smi; a driver that does not free memory needs a reset by hand",
    )


def _reused(pid: int, server: Owned) -> bool:
    """Whether the pid now is a living process that is not the server's."""
    now = procid.identify(pid)
    return now is not None and now not in server.members


def _remove_shm(segments: dict[str, int]) -> None:
    """Remove recorded segments that are still the same file and that no process holds."""
    left = {path: inode for path, inode in segments.items() if _inode(path) == inode}
    held = _shm_of_everybody() if left else set()
    for path in sorted(set(left) - held):
        Path(path).unlink(missing_ok=True)
        log(f"removed the shared memory that the server left: {path}")


def _descendants(proc: ProcId) -> set[ProcId]:
    try:
        children = psutil.Process(proc.pid).children(recursive=True)
    except psutil.Error:
        return set()
    return {p for p in (procid.identify(c.pid) for c in children) if p is not None}


def _all_processes() -> Iterable[tuple[int, int, int, int]]:
    """(pid, start, pgid, sid) of every process but zombies."""
    for pid in psutil.pids():
        start = procid.start_ticks(pid)
        if start is None:
            continue
        try:
            yield pid, start, os.getpgid(pid), os.getsid(pid)
        except OSError:
            continue


def _shm_held_only_by(procs: set[ProcId]) -> dict[str, int]:
    own = {path for p in procs for path in _shm_of(p.pid)}
    if not own:
        return {}
    others = _shm_of_everybody(without={p.pid for p in procs})
    inodes = {path: _inode(path) for path in own - others}
    return {path: inode for path, inode in inodes.items() if inode is not None}


def _shm_of_everybody(without: set[int] | None = None) -> set[str]:
    return {path for pid in psutil.pids() if pid not in (without or set()) for path in _shm_of(pid)}


def _shm_of(pid: int) -> set[str]:
    """Files below /dev/shm that a process has mapped or open; deleted ones are of no interest."""
    found = set()
    try:
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            if SHM in line:
                found.add(line[line.index(SHM) :])
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(fd)
            if target.startswith(SHM):
                found.add(target)
    except OSError:
        pass  # gone meanwhile, or another user's
    return {path for path in found if not path.endswith(" (deleted)")}


def _inode(path: str) -> int | None:
    try:
        return os.lstat(path).st_ino
    except FileNotFoundError:
        return None


def _pid(proc: ProcId) -> int:
    return proc.pid
