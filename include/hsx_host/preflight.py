"""What it does
  Looks at the host before anything is changed: the Python and SGLang version, the model, the home, the output root,
  the launch settings, and the production server (it must be the profile's, and healthy, where one runs). All that is
  wrong is listed at once.
Result: PreflightResult. Exit 2 or 3 with the list.
Example
  python -m hsx_host preflight --spec S
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hsx_host import (
    adopt,
    devices,
    disk,
    health,
    inherited,
    launch,
    lease,
    managers,
    model_facts,
    processes,
    procid,
    serve,
    state,
)
from hsx_host.contract import PreflightResult, RunSpec
from hsx_host.errors import BadInput, HsxError, Refused, TryAgain
from hsx_host.procid import ProcId

HELP = "what is wrong with the host, all of it, before anything is changed"
SGLANG_RANGE = ((0, 5, 11), (0, 6, 0))
_RELEASE = re.compile(r"(\d+(?:\.\d+)+)(?:\.?post\d+)?(?:\+[A-Za-z0-9.]+)?")


def add_arguments(parser: ArgumentParser) -> None:
    pass


def run(spec: RunSpec, args: Namespace) -> PreflightResult:
    checks = _Checks()
    with checks.note():
        check_python(spec.host.python)
    with checks.note():
        check_version(_version("sglang"))
    with checks.note():
        _check_layers(spec)
    for path, name in ((spec.host.home, "host.home"), (spec.host.output_root, "host.output_root")):
        with checks.note():
            check_writable(path, name)
    for mode in ("production", "extraction"):
        with checks.note():
            serve.check_settings(spec, mode)
    with checks.note():
        _check_page_command(spec)
    healthy = False
    with checks.note():
        healthy = _production(spec, checks.warnings.append)
    for root in spec.host.old_state_roots:
        if not os.path.isdir(root):
            checks.warnings.append(f"host.old_state_roots: {root} does not exist")
    checks.raise_all()
    return PreflightResult(
        python=platform.python_version(),
        sglang=_version("sglang"),
        torch=_version("torch"),
        gpus=devices.names(),
        home=spec.host.home,
        output_free_bytes=disk.free_bytes(disk.existing(spec.host.output_root)),
        production_healthy=healthy,
        warnings=checks.warnings,
    )


class _Checks:
    """Collects errors, so that a person sees all of them at once."""

    def __init__(self) -> None:
        self.errors: list[HsxError] = []
        self.warnings: list[str] = []

    @contextmanager
    def note(self) -> Iterator[None]:
        try:
            yield
        except HsxError as e:
            if str(e) not in [str(known) for known in self.errors]:
                self.errors.append(e)

    def raise_all(self) -> None:
        """One error as it is; several as one that lists them: bad input where any of them is."""
        if not self.errors:
            return
        if len(self.errors) == 1:
            raise self.errors[0]
        kind = BadInput if any(isinstance(e, BadInput) for e in self.errors) else Refused
        raise kind(
            f"{len(self.errors)} things are wrong: " + "; ".join(f"({i}) {e}" for i, e in enumerate(self.errors, 1)),
            field=", ".join(e.doc.field for e in self.errors if e.doc.field),
            fix="see each",
        )


def check_python(path: str) -> None:
    """BadInput unless ``path`` is the Python that runs hsx: what is checked here must hold for the servers."""
    if not os.access(path, os.X_OK):
        raise BadInput("no such Python", field="host.python", value=path, fix="name the Python that has SGLang")
    if inherited.interpreter(path) != inherited.interpreter(sys.executable):
        raise BadInput(
            f"hsx runs under another Python: {sys.executable}",
            field="host.python",
            value=path,
            fix="run hsx under this one",
        )


def check_version(version: str) -> None:
    """BadInput unless SGLang is installed and 0.5.11 <= version < 0.6 (the plugin framework's range).

    Pre-releases and development builds are out of it: ``0.5.11rc1`` comes before 0.5.11, ``0.6.0rc1`` is no 0.5, and
    what lies between two releases is neither. Post-releases and local builds (``+cu130``) count as their release.
    """
    found = _RELEASE.fullmatch(version)
    numbers = tuple(map(int, found[1].split("."))) if found else ()
    low, high = SGLANG_RANGE
    if not low <= numbers < high:
        raise BadInput(
            "SGLang is not installed there"
            if not version
            else "SGLang is out of range"
            if found
            else "is no release of SGLang",
            field="sglang",
            value=version,
            fix=f"install SGLang >= {'.'.join(map(str, low))}, < 0.6, or name another host.python",
        )


def check_writable(path: str, field: str) -> None:
    """BadInput unless files can be made in ``path`` (or, where it is missing, in the nearest folder above it)."""
    if not path.startswith("/"):
        raise BadInput("is not an absolute path", field=field, value=path, fix="start it with /")
    where = disk.existing(path)
    try:
        with tempfile.TemporaryFile(dir=where) as f:
            f.write(b"hsx")
            f.flush()
    except OSError as e:
        raise BadInput(
            f"can't be written: {e.strerror} ({where})", field=field, value=path, fix="make it writable for this user"
        ) from None


def _check_layers(spec: RunSpec) -> None:
    facts = model_facts.read_model(spec.model.path)
    wrong = [k for k in spec.capture.layers if not 1 <= k < facts.num_blocks]
    if wrong or not spec.capture.layers:
        raise BadInput(
            f"the model has {facts.num_blocks} blocks: layers are 1 to {facts.num_blocks - 1}",
            field="capture.layers",
            value=spec.capture.layers,
            fix="name layers k in that range: the stream that enters block k, counted from 0",
        )


def _check_page_command(spec: RunSpec) -> None:
    """BadInput where nobody could be woken at night: found out now, while people are awake."""
    if spec.page_command and not os.access(spec.page_command[0], os.X_OK):
        raise BadInput(
            "can't be run on the host",
            field="alerts.host_command",
            value=spec.page_command[0],
            fix="name an executable program there, by its absolute path",
        )


def _production(spec: RunSpec, warn: Callable[[str], None]) -> bool:
    """Whether production serves. Refused where something else holds its port, or it runs and does not serve."""
    held = lease.read(spec)
    if held is not None and held.run_id != spec.run_id and not lease.lapsed(held):
        warn(f"run {held.run_id} holds the host: this run waits for it before it borrows")
        return False
    server = state.read_server(spec)
    if (
        server is not None
        and server.phase != "stopped"
        and server.boot_id == procid.boot_id()
        and procid.alive(ProcId(server.pid, server.start))
    ):
        if server.mode == "extraction":
            warn("the extraction server runs: an earlier run has not given the host back yet")
            return False
        if server.launch_hash != launch.hash_of(spec, "production"):
            raise Refused(
                "production runs as another profile launched it",
                field="production",
                value=f"pid {server.pid}",
                fix="make it the profile's: serve production",
            )
        adopt.refuse_company(spec, launch.owned(server))
    else:
        found = adopt.production(spec)
        if found is None:
            warn("production is not running; the end of the run will start it")
            return False
        if found.spool:
            warn("an extraction server that no record names runs: serve production ends it")
            return False
        tree = processes.owned(found.main)
        tree.cgroup = managers.cgroup(spec)
        tree.refresh()
        adopt.refuse_company(spec, tree)
    why = health.problem(spec.production)
    if why:
        raise TryAgain(
            f"production runs and does not serve: {why}",
            field="production",
            value=f"port {spec.production.port}",
            fix="look after it, or wait: hsx would not know whether it gave back what it took",
        )
    return True


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
