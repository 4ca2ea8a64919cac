"""What it does
  The dead man's switch, started detached by acquire, two of them. Each reads the lease every two seconds and starts the
  other again where it is gone. When the lease lapses (nobody renewed it: Airflow died, the network went, the run was
  killed, the host was booted), it gives the host back as the teardown does: production up, plugin reverted, lease
  released; it tries until that has succeeded, and wakes somebody where the profile says how. It ends when the lease is
  released or another run has it.
Result: RestoreReport: restored, or nothing.
Example
  python -m hsx_host guard --spec S --since 1790000000.5
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace

from hsx_host import borrow, guards, lease, page, restore, serve, state
from hsx_host.contract import Lease, RestoreReport, RunSpec
from hsx_host.errors import HsxError
from hsx_host.progress import log

HELP = "watch the lease and give the host back when it lapses (started by acquire)"
_RETRY_S = 30.0


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--since", type=float, required=True, help="which grant of the lease: its `since`")


def run(spec: RunSpec, args: Namespace) -> RestoreReport:
    mine = Lease(run_id=spec.run_id, since=args.since, expires=0.0)
    every = min(2.0, max(spec.lease_ttl_s / 10, 0.1))
    settled = stranded = False
    while True:
        try:
            if not settled:
                lease.settle(spec)
                settled = True
            now = lease.read(spec)
            if lease.same_grant(now, mine):
                _watch_twin(spec)
                if now is not None and not lease.lapsed(now):
                    time.sleep(every)
                    continue
                return _back(spec, mine)
            if now is None and (stranded or serve.mode_now(spec) == "extraction"):
                if not stranded:
                    state.journal(spec, "guard: the lease is gone, the extraction server is not")
                stranded = True  # should production not come back at once, it is still for this guard to see to
                return _back(spec, mine)
            log("the lease is given up: nothing to guard")
            if serve.mode_now(spec) == "production":
                page.restored(spec, mine)
            return restore.report("nothing", "the lease is given up", serve.recorded_facts(spec))
        except Exception as e:  # whatever it is (a full disk, say), nobody else would bring production back
            log(f"production is not back yet: {type(e).__name__}: {e}")
            state.journal(spec, "guard: production is not back yet", why=str(e)[:500])
            time.sleep(min(_RETRY_S, every * 10))


def _back(spec: RunSpec, grant: Lease) -> RestoreReport:
    try:
        report = restore.proved(spec, borrow.give_back(spec, grant))
    except Exception as e:
        if not (isinstance(e, HsxError) and e.doc.field == "lease"):  # another run has the host meanwhile
            page.not_restored(spec, grant, e)
        raise
    page.restored(spec, grant)
    state.journal(spec, "guard: the host is given back", server_pid=report.pid, problems=report.problems)
    return report


def _watch_twin(spec: RunSpec) -> None:
    """Start the other guard where it is gone; a disk that has no room for that must not keep this one from its work."""
    try:
        guards.watch(spec)
    except Exception as e:
        log(f"the other guard can't be started: {e}")
