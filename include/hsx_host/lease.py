"""The lease on the host: one run at a time may bring the host to another mode than production.

The lease has a lock of its own, held for moments: a poll renews the lease while a transition (minutes) goes on.
Whether it has lapsed is told by the monotonic clock and the boot id, so that neither a clock change nor a reboot
prolongs or ends it. A lapsed lease is over: the guard gives the host back, and nothing renews it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from hsx_host import procid, state
from hsx_host.contract import Lease, RunSpec
from hsx_host.errors import HsxError, Refused, TryAgain

_KEEP_HELD_OFF = 100  # runs; an older one is long over


@dataclass(frozen=True)
class Hold:
    """``state/hold.json``: a person took the host back at ``since``, last from ``run_id``: it may not have it, nor may
    the runs of ``earlier``, from which it was taken before; with ``everybody``, no run may."""

    run_id: str
    since: float
    everybody: bool
    earlier: list[str] = field(default_factory=list)


def read(spec: RunSpec) -> Lease | None:
    """The lease as it stands in the home, lapsed or not; None where nobody has it."""
    return state.read_document(Lease, path(spec))


def lapsed(lease: Lease) -> bool:
    """Whether the lease is over: its time is up on this boot's monotonic clock, or the host was booted since."""
    return left_s(lease) <= 0


def left_s(lease: Lease) -> float:
    """Seconds until the lease lapses; 0 where it has."""
    return 0.0 if rebooted(lease) else max(lease.until - time.monotonic(), 0.0)


def rebooted(lease: Lease) -> bool:
    """Whether the lease was granted or renewed before the last boot."""
    return lease.boot_id != procid.boot_id()


def same_grant(a: Lease | None, b: Lease) -> bool:
    """Whether ``a`` is the grant ``b``, renewed or not (a later acquire by the same run is another grant)."""
    return a is not None and (a.run_id, a.since) == (b.run_id, b.since)


def acquire(spec: RunSpec, first: Callable[[Lease], None] | None = None) -> Lease:
    """Give the lease to the spec's run: new, renewed (same run), or taken over (lapsed). TryAgain names the holder.

    :param first: is called with the lease before it is written, and under its lock; what it raises leaves all as it
        was.
    """
    with _locked(spec):
        old = read(spec)
        _check_hold(spec)
        if old is not None and old.run_id != spec.run_id and not lapsed(old):
            raise held_by(old)
        facts: dict[str, object] = {}
        if old is not None and not lapsed(old):
            lease, event = _extended(spec, old), "lease renewed by acquire"
        else:
            lease, event = _extended(spec, Lease(spec.run_id, time.time(), 0.0)), "lease acquired"
            if old is not None:
                event, facts = "lapsed lease taken over", {"from_run": old.run_id, "lapsed_at": old.expires}
        if first is not None:
            first(lease)
        state.write_document(path(spec), lease)
        state.journal(spec, event, expires=lease.expires, **facts)
        return lease


def renew(spec: RunSpec) -> Lease | None:
    """Push the expiry out where the spec's run holds the lease; None (and nothing changed) where it does not, or
    where it has lapsed."""
    if not path(spec).exists():
        return None
    with _locked(spec):
        lease = read(spec)
        if lease is None or lease.run_id != spec.run_id or lapsed(lease):
            return None
        lease = _extended(spec, lease)
        state.write_document(path(spec), lease)
        return lease


def expire(spec: RunSpec) -> Lease | None:
    """Let the own lease lapse now, so that the guard gives the host back at once; what it was, or None."""
    with _locked(spec):
        lease = read(spec)
        if lease is None or lease.run_id != spec.run_id:
            return None
        state.write_document(path(spec), replace(lease, expires=time.time(), until=0.0))
        state.journal(spec, "lease ended early: the guard takes over", holder=lease.run_id)
        return lease


def take_back(spec: RunSpec) -> None:
    """A person takes the host back: whoever's lease lapses now. Where nobody has it, a lapsed one is written, so that
    guards finish what the person began. A disk that takes no lease has it removed."""
    with _locked(spec):
        now = time.time()
        old = read(spec)
        lapsed_one = replace(old or Lease(spec.run_id, now, now, procid.boot_id()), expires=now, until=0.0)
        try:
            state.write_document(path(spec), lapsed_one)
        except (OSError, TryAgain):
            if old is None:
                raise
            path(spec).unlink()
        state.journal(spec, "lease ended by hand: production comes back", holder=old.run_id if old else "")


