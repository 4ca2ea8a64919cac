"""Taking a production server over that hsx did not start: only where it is exactly what the profile would start.

A restore launches the profile's command. Were the running server another one, the restore would bring something else
back, so any difference is refused, by name.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from hsx_host import envfile, inherited, managers, processes, servers, state
from hsx_host.contract import RunSpec
from hsx_host.errors import Refused
from hsx_host.procid import ProcId, identify


@dataclass(frozen=True)
class Found:
    """A server on the port. ``spool`` is the folder below the home that its capture spec lies in, "" for production.

    ``launch`` is the SGLang launch; ``main`` is the same, or the process that its manager starts and stops.
    """

    main: ProcId
    spool: str
    launch: ProcId


def production(spec: RunSpec) -> Found | None:
    """The server on production's port: none, the profile's, or hsx's own extraction server that no record names.

    Refused for anything else: a stranger, or a server whose arguments or environment differ from the profile's.
    """
    port = spec.production.port
    pids = processes.listeners(port, spec.production.host)
    if not pids:
        return None
    main = _launcher(pids)
    found = None if main is None else _extraction(spec, main)
    if found is not None:
        return found
    if managers.managed(spec):
        return _of_its_manager(spec, main, pids)
    if main is None:
        raise stranger(port, pids)
    _refuse_differences(spec, main)
    return Found(main.proc, "", main.proc)


def _of_its_manager(spec: RunSpec, main: _Launcher | None, pids: list[int]) -> Found:
    """The server that production's unit or command runs. Refused where it is somebody else's."""
    named = managers.main(spec)
    if main is None and named is None:
        raise stranger(spec.production.port, pids)
    launch = main.proc if main is not None else named
    assert launch is not None
    if not managers.owns(spec, launch):
        raise stranger(spec.production.port, pids)
    if main is not None and spec.manager == "systemd":
        _refuse_differences(spec, main)
    return Found(named or launch, "", launch)


def lost_extraction(spec: RunSpec) -> Found | None:
    """hsx's own extraction server on the extraction port that no record names; others there don't matter here."""
    main = _launcher(processes.listeners(spec.extraction.port, spec.extraction.host))
    return None if main is None else _extraction(spec, main)


def launch_of(spec: RunSpec) -> ProcId | None:
    """The SGLang launch that listens on production's port; None where none can be seen."""
    main = _launcher(processes.listeners(spec.production.port, spec.production.host))
    return None if main is None else main.proc


def refuse_company(spec: RunSpec, server: processes.Owned) -> None:
    """Before production is stopped: nobody else is on its address, who would have the port when it shall come back.
    Refused with their names.

    A proxy that has production's port on another address is in nobody's way, unless the extraction server shall have
    that port: it would be reached from outside. Of production that others start, a listener that this login may not
    see, or that only publishes a container's port, may be its own.
    """
    if spec.manager == "command":
        return
    ours = {p.pid for p in server.living()} | ({0} if managers.managed(spec) else set())
    port = spec.production.port
    host = "" if spec.extraction.port == port else spec.production.host
    if pids := [pid for pid in processes.listeners(port, host) if pid not in ours]:
        raise Refused(
            f"beside production, port {port} is listened on by a stranger: "
            + "; ".join(processes.describe(p) for p in pids),
            field="port",
            value=port,
            fix="hsx does not touch it: end it, or, where it has the port on another address, give the extraction "
            "server a port of its own (extraction.port)",
        )


def stranger(port: int, pids: list[int]) -> Refused:
    """The error about a port that somebody else holds."""
    return Refused(
        f"port {port} is held by a stranger: " + "; ".join(processes.describe(p) for p in pids),
        field="port",
        value=port,
        fix="hsx does not touch it: end it, or give the server another port",
    )


@dataclass(frozen=True)
class _Launcher:
    """A process whose command is ``python -m sglang.launch_server ARGS``."""

    proc: ProcId
    argv: list[str]
    environ: dict[str, str]


def _launcher(pids: list[int]) -> _Launcher | None:
    """The nearest SGLang launch among the listeners and their ancestors."""
    for pid in pids:
        if not pid:
            continue
        try:
            for p in [psutil.Process(pid), *psutil.Process(pid).parents()]:
                argv, proc = p.cmdline(), identify(p.pid)
                if proc is not None and inherited.module_args(argv) is not None:
                    return _Launcher(proc, argv, inherited.environ(p.pid) or {})
        except (psutil.Error, OSError):
            continue
    return None


def _extraction(spec: RunSpec, main: _Launcher) -> Found | None:
    """The launch as hsx's own extraction server, by the capture spec that it was given."""
    capture = main.environ.get(servers.CAPTURE_VARIABLE, "")
    if capture and Path(capture).is_relative_to(state.home(spec) / "spool"):
        return Found(main.proc, str(Path(capture).parent), main.proc)
    return None


def _refuse_another_user(spec: RunSpec, proc: ProcId) -> None:
    """hsx starts production as itself."""
    there = psutil.Process(proc.pid)
    user, group = there.uids().effective, there.gids().effective
    if (user, group) != (os.geteuid(), os.getegid()):
        raise Refused(
            f"the server on port {spec.production.port} (pid {proc.pid}) runs as user {user}, group {group}, and hsx "
            f"as user {os.geteuid()}, group {os.getegid()}: a restore would bring it back as another's",
            field="production",
            value=f"pid {proc.pid}",
            fix="let the SSH connection log in as production's user, or name who starts it (production.manager)",
        )


def _refuse_differences(spec: RunSpec, main: _Launcher) -> None:
    proc, argv, environ = main.proc, main.argv, main.environ
    if spec.manager == "process":
        _refuse_another_user(spec, proc)
    cwd = os.readlink(f"/proc/{proc.pid}/cwd")
    wrong = servers.differences(inherited.module_args(argv) or [], spec.production.args)
    running = inherited.program(argv[0], cwd, environ.get("PATH", ""))
    if spec.manager == "process" and inherited.interpreter(running) != inherited.interpreter(spec.host.python):
        wrong.append(f"python: runs with {running!r}, the profile says {spec.host.python!r}")
    wrong += [
        f"environment {key}: runs with another value than the profile's"
        if key in environ
        else f"environment {key}: not set where it runs, set in the profile"
        for key, value in sorted(envfile.variables(spec.production).items())
        if environ.get(key) != value
    ]
    if servers.CAPTURE_VARIABLE in environ:
        wrong.append(f"environment {servers.CAPTURE_VARIABLE}: runs with it, production never does")
    if wrong:
        raise Refused(
            f"the server on port {spec.production.port} (pid {proc.pid}) is not what the profile would start: a "
            "restore would bring something else back: " + "; ".join(wrong),
            field="production",
            value=f"pid {proc.pid}",
            fix="make the profile say what runs, or restart production as the profile says",
        )
