"""The lease on the host: one run at a time may bring the host to another mode than production.

The lease has a lock of its own, held for microseconds: a poll renews the lease while a transition (minutes) goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from hsx_host import procid, state
from hsx_host.contract import Lease, RunSpec
from hsx_host.errors import TryAgain


def read(spec: RunSpec) -> Lease | None:
    """The lease as it stands in the home, lapsed or not; None where nobody has it."""
    return state.read_document(Lease, _path(spec))


def lapsed(lease: Lease) -> bool:
    return time.time() >= lease.expires


def same_grant(a: Lease | None, b: Lease) -> bool:
    """Whether ``a`` is the grant ``b``, renewed or not (a later acquire by the same run is another grant)."""
    return a is not None and (a.run_id, a.since) == (b.run_id, b.since)


def acquire(spec: RunSpec) -> Lease:
    """Give the lease to the spec's run: new, renewed (same run), or taken over (lapsed). TryAgain names the holder."""
    with _locked(spec):
        old, now = read(spec), time.time()
        if old is not None and old.run_id != spec.run_id and not lapsed(old):
            raise held_by(old)
        if old is not None and old.run_id == spec.run_id and not lapsed(old):
            lease = replace(old, expires=now + spec.lease_ttl_s, boot_id=procid.boot_id())
            event, facts = "lease renewed by acquire", {}
        elif old is not None:
            lease = Lease(spec.run_id, now, now + spec.lease_ttl_s, procid.boot_id())
            event, facts = "lapsed lease taken over", {"from_run": old.run_id, "lapsed_at": old.expires}
        else:
            lease = Lease(spec.run_id, now, now + spec.lease_ttl_s, procid.boot_id())
            event, facts = "lease acquired", {}
        state.write_document(_path(spec), lease)
        state.journal(spec, event, expires=lease.expires, **facts)
        return lease


def renew(spec: RunSpec) -> Lease | None:
    """Push the expiry out where the spec's run holds the lease; None (and nothing changed) where it does not."""
    if not _path(spec).exists():
        return None
    with _locked(spec):
        lease = read(spec)
        if lease is None or lease.run_id != spec.run_id:
            return None
        lease = replace(lease, expires=time.time() + spec.lease_ttl_s)
        state.write_document(_path(spec), lease)
        return lease


def expire(spec: RunSpec) -> None:
    """Let the own lease lapse now, so that the guard gives the host back at once."""
    with _locked(spec):
        lease = read(spec)
        if lease is not None and lease.run_id == spec.run_id:
            state.write_document(_path(spec), replace(lease, expires=time.time()))
            state.journal(spec, "lease ended early: the guard takes over")


def release(spec: RunSpec, grant: Lease | None = None) -> Lease | None:
    """Give the lease up where the spec's run holds it (and it is ``grant``, if one is named); what it was, or None."""
    with _locked(spec):
        lease = read(spec)
        if lease is None or lease.run_id != spec.run_id or (grant is not None and not same_grant(lease, grant)):
            return None
        _path(spec).unlink()
        state.journal(spec, "lease released")
        return lease


def held_by(lease: Lease) -> TryAgain:
    """The error of another run: who holds the host, and until when."""
    until = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(lease.expires))
    return TryAgain(
        f"the host is held by run {lease.run_id} until {until}",
        field="lease",
        value=lease.run_id,
        fix="wait until it is released, or until it lapses",
    )


@contextmanager
def _locked(spec: RunSpec) -> Iterator[None]:
    with state.locked(state.folder(spec, "state") / "lease.lock", wait_s=10.0, what="the lease"):
        yield


def _path(spec: RunSpec) -> Path:
    return state.home(spec) / "state" / "lease.json"
