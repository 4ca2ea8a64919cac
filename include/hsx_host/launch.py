"""Starting one server: detached, recorded before it runs, waited for until it gives real tokens."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import IO

import psutil

from hsx_host import (
    adopt,
    capture_server,
    envfile,
    health,
    inherited,
    managers,
    patch,
    processes,
    procid,
    servers,
    state,
)
from hsx_host.contract import RunSpec, ServerSettings
from hsx_host.errors import TryAgain
from hsx_host.procid import ProcId
from hsx_host.progress import log

_KEEP_LOGS = 10
_LOG_ROOM = 1 << 20

# The child waits until its record stands: a launcher that dies in between leaves no server that nobody knows of. Then
# it takes on what production had of its own starter. Python in a C locale sets LC_CTYPE for itself (PEP 538):
# ``locale`` says whether the server has it.
_GATE = """import json, os, resource, sys
gate, how = int(sys.argv[1]), json.loads(sys.argv[2])
os.read(gate, 1) == b"1" or os._exit(1)
os.close(gate)
how["locale"] or os.environ.pop("LC_CTYPE", None)
os.umask(how["umask"])
def take(what, call, *args):
    try:
        call(*args)
    except (OSError, ValueError) as e:
        print(f"hsx: {what} can't be set as production had it: {e}", flush=True)
for name, (soft, hard) in how["limits"].items():
    take(f"limit {name}", resource.setrlimit, int(name), (soft, hard))
if how["affinity"]:
    take("the CPU affinity", os.sched_setaffinity, 0, how["affinity"])
if how["nice"] not in (None, os.getpriority(os.PRIO_PROCESS, 0)):
    take(f"nice {how['nice']}", os.setpriority, os.PRIO_PROCESS, 0, how["nice"])
