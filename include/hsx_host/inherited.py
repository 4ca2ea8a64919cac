"""What production was launched with beside the profile, kept from the server that hsx took over, and given back to it.

The exact command line, the inherited environment, the folder, umask, resource limits and CPU affinity: a login shell of
hsx has others, and a production that comes back with 1024 open files instead of a million would not be as it was.
Nice and user too: what can't be given back (a lower nice needs a right) is told.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from hsx_host import envfile, servers, state
from hsx_host.contract import RunSpec
from hsx_host.errors import TryAgain
from hsx_host.procid import ProcId
from hsx_host.progress import log

# Of one start of a systemd unit: no other process may believe that they are meant for it.
_OF_A_UNIT = {
    "INVOCATION_ID", "JOURNAL_STREAM", "NOTIFY_SOCKET", "MAINPID", "MANAGERPID", "SYSTEMD_EXEC_PID", "LISTEN_FDS",
    "LISTEN_PID", "LISTEN_FDNAMES", "WATCHDOG_PID", "WATCHDOG_USEC", "CREDENTIALS_DIRECTORY", "MEMORY_PRESSURE_WATCH",
    "MEMORY_PRESSURE_WRITE", "RUNTIME_DIRECTORY", "STATE_DIRECTORY", "CACHE_DIRECTORY", "LOGS_DIRECTORY", "FDSTORE",
    "MANAGERPIDFDID",
}  # fmt: skip
_LIMITS = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))


@dataclass(frozen=True)
class LaunchBase:
    """``state/launch_base.json`` (mode 0600). The profile's own variables are not in ``env``, so that one taken out of
    the profile is gone at the next launch. ``limits``: soft and hard by name, -1 for none. ``nice``, ``uid`` and
    ``gid`` are None where they were not looked at."""

    cwd: str
    env: dict[str, str]
    argv: list[str] = field(default_factory=list)
    umask: int = 0o022
    limits: dict[str, list[int]] = field(default_factory=dict)
    affinity: list[int] = field(default_factory=list)
    nice: int | None = None
    uid: int | None = None
    gid: int | None = None


def remember(spec: RunSpec, proc: ProcId) -> None:
    """Keep what a production server that hsx did not start was launched with."""
    known = envfile.variables(spec.production)
    env = {k: v for k, v in (environ(proc.pid) or {}).items() if k not in known and not k.startswith("HSX_")}
    there = psutil.Process(proc.pid)
    base = LaunchBase(
        cwd=_cwd(proc.pid),
        env={k: v for k, v in env.items() if k not in _OF_A_UNIT},
        argv=there.cmdline(),
        umask=_umask(proc.pid),
        limits=_limits(there),
        affinity=sorted(there.cpu_affinity() or []),
        nice=there.nice(),
        uid=there.uids().effective,
        gid=there.gids().effective,
    )
    _keep(spec, base)


def _keep(spec: RunSpec, kept: LaunchBase) -> None:
    """Write it where it is new. A disk that takes nothing keeps no server from running: what was kept before stays."""
    try:
        if state.read_document(LaunchBase, _path(spec)) != kept:
            state.write_document(_path(spec), kept, mode=0o600)
    except (OSError, TryAgain) as e:
        log(f"what production was launched with could not be kept: {e}")


def base(spec: RunSpec) -> LaunchBase:
    """What a server inherits: as production did when it was taken over, else a clean part of the environment in which
    hsx launched it first."""
    kept = state.read_document(LaunchBase, _path(spec))
    if kept is None:
        kept = LaunchBase(cwd=str(state.folder(spec, "logs")), env=servers.clean_base(os.environ))
        _keep(spec, kept)
    return kept if Path(kept.cwd).is_dir() else replace(kept, cwd=str(state.folder(spec, "logs")))


def for_own_launches(spec: RunSpec) -> LaunchBase:
    """What hsx's own launches inherit: as production did. Of production that its owner's commands start (a container,
    say) nothing is inherited: its environment and its folder mean nothing outside."""
    if spec.manager != "command":
        return base(spec)
    return LaunchBase(cwd=str(state.folder(spec, "logs")), env=servers.clean_base(os.environ))


def command(spec: RunSpec, kept: LaunchBase) -> list[str]:
    """Production's command line: word by word as it was, where that still means what the profile says."""
    args = module_args(kept.argv)
    if args is not None and not servers.differences(args, spec.production.args):
        found = program(kept.argv[0], kept.cwd, kept.env.get("PATH", ""))
        if interpreter(found) == interpreter(spec.host.python):
            return kept.argv
    return servers.command(spec.host.python, spec.production)


