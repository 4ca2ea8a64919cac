"""A server's processes: who listens on a port, what belongs to a server, and stopping exactly that.

A process belongs to a server when it is its main process, a descendant, a member of the process group or session that
the main process leads, or was one of these when hsx last looked (a reparented scheduler). Of a systemd unit's server,
the members of the unit's control group belong to it, and of an extraction server, whoever runs under its capture spec.
Names decide nothing, and numbers only where they can't have passed to another process.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hsx_host import devices, procid, servers, shm
from hsx_host.errors import TryAgain
from hsx_host.procid import ProcId
from hsx_host.progress import log

_KILL_WAIT_S = 30.0
_DEVICE_WAIT_S = 180.0
_DYING_S = 0.5
_ANY = ("", "0.0.0.0", "::")


@dataclass
class Owned:
    """The processes of one server. ``shm`` maps the /dev/shm files that only they hold to their inodes.

    :param cgroup: the control group of the unit that runs it, as /proc/PID/cgroup spells it; "" where none does.
    :param variable: ``NAME=VALUE`` of the environment, which only this launch has; "" where there is no such mark.
    """

    main: ProcId
    pgid: int
    sid: int
    members: set[ProcId] = field(default_factory=set)
    shm: dict[str, int] = field(default_factory=dict)
    cgroup: str = ""
    variable: str = ""

    def refresh(self) -> None:
        """Add what belongs to the server now; what was known before stays known."""
        found = self.members | {self.main}
        living = {p for p in found if procid.alive(p)}
        for proc in living:
            found |= _descendants(proc)
        found |= self._group_and_session(living)
        found |= self._cgroup() | self._marked()
        mine = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
        self.members = {p for p in found if p.pid not in mine}
        self.shm.update(shm.held_only_by({p.pid for p in self.living()}))

    def living(self) -> set[ProcId]:
        return {p for p in self.members | {self.main} if procid.alive(p)}

    def _group_and_session(self, known: set[ProcId]) -> set[ProcId]:
        """Members of the group and the session that the main process leads, or led.

        The ids outlive their leader, and the kernel gives them to nobody else while one member lives: once the leader
        is dead, they count only where a known process of the server is still in them.
        """
        leads_group, leads_session = self.pgid == self.main.pid, self.sid == self.main.pid
        if not (leads_group or leads_session):
            return set()
        everybody = list(_all_processes())
        if not procid.alive(self.main):
            ids = {(pgid, sid) for pid, start, pgid, sid in everybody if ProcId(pid, start) in known}
            leads_group = leads_group and any(pgid == self.pgid for pgid, _ in ids)
            leads_session = leads_session and any(sid == self.sid for _, sid in ids)
        return {
            ProcId(pid, start)
            for pid, start, pgid, sid in everybody
            if ((leads_group and pgid == self.pgid) or (leads_session and sid == self.sid)) and start >= self.main.start
        }

    def _cgroup(self) -> set[ProcId]:
        """Members of the unit's control group, while the main process lives: later the group may be a new start's."""
        if not self.cgroup or not procid.alive(self.main):
            return set()
        return {ProcId(pid, start) for pid, start, _, _ in _all_processes() if self.cgroup in cgroups(pid)}

    def _marked(self) -> set[ProcId]:
        """Processes that run with the launch's own variable, wherever they were reparented to."""
        if not self.variable:
            return set()
        mark = self.variable.encode()
        return {
            ProcId(pid, start)
            for pid, start, _, _ in _all_processes()
            if start >= self.main.start and mark in _environ(pid)
        }


def owned(main: ProcId) -> Owned:
    """The tree of a running server."""
    server = Owned(main, os.getpgid(main.pid), os.getsid(main.pid))
    server.refresh()
    return server


def listeners(port: int, host: str = "") -> list[int]:
    """Pids that listen on a TCP port; 0 stands for a listener whose process this user may not see.

    :param host: only those in the way of a server with this ``--host``: on the same address, or where either of the two
        has all addresses (a proxy may have the port on another one). "" means everybody.
    """
    found = _listeners(port, host)
    if 0 in found:  # a socket whose process died during the look has no owner either, and is gone a moment later
        time.sleep(_DYING_S)
        found = _listeners(port, host)
    return sorted(found)


def addresses(port: int) -> set[str]:
    """The addresses on which somebody listens on a TCP port."""
    return {ip for _, ip in _sockets(port)}