def release(spec: RunSpec, grant: Lease | None = None) -> Lease | None:
    """Give the lease up where the spec's run holds it, or the run of ``grant``, if it is still that grant; what it
    was, or None."""
    with _locked(spec):
        lease = read(spec)
        if lease is None or (not same_grant(lease, grant) if grant else lease.run_id != spec.run_id):
            return None
        path(spec).unlink()
        state.journal(spec, "lease released", holder=lease.run_id)
        return lease


def settle(spec: RunSpec) -> None:
    """Return once no acquire is half done: a guard that it has started waits here for the lease to be written."""
    with _locked(spec):
        pass


def hold(spec: RunSpec, run_id: str, *, everybody: bool) -> None:
    """From now on ``run_id`` (or everybody) is refused the lease, until ``lift``. What was held off before still is."""
    with _locked(spec):
        old = read_hold(spec)
        earlier = [] if old is None else [r for r in (*old.earlier, old.run_id) if r != run_id][-_KEEP_HELD_OFF:]
        everybody = everybody or (old is not None and old.everybody)
        state.write_document(_hold_path(spec), Hold(run_id, time.time(), everybody, earlier))
        state.journal(spec, "host taken back by hand", holder=run_id, everybody=everybody)


def lift(spec: RunSpec) -> None:
    """Take ``hold`` back."""
    with _locked(spec):
        if _hold_path(spec).exists():
            _hold_path(spec).unlink()
            state.journal(spec, "host lent again")


def read_hold(spec: RunSpec) -> Hold | None:
    """What a person said by ``restore --now``, if it still stands."""
    return state.read_document(Hold, _hold_path(spec))


def held_by(lease: Lease) -> TryAgain:
    """The error of another run: who holds the host, and until when."""
    since, until = state.utc(lease.since), state.utc(lease.expires)
    return TryAgain(
        f"the host is held by run {lease.run_id} until {until} (since {since}, renewed by its polls)",
        field="lease",
        value=lease.run_id,
        fix="wait until it is released, or until it lapses",
    )


def not_held(spec: RunSpec, why: str) -> HsxError:
    """The error of a run that holds no live lease: who has the host, or that its own lease has lapsed."""
    held = read(spec)
    if held is not None and held.run_id != spec.run_id and not lapsed(held):
        return held_by(held)
    ended = ""
    if held is not None and held.run_id == spec.run_id:
        ended = ": the host was booted since" if rebooted(held) else f": it lapsed at {state.utc(held.expires)}"
    return TryAgain(f"this run holds no lease{ended}{why}", field="lease", value=spec.run_id, fix="acquire the host")


def _extended(spec: RunSpec, lease: Lease) -> Lease:
    return replace(
        lease,
        expires=time.time() + spec.lease_ttl_s,
        boot_id=procid.boot_id(),
        until=time.monotonic() + spec.lease_ttl_s,
    )


def _check_hold(spec: RunSpec) -> None:
    held = read_hold(spec)
    if held is not None and (held.everybody or spec.run_id in (held.run_id, *held.earlier)):
        who = "every run" if held.everybody else f"run {spec.run_id}"
        raise Refused(
            f"the host was taken back by hand at {state.utc(held.since)}: {who} is refused",
            field="lease",
            value=spec.run_id,
            fix="lend it again with restore --lift" if held.everybody else "start a new run, or restore --lift",
        )


@contextmanager
def _locked(spec: RunSpec) -> Iterator[None]:
    state.check_machine(spec)
    with state.locked(state.folder(spec, "state") / "lease.lock", wait_s=20.0, what="the lease"):
        yield


def path(spec: RunSpec) -> Path:
    """Where the lease stands."""
    return state.home(spec) / "state" / "lease.json"


def _hold_path(spec: RunSpec) -> Path:
    return state.home(spec) / "state" / "hold.json"
