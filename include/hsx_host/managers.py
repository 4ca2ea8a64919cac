"""Production that somebody else starts and stops: a systemd unit, or two commands of its owner's (a container, say).

hsx then never signals a running production itself: it asks, waits, and proves that what belonged to the server is gone.
A server belongs to a unit by systemd's own word: its main process, or a member of its control group.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from hsx_host import inherited, processes, procid, program, state
from hsx_host.contract import RunSpec
from hsx_host.errors import BadInput, TryAgain
from hsx_host.procid import ProcId
from hsx_host.progress import log

MANAGERS = ("process", "systemd", "command")
_ASK_S = 60.0
_MARGIN_S = 120.0


@dataclass(frozen=True)
class Unit:
    """What ``systemctl show`` says of a unit. ``main`` 0: no process."""

    load: str
    active: str
    main: int
    cgroup: str


def managed(spec: RunSpec) -> bool:
    """Whether somebody else than hsx starts and stops production."""
    return spec.manager != "process"


def check(spec: RunSpec) -> None:
    """BadInput where the profile names no way to start and stop production."""
    service = spec.service
    if spec.manager not in MANAGERS:
        raise BadInput("no such manager", field="production.manager", value=spec.manager, fix=", ".join(MANAGERS))
    needed: dict[str, tuple[str, ...]] = {
        "systemd": ("unit", "systemctl"),
        "command": ("start_command", "stop_command"),
        "process": (),
    }
    for name in needed[spec.manager]:
        if not getattr(service, name):
            raise BadInput(
                "is missing", field=f"production.{name}", value="", fix=f"manager {spec.manager} needs it: add it"
            )


def start(spec: RunSpec) -> None:
    """Ask for production; it may be up already. TryAgain with what the command said where it fails."""
    if spec.manager == "systemd":
        _known(spec)
        _ask(spec, [*spec.service.systemctl, "start", spec.service.unit], spec.production.start_timeout_s)
    else:
        _ask(spec, spec.service.start_command, spec.production.start_timeout_s)


def stop(spec: RunSpec) -> None:
    """Ask for production to be stopped, and wait for the answer. Nothing where hsx starts and stops it itself."""
    timeout_s = spec.production.stop_grace_s + _MARGIN_S
    if spec.manager == "systemd":
        _ask(spec, [*spec.service.systemctl, "stop", spec.service.unit], timeout_s)
        if (now := _known(spec)).active not in ("inactive", "failed"):
            raise TryAgain(
                f"systemctl stop has ended, and the unit is {now.active}",
                field="production.unit",
                value=spec.service.unit,
                fix="look what starts it again",
            )
    elif spec.manager == "command":
        _ask(spec, spec.service.stop_command, timeout_s)


def main(spec: RunSpec) -> ProcId | None:
    """The main process that the manager names; None where there is none, or where it names none."""
    if spec.manager == "systemd":
        pid = _known(spec).main
    elif spec.service.pid_command:
        said = _ask(spec, spec.service.pid_command, _ASK_S).split()
        pid = int(said[0]) if said and said[0].isdigit() else 0
    else:
        return None
    return procid.identify(pid) if pid > 0 else None


def ended(spec: RunSpec) -> bool:
    """Whether the manager says that production is not up and won't come."""
    return spec.manager == "systemd" and _known(spec).active in ("inactive", "failed")


def cgroup(spec: RunSpec) -> str:
    """The control group of production's unit; "" where no unit runs it, or where the group isn't the unit's own."""
    if spec.manager != "systemd":
        return ""
    path = _known(spec).cgroup
    return path if Path(path).name == spec.service.unit else ""


def owns(spec: RunSpec, launch: ProcId) -> bool:
    """Whether a server on production's port is the manager's: its main process, below it, or in its control group."""
    named = main(spec)
    if named is None:
        return spec.manager == "command" and not spec.service.pid_command
    if named == launch or named.pid in _parents(launch):
        return True
    group = cgroup(spec)
    return bool(group) and group in processes.cgroups(launch.pid)


def show(spec: RunSpec) -> Unit:
    """``systemctl show`` of the unit."""
    properties = "LoadState,ActiveState,MainPID,ControlGroup"
    said = _ask(spec, [*spec.service.systemctl, "show", "-p", properties, "--", spec.service.unit], _ASK_S)
    given = dict(line.partition("=")[::2] for line in said.splitlines())
    pid = given.get("MainPID", "0")
    return Unit(
        load=given.get("LoadState", ""),
        active=given.get("ActiveState", ""),
        main=int(pid) if pid.isdigit() else 0,
        cgroup=given.get("ControlGroup", ""),
    )


def _known(spec: RunSpec) -> Unit:
    unit = show(spec)
    if unit.load in ("not-found", "bad-setting", "error", "masked"):
        raise BadInput(
            f"systemd says of the unit: {unit.load}",
            field="production.unit",
            value=spec.service.unit,
            fix="name the unit that runs production; a user's unit needs systemctl: [systemctl, --user]",
        )
    return unit


def _parents(proc: ProcId) -> list[int]:
    try:
        return [p.pid for p in psutil.Process(proc.pid).parents()]
    except psutil.Error:
        return []


def _ask(spec: RunSpec, command: list[str], timeout_s: float) -> str:
    """Run a command of the owner's; its output. Into a file: what a start command leaves running keeps no pipe open."""
    env = program.of_others()
    field = "production.unit" if spec.manager == "systemd" else f"production.manager ({spec.manager})"
    began = time.monotonic()
    with tempfile.TemporaryFile() as out:
        try:
            done = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd="/",
                env=env,
                start_new_session=True,
                umask=inherited.base(spec).umask,
            )
        except OSError as e:
            raise BadInput(
                f"can't be run: {e.strerror}", field=field, value=command[0], fix="name an existing program"
            ) from None
        try:
            code = done.wait(timeout_s)
        except subprocess.TimeoutExpired:
            done.kill()
            done.wait()
            raise TryAgain(
                f"did not end within {timeout_s:.0f} s", field=field, value=command[0], fix="look what it waits for"
            ) from None
        out.seek(0)
        text = out.read(1 << 20).decode(errors="replace")
    spent = time.monotonic() - began
    if spent > 1:
        log(f"{command[0]}: {spent:.0f} s")
    if code != 0:
        state.journal(spec, "manager's command failed", program=command[0], code=code, said=text[-300:])
        raise TryAgain(
            f"{command[0]} ended with {code}: {text.strip()[-500:]}",
            field=field,
            value=command[0],
            fix="run it by hand as this login; systemctl may need sudo: systemctl: [sudo, -n, systemctl]",
        )
    return text