def differences(spec: RunSpec, proc: ProcId, members: list[ProcId]) -> list[str]:
    """In what a running production server is not as it was before hsx took it over, and not as the profile says.

    :param members: all its processes: none may know of the capture plugin.
    """
    kept, wrong = base(spec), []
    there = psutil.Process(proc.pid)
    if there.cmdline() != command(spec, kept):
        wrong.append(f"its command is {' '.join(servers.shown(there.cmdline()))[:300]!r}, not what it was")
    if (environment := environ(proc.pid)) is not None:
        have = {k: v for k, v in environment.items() if k not in _OF_A_UNIT}
        want = servers.environment(kept.env, spec.production, envfile.variables(spec.production))
        if names := sorted(k for k in have.keys() | want.keys() if have.get(k) != want.get(k)):
            wrong.append(f"its environment differs in {', '.join(names)}")
    if (cwd := _cwd(proc.pid)) != kept.cwd:
        wrong.append(f"it runs in {cwd}, not in {kept.cwd}")
    if (umask := _umask(proc.pid)) != kept.umask:
        wrong.append(f"its umask is {umask:04o}, not {kept.umask:04o}")
    now = _limits(there)
    wrong += [
        f"its limit {name} is {now.get(name)}, not {limit}"
        for name, limit in sorted(kept.limits.items())
        if now.get(name) != limit
    ]
    if kept.affinity and (cpus := sorted(there.cpu_affinity() or [])) != kept.affinity:
        wrong.append(f"it runs on the CPUs {cpus}, not {kept.affinity}")
    for what, have_id, kept_id in (
        ("nice", there.nice(), kept.nice),
        ("user id", there.uids().effective, kept.uid),
        ("group id", there.gids().effective, kept.gid),
    ):
        if kept_id is not None and have_id != kept_id:
            wrong.append(f"its {what} is {have_id}, not {kept_id}")
    plugin = str(state.home(spec) / "plugin")
    for member in members:
        with contextlib.suppress(OSError):
            known = environ(member.pid) or {}
            if servers.CAPTURE_VARIABLE in known or plugin in known.get("PYTHONPATH", ""):
                wrong.append(f"its process {member.pid} knows of the capture plugin")
    return wrong


def gate_argument(kept: LaunchBase, argv: list[str], env: dict[str, str]) -> str:
    """What the launch gate is told, as JSON: the program, its words, and what the process inherits."""
    path = program(argv[0], kept.cwd, env.get("PATH", ""))
    return json.dumps(
        {
            "path": path,
            "argv": argv,
            "umask": kept.umask,
            "limits": {str(getattr(resource, n)): v for n, v in kept.limits.items() if n in _LIMITS},
            "affinity": kept.affinity,
            "nice": kept.nice,
            "locale": "LC_CTYPE" in env,
        }
    )


def module_args(argv: list[str]) -> list[str] | None:
    """The arguments after ``-m sglang.launch_server``, None where the command is something else."""
    for i, word in enumerate(argv[:-1]):
        if word == "-m" and argv[i + 1] == servers.MODULE:
            return argv[i + 2 :]
    return None


def program(word: str, cwd: str, path: str) -> str:
    """The file that a command's first word meant, in its folder and with its PATH."""
    return shutil.which(os.path.join(cwd, word) if "/" in word else word, path=path or os.defpath) or word


def interpreter(path: str) -> tuple[str, str]:
    """The folder and the real file of a Python: ``python`` and ``python3`` of one environment are the same."""
    return os.path.realpath(os.path.dirname(os.path.abspath(path))), os.path.realpath(path)


def environ(pid: int) -> dict[str, str] | None:
    """The environment that a process was started with; None where it is another user's, and can't be read."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="surrogateescape")
    except PermissionError:
        return None
    return dict(item.split("=", 1) for item in raw.split("\0") if "=" in item)


def _cwd(pid: int) -> str:
    """The folder of a process; "/" where it is another user's, and can't be read."""
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except PermissionError:
        return "/"


def _umask(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022


def _limits(proc: psutil.Process) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for name in _LIMITS:
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            found[name] = list(proc.rlimit(getattr(resource, name)))
    return found


def _path(spec: RunSpec) -> Path:
    return state.home(spec) / "state" / "launch_base.json"
