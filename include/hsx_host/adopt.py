"""Taking a production server over that hsx did not start: only where it is exactly what the profile would start.

A restore launches the profile's command. Were the running server another one, the restore would bring something else
back, so any difference is refused, by name.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from hsx_host import processes, servers, state
from hsx_host.contract import RunSpec
from hsx_host.errors import Refused
from hsx_host.procid import ProcId, identify


@dataclass(frozen=True)
class LaunchBase:
    """``state/launch_base.json`` (mode 0600): the folder and the inherited environment that production ran with.

    The profile's own variables are not in it, so that one taken out of the profile is gone at the next launch.
    """

    cwd: str
    env: dict[str, str]


@dataclass(frozen=True)
class Found:
    """A server on the port. ``ours`` is the folder below the home that its capture spec lies in, "" for production."""

    main: ProcId
    spool: str


def production(spec: RunSpec) -> Found | None:
    """The server on production's port: none, the profile's, or hsx's own extraction server that no record names.

    Refused for anything else: a stranger, or a server whose arguments or environment differ from the profile's.
    """
    port = spec.production.port
    pids = processes.listeners(port)
    if not pids:
        return None
    main = _launcher(pids)
    if main is None:
        raise stranger(port, pids)
    found = _extraction(spec, main)
    if found is None:
        _refuse_differences(spec, main)
        found = Found(main.proc, "")
    return found


def lost_extraction(spec: RunSpec) -> Found | None:
    """hsx's own extraction server on the extraction port that no record names; others there don't matter here."""
    main = _launcher(processes.listeners(spec.extraction.port))
    return None if main is None else _extraction(spec, main)


def stranger(port: int, pids: list[int]) -> Refused:
    """The error about a port that somebody else holds."""
    return Refused(
        f"port {port} is held by a stranger: " + "; ".join(processes.describe(p) for p in pids),
        field="port",
        value=port,
        fix="hsx does not touch it: end it, or give the server another port",
    )


def remember_base(spec: RunSpec, proc: ProcId) -> None:
    """Keep the folder and the inherited environment of a production server that hsx did not start."""
    environ = _environ(proc.pid)
    env = {k: v for k, v in environ.items() if k not in spec.production.env and not k.startswith("HSX_")}
    base = LaunchBase(cwd=os.readlink(f"/proc/{proc.pid}/cwd"), env=env)
    path = _base_path(spec)
    path.unlink(missing_ok=True)
    state.write_document(path, base, mode=0o600)


def base(spec: RunSpec) -> LaunchBase:
    """What a server inherits: as production did when it was taken over, else a clean part of this environment."""
    kept = state.read_document(LaunchBase, _base_path(spec))
    if kept is not None and Path(kept.cwd).is_dir():
        return kept
    return LaunchBase(cwd=str(state.folder(spec, "logs")), env=kept.env if kept else servers.clean_base(os.environ))


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
                if proc is not None and _module_args(argv) is not None:
                    return _Launcher(proc, argv, _environ(p.pid))
        except (psutil.Error, OSError):
            continue
    return None


def _extraction(spec: RunSpec, main: _Launcher) -> Found | None:
    """The launch as hsx's own extraction server, by the capture spec that it was given."""
    capture = main.environ.get(servers.CAPTURE_VARIABLE, "")
    if capture and Path(capture).is_relative_to(state.home(spec) / "spool"):
        return Found(main.proc, str(Path(capture).parent))
    return None


def _refuse_differences(spec: RunSpec, main: _Launcher) -> None:
    proc, argv, environ = main.proc, main.argv, main.environ
    cwd = os.readlink(f"/proc/{proc.pid}/cwd")
    wrong = servers.differences(_module_args(argv) or [], spec.production.args)
    running = (
        shutil.which(os.path.join(cwd, argv[0]) if "/" in argv[0] else argv[0], path=environ.get("PATH")) or argv[0]
    )
    if interpreter(running) != interpreter(spec.host.python):
        wrong.append(f"python: runs with {running!r}, the profile says {spec.host.python!r}")
    wrong += [
        f"environment {key}: runs with another value than the profile's"
        if key in environ
        else f"environment {key}: not set where it runs, set in the profile"
        for key, value in sorted(spec.production.env.items())
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


def _module_args(argv: list[str]) -> list[str] | None:
    """The arguments after ``-m sglang.launch_server``, None where the command is something else."""
    for i, word in enumerate(argv[:-1]):
        if word == "-m" and argv[i + 1] == servers.MODULE:
            return argv[i + 2 :]
    return None


def interpreter(path: str) -> tuple[str, str]:
    """The folder and the real file of a Python: ``python`` and ``python3`` of one environment are the same."""
    return os.path.realpath(os.path.dirname(os.path.abspath(path))), os.path.realpath(path)


def _environ(pid: int) -> dict[str, str]:
    raw = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="surrogateescape")
    return dict(item.split("=", 1) for item in raw.split("\0") if "=" in item)


def _base_path(spec: RunSpec) -> Path:
    return state.home(spec) / "state" / "launch_base.json"
