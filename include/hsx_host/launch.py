"""Starting one server: detached, recorded before it runs, waited for until it gives real tokens."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import psutil

from hsx_host import adopt, capture_server, health, patch, processes, procid, servers, state
from hsx_host.contract import RunSpec, ServerSettings
from hsx_host.errors import TryAgain
from hsx_host.procid import ProcId
from hsx_host.progress import log

_KEEP_LOGS = 10

# The child waits until its record stands: a launcher that dies in between leaves no server that nobody knows of.
# Python in a C locale sets LC_CTYPE for itself (PEP 538): the second argument says whether the server has it.
_GATE = """import os, sys
gate, keep, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
os.read(gate, 1) == b"1" or os._exit(1)
os.close(gate)
keep or os.environ.pop("LC_CTYPE", None)
os.execv(command[0], command)
"""


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
    server = _spawn(spec, mode)
    try:
        return finish(spec, server)
    except BaseException:
        stop(spec, server, why="the start failed")
        raise


def finish(spec: RunSpec, server: state.ServerState) -> state.ServerState:
    """Wait for a started server until it is ready, and record it as running."""
    settings = settings_of(spec, server.mode)
    main = ProcId(server.pid, server.start)
    deadline_s = max(settings.start_timeout_s - (time.time() - server.since), 1.0)
    waited = health.wait_until_ready(
        settings, alive=lambda: procid.alive(main), log_file=server.log, deadline_s=deadline_s, what=server.mode
    )
    if server.pid not in _launchers(settings.port):
        raise TryAgain(
            f"port {settings.port} answers, but not from the server that was started",
            field="port",
            value=settings.port,
            fix="end what holds the port",
        )
    if server.mode == "extraction":
        capture_server.prove_ready(spec, Path(server.spool), server.plugin_id)
    health.soak(settings, server.mode)
    server = _look(replace(server, phase="running", ready_s=round(time.time() - server.since, 3)))
    state.write_server(spec, server)
    state.journal(spec, "server ready", mode=server.mode, server_pid=server.pid, ready_s=server.ready_s)
    log(f"{server.mode} server is ready (pid {server.pid}, waited {waited:.1f} s)")
    return server


def stop(spec: RunSpec, server: state.ServerState, why: str) -> None:
    """Stop a recorded server, or what a crash left of it, and record that."""
    settings = settings_of(spec, server.mode)
    state.journal(spec, "stopping server", mode=server.mode, server_pid=server.pid, why=why)
    log(f"stopping the {server.mode} server (pid {server.pid}): {why}")
    processes.stop(owned(server), port=server.port, grace_s=settings.stop_grace_s)
    state.write_server(spec, replace(server, phase="stopped", tree=[], shm={}))
    state.journal(spec, "server stopped", mode=server.mode, server_pid=server.pid)


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
    )
    if mode == "production":
        adopt.remember_base(spec, found.main)
    server = _look(server)
    state.write_server(spec, server)
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
    )
    tree.refresh()
    return tree


def _spawn(spec: RunSpec, mode: str) -> state.ServerState:
    settings, launch_hash = settings_of(spec, mode), hash_of(spec, mode)
    base = adopt.base(spec)
    plugin_id, spool, extra = "", "", {}
    if mode == "extraction":
        plugin_id, plugin_dir = patch.apply(spec)
        spool_dir, file = capture_server.prepare_spool(spec, plugin_id, launch_hash)
        spool = str(spool_dir)
        extra = {"plugin_dir": str(plugin_dir), "capture_spec": str(file)}
    logs = state.folder(spec, "logs")
    for old in sorted(logs.glob("*.log"), key=lambda p: p.stat().st_mtime)[:-_KEEP_LOGS]:
        old.unlink(missing_ok=True)
    log_file = logs / f"{mode}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}.log"
    command = servers.command(spec.host.python, settings)
    env = servers.environment(base.env, settings, **extra)
    receive, send = os.pipe()
    try:
        with log_file.open("ab") as out:
            child = subprocess.Popen(
                [spec.host.python, "-ISc", _GATE, str(receive), "keep" if "LC_CTYPE" in env else "", *command],
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
            raise TryAgain("the server's process ended at once", field="server log", value=log_file)
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
            log=str(log_file),
            since=time.time(),
            ready_s=0.0,
            tree=[[main.pid, main.start]],
        )
        state.write_server(spec, server)
        state.journal(spec, "server started", mode=mode, server_pid=main.pid, command=command, log=str(log_file))
        os.write(send, b"1")
    finally:
        os.close(receive)
        os.close(send)
    log(f"{mode} server started (pid {main.pid}), log {log_file}")
    return server


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
