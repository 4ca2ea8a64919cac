"""The guards of the lease: two detached processes, of which each starts the other again where it is gone.

Whoever renews the lease, or takes production away, looks after them too. A lease is never written before its guard has
been started, and production is never stopped while none lives.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from hsx_host import byhand, jobs, lease, procid, state
from hsx_host.contract import Lease, RunSpec, encode
from hsx_host.errors import TryAgain
from hsx_host.procid import ProcId

COUNT = 2


@dataclass(frozen=True)
class GuardRecord:
    """``state/guard.json``: the guards of the lease granted at ``since``; ``processes`` holds [pid, start] of each."""

    run_id: str
    since: float
    boot_id: str
    processes: list[list[int]] = field(default_factory=list)


def acquire(spec: RunSpec) -> Lease:
    """Take the lease for the spec's run. Its guard runs before the lease is written."""

    def first(granted: Lease) -> None:
        _keep_spec(spec)
        _see_to(spec, granted, at_least=1)

    granted = lease.acquire(spec, first)
    state.write_text(state.last_spec(spec), encode(spec) + "\n", mode=0o600)
    byhand.install(spec)
    return granted


def renew(spec: RunSpec) -> Lease | None:
    """Renew the lease of the spec's run (None where it holds none), and start guards of whoever's lease that are gone:
    those of a lease that has lapsed, by a reboot too, give the host back."""
    renewed = lease.renew(spec)
    watch(spec)
    return renewed


def watch(spec: RunSpec) -> None:
    """Start the guards of the lease that are gone; nothing where nobody has the lease."""
    held = lease.read(spec)
    if held is not None:
        _see_to(spec, held, at_least=COUNT)


def require(spec: RunSpec) -> None:
    """Before production is stopped: a guard of the lease lives. TryAgain where none can be started."""
    watch(spec)
    held = lease.read(spec)
    if held is None or not living(spec, held):
        raise TryAgain(
            "the guard of the lease can't be started, and without one nobody would bring production back",
            field="guard",
            value=held.run_id if held else "",
            fix=f"read {log_path(spec, spec.run_id)}",
        )


def living(spec: RunSpec, granted: Lease) -> list[ProcId]:
    """The guards of a grant that run."""
    record = state.read_document(GuardRecord, _path(spec))
    if record is None or (record.run_id, record.since, record.boot_id) != (
        granted.run_id,
        granted.since,
        procid.boot_id(),
    ):
        return []
    return [p for p in (ProcId(*pair) for pair in record.processes) if procid.alive(p)]


def log_path(spec: RunSpec, run_id: str) -> Path:
    """What the guards of a run say."""
    return state.folder(spec, "runs", state.run_key(run_id)) / "guard.log"


def spec_path(spec: RunSpec, run_id: str) -> Path:
    """The spec of a run that holds or held the lease: what its guards, and a recovery, bring back."""
    return state.folder(spec, "runs", state.run_key(run_id)) / "spec.json"


def _keep_spec(spec: RunSpec) -> None:
    state.write_text(spec_path(spec, spec.run_id), encode(spec) + "\n", mode=0o600)


def _see_to(spec: RunSpec, granted: Lease, at_least: int) -> None:
    if len(living(spec, granted)) >= at_least:
        return
    with state.locked(state.folder(spec, "state") / "guard.lock", wait_s=30.0, what="the start of the guard"):
        file = spec_path(spec, granted.run_id)
        if not file.exists() and granted.run_id == spec.run_id:
            _keep_spec(spec)
        here = living(spec, granted)
        missing = at_least - len(here)
        for _ in range(missing):
            argv = [sys.executable, "-m", "hsx_host", "guard", "--spec", str(file), "--since", repr(granted.since)]
            me = procid.identify(jobs.detach(argv, log=log_path(spec, granted.run_id), cwd=state.home(spec)))
            if me is not None:
                here.append(me)
        if missing > 0:
            pairs = [[p.pid, p.start] for p in here]
            state.write_document(_path(spec), GuardRecord(granted.run_id, granted.since, procid.boot_id(), pairs))


def _path(spec: RunSpec) -> Path:
    return state.home(spec) / "state" / "guard.json"