def _listeners(port: int, host: str) -> set[int]:
    wanted = set() if host in _ANY else _resolved(host)  # a name that nobody knows may be any address
    return {pid for pid, ip in _sockets(port) if not wanted or ip in _ANY or _plain(ip) in wanted}


def _sockets(port: int) -> set[tuple[int, str]]:
    """(pid, address) of whoever listens on a TCP port."""
    return {
        (c.pid or 0, c.laddr.ip)
        for c in psutil.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.laddr.port == port
    }


def _resolved(host: str) -> set[str]:
    try:
        return {_plain(str(found[4][0])) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return set()


def _plain(ip: str) -> str:
    """One spelling of an address: no zone, and IPv4 where it is one in IPv6's clothes."""
    address = ipaddress.ip_address(ip.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def describe(pid: int) -> str:
    """Pid, user and command of a process, for an error message; what looks like a secret in it is left out."""
    if pid == 0:
        return "a process of another user"
    try:
        p = psutil.Process(pid)
        return f"pid {pid}, user {p.username()}, command {' '.join(servers.shown(p.cmdline()))[:300]!r}"
    except psutil.Error:
        return f"pid {pid} (not seen from here)"


def cgroups(pid: int) -> set[str]:
    """The control groups of a process, as systemd names them, with all groups above; the root is none."""
    found = set()
    try:
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controller, path = line.split(":", 2)
            if controller in ("", "name=systemd"):
                found |= {p for p in (path, *map(str, Path(path).parents)) if p != "/"}
    except (OSError, ValueError):
        pass  # gone meanwhile
    return found


def stop(server: Owned, *, port: int, grace_s: float, memory_proved: bool = True) -> list[str]:
    """End a server and prove it: no process left, port closed, no device memory held, no shared memory left. Gives who
    else still holds device memory, in words: strangers are named and left alone.

    SIGTERM goes to the main process's own group (to the main process alone where it leads none), ``grace_s`` seconds
    later SIGKILL to what is left, each process by pid and start time. TryAgain where something can't be ended.

    :param memory_proved: device memory that the driver still counts for the dead processes at the deadline is an error;
        otherwise it is told, and the answer names it.
    """
    server.refresh()
    if procid.alive(server.main):
        if server.pgid == server.main.pid:
            # Gone since the look, or another user's: told below, where it does not end.
            with contextlib.suppress(ProcessLookupError, PermissionError):
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
            fix="look what keeps them: a hung device or file system, or another user's rights",
        )
    held = _prove_gone(server, port, memory_proved)
    shm.remove(server.shm)
    return held


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


def _prove_gone(server: Owned, port: int, memory_proved: bool) -> list[str]:
    """The port is no longer this server's, and the driver counts no memory for its processes; who else has some."""
    pids = {p.pid for p in server.members} | {server.main.pid}
    deadline = time.monotonic() + _DEVICE_WAIT_S
    while True:
        uses = _device_uses()
        holding = [u for u in uses if u.pid in pids and not _reused(u.pid, server)]
        listening = [p for p in listeners(port) if p in pids and not _reused(p, server)]
        if not holding and not listening:
            return holders(uses)
        if time.monotonic() >= deadline:
            break
        time.sleep(1.0)
    if not listening and not memory_proved:
        told = "; ".join(f"{u.mebibytes} MiB for pid {u.pid}, which is dead" for u in holding)
        log(f"the driver still counts device memory: {told}; should the next server lack it, the driver needs a reset")
        return holders(uses)
    raise TryAgain(
        f"the server's processes ended, but port {port} or device memory is still held: "
        f"{'; '.join(holders(holding)) or listening}",
        field="server",
        value=server.main.pid,
        fix="look at nvidia-smi; a driver that does not free memory needs a reset by hand",
    )


def holders(uses: list[devices.DeviceUse]) -> list[str]:
    """Who holds device memory, and how much, in words."""
    return [f"{u.mebibytes} MiB: {describe(u.pid)}" for u in uses]


def _device_uses() -> list[devices.DeviceUse]:
    """The driver's list. One that does not answer proves nothing, and must not keep production from coming back."""
    try:
        return devices.compute_apps()
    except TryAgain as e:
        log(f"device memory can't be proved to be free: {e}")
        return []


def _reused(pid: int, server: Owned) -> bool:
    """Whether the pid now is a living process that is not the server's."""
    now = procid.identify(pid)
    return now is not None and now not in server.members


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


def _environ(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone meanwhile, or another user's
        return []


def _pid(proc: ProcId) -> int:
    return proc.pid