os.execv(how["path"], how["argv"])
"""
_LOOK_EVERY_S = 5.0


def settings_of(spec: RunSpec, mode: str) -> ServerSettings:
    return spec.extraction if mode == "extraction" else spec.production


def hash_of(spec: RunSpec, mode: str) -> str:
    """The launch hash that a server of this mode has when it is what the spec says."""
    plugin = patch.source_id() if mode == "extraction" else ""
    return servers.launch_hash(spec.host.python, settings_of(spec, mode), plugin)


def start(spec: RunSpec, mode: str) -> state.ServerState:
    """Start a server of ``mode`` and wait until it is ready, soaked and (extraction) proved; its record.

    Where that fails, what was started is stopped again and the error is raised. The caller holds the transition.
    """
    server = _by_manager(spec) if mode == "production" and managers.managed(spec) else _spawn(spec, mode)
    try:
        return finish(spec, server)
    except BaseException:
        stop(spec, server, why="the start failed", memory_proved=False)  # the start's own error is the one to see
        raise


def finish(spec: RunSpec, server: state.ServerState) -> state.ServerState:
    """Wait for a started server until it is ready, and record it as running."""
    settings = settings_of(spec, server.mode)
    watched = _Watched(spec, server)
    deadline_s = max(settings.start_timeout_s - procid.age_s(watched.main), 1.0)
    waited = health.wait_until_ready(
        settings, alive=watched.alive, log_file=server.log, deadline_s=deadline_s, what=server.mode
    )
    if server.pid not in _launchers(settings.port):
        raise TryAgain(
            f"port {settings.port} answers, but not from the server that was started",
            field="port",
            value=settings.port,
            fix="end what holds the port",
        )
    if server.mode == "extraction":
        servers.check_bound(settings.port, processes.addresses(settings.port))
        capture_server.prove_ready(spec, Path(server.spool), server.plugin_id)
    if server.mode == "production" and managers.managed(spec) and not inherited.base(spec).argv:
        inherited.remember(spec, adopt.launch_of(spec) or watched.main)  # the first that hsx has seen of it
    ready_s = round(procid.age_s(watched.main), 3)
    health.soak(settings, server.mode)
    if server.mode == "extraction":  # production stays as its owner runs it
        health.freeze_garbage(settings, server.mode)
    server = _look(replace(server, phase="running", ready_s=ready_s))
    record(spec, server)
    state.journal(spec, "server ready", mode=server.mode, server_pid=server.pid, ready_s=server.ready_s)
    log(f"{server.mode} server is ready (pid {server.pid}, waited {waited:.1f} s)")
    return server


class _Watched:
    """A server that starts: whether it lives, its children recorded as they come. Should it crash before it is ready,
    they are known."""

    def __init__(self, spec: RunSpec, server: state.ServerState) -> None:
        self.spec, self.server, self.main = spec, server, ProcId(server.pid, server.start)
        self._next = time.monotonic()

    def alive(self) -> bool:
        if not procid.alive(self.main):
            return False
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _LOOK_EVERY_S
            seen = _look(self.server)
            if seen != self.server:
                self.server = seen
                record(self.spec, seen)
        return True


def record(spec: RunSpec, server: state.ServerState) -> None:
    """Keep the record of a server. A disk that takes none keeps production from nothing: it is found by its port and
    proved by its arguments then. An extraction server is not run without a record."""
    try:
        state.write_server(spec, server)
    except (OSError, TryAgain) as e:
        if server.mode != "production" and server.phase != "stopped":
            raise
        log(f"the {server.mode} server could not be recorded: {e}")


def stop(spec: RunSpec, server: state.ServerState, why: str, *, memory_proved: bool = True) -> None:
    """Stop a recorded server, or what a crash left of it, and record that.

    :param memory_proved: False where production comes next: device memory that the driver still counts for dead
        processes is told, and keeps it from nothing.
    """
    settings = settings_of(spec, server.mode)
    state.journal(spec, "stopping server", mode=server.mode, server_pid=server.pid, why=why)
    log(f"stopping the {server.mode} server (pid {server.pid}): {why}")
    tree = owned(server)
    if server.mode == "production" and procid.alive(tree.main):
        managers.stop(spec)
    others = processes.stop(tree, port=server.port, grace_s=settings.stop_grace_s, memory_proved=memory_proved)
    record(spec, replace(server, phase="stopped", tree=[], shm={}))
    state.journal(spec, "server stopped", mode=server.mode, server_pid=server.pid, device_memory_of_others=others)
    for other in others:
        log(f"device memory is held by somebody else, who is left alone: {other}")


def adopted(spec: RunSpec, found: adopt.Found, port: int) -> state.ServerState:
    """The record of a server that was found on the port."""
    mode = "extraction" if found.spool else "production"
    tree = processes.owned(found.main)
    server = state.ServerState(
        mode=mode,
        phase="running",
        pid=found.main.pid,
        start=found.main.start,
        pgid=tree.pgid,
        sid=tree.sid,
        boot_id=procid.boot_id(),
        port=port,
        launch_hash=hash_of(spec, mode) if mode == "production" else "",
        plugin_id="",
        spool=found.spool,
        log="",
        since=time.time(),
        ready_s=0.0,
        cgroup=managers.cgroup(spec) if mode == "production" else "",
    )
    if mode == "production":
        inherited.remember(spec, found.launch)
    server = _look(server)
    record(spec, server)
    state.journal(spec, f"{mode} server taken over", server_pid=server.pid)
    return server


def owned(server: state.ServerState) -> processes.Owned:
    """The processes of a recorded server, as far as they are known."""
    tree = processes.Owned(
        ProcId(server.pid, server.start),
        server.pgid,
        server.sid,
        {ProcId(*pair) for pair in server.tree},
        dict(server.shm),
        cgroup=server.cgroup,
        variable=f"{servers.CAPTURE_VARIABLE}={server.spool}/capture.json" if server.spool else "",
    )
    tree.refresh()
    return tree


def _by_manager(spec: RunSpec) -> state.ServerState:
    """Have production's manager start it, and find the process: by the manager's word, else by the port."""
    settings = spec.production
    state.journal(spec, "production is asked for", manager=spec.manager, unit=spec.service.unit)
    managers.start(spec)
    deadline = time.monotonic() + settings.start_timeout_s
    while True:
        main = managers.main(spec)
        if main is None and not spec.service.unit and not spec.service.pid_command:
            found = adopt.production(spec)
            main = found.main if found else None
        if main is not None:
            break
        if managers.ended(spec) or time.monotonic() >= deadline:
            raise TryAgain(
                "production was asked for, and no process of it is there",
                field="production.manager",
                value=spec.service.unit or spec.manager,
                fix="read what its manager says (systemctl status, the container's log)",
            )
        time.sleep(0.5)
    server = state.ServerState(
        mode="production",
        phase="starting",
        pid=main.pid,
        start=main.start,
        pgid=os.getpgid(main.pid),
        sid=os.getsid(main.pid),
        boot_id=procid.boot_id(),
        port=settings.port,
        launch_hash=hash_of(spec, "production"),
        plugin_id="",
        spool="",
        log="",
        since=time.time(),
        ready_s=0.0,
        tree=[[main.pid, main.start]],
        cgroup=managers.cgroup(spec),
    )
    record(spec, server)
    state.journal(spec, "server started", mode="production", server_pid=main.pid, manager=spec.manager)
    log(f"production is started by its manager ({spec.manager}, pid {main.pid})")
    return server


def _spawn(spec: RunSpec, mode: str) -> state.ServerState:
    """Start the process of a server; its record stands before it may run."""
    settings, launch_hash = settings_of(spec, mode), hash_of(spec, mode)
    base, variables = inherited.for_own_launches(spec), envfile.variables(settings)
    plugin_id, spool, extra = "", "", {}
    if mode == "extraction":
        plugin_id, plugin_dir = patch.apply(spec)
        spool_dir, file = capture_server.prepare_spool(spec, plugin_id, launch_hash)
        spool = str(spool_dir)
        extra = {"plugin_dir": str(plugin_dir), "capture_spec": str(file)}
        command = servers.command(spec.host.python, settings)
    else:
        command = inherited.command(spec, base)
    env = servers.environment(base.env, settings, variables, **extra)
    receive, send = os.pipe()
    try:
        with _log_file(spec, mode) as out:
            child = subprocess.Popen(
                [spec.host.python, "-ISc", _GATE, str(receive), inherited.gate_argument(base, command, env)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=base.cwd,
                env=env,
                start_new_session=True,
                pass_fds=(receive,),
            )
        main = procid.identify(child.pid)
        if main is None:
            raise TryAgain("the server's process ended at once", field="server log", value=out.name)
        server = state.ServerState(
            mode=mode,
            phase="starting",
            pid=main.pid,
            start=main.start,
            pgid=main.pid,
            sid=main.pid,
            boot_id=procid.boot_id(),
            port=settings.port,
            launch_hash=launch_hash,
            plugin_id=plugin_id,
            spool=spool,
            log=str(out.name),
            since=time.time(),
            ready_s=0.0,
            tree=[[main.pid, main.start]],
        )
        record(spec, server)
        shown = servers.shown(command)
        state.journal(spec, "server started", mode=mode, server_pid=main.pid, command=shown, log=server.log)
        os.write(send, b"1")
    finally:
        os.close(receive)
        os.close(send)
    log(f"{mode} server started (pid {main.pid}), log {server.log}")
    return server


def _log_file(spec: RunSpec, mode: str) -> IO[bytes]:
    """A new log; the oldest go. Where the disk takes none, the server runs without."""
    logs = state.folder(spec, "logs")
    name = f"{mode}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}.log"
    try:
        room = os.statvfs(logs)
        if room.f_bavail * room.f_frsize < _LOG_ROOM:  # a server may end where it can't print
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(logs))
        for old in sorted(logs.glob("*.log"), key=lambda p: p.stat().st_mtime)[:-_KEEP_LOGS]:
            old.unlink(missing_ok=True)
        return (logs / name).open("ab")
    except OSError as e:
        log(f"the {mode} server runs without a log: {e}")
        return Path(os.devnull).open("ab")


def _look(server: state.ServerState) -> state.ServerState:
    """The record with the processes and the shared memory that are the server's now."""
    tree = owned(server)
    members = sorted([p.pid, p.start] for p in tree.living())
    return replace(server, tree=members, shm=tree.shm)


def _launchers(port: int) -> set[int]:
    """The listeners of a port and all their ancestors."""
    found: set[int] = set()
    for pid in processes.listeners(port):
        if pid:
            found |= {pid, *(p.pid for p in psutil.Process(pid).parents())}
    return found
