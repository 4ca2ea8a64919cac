"""What it does
  The dead man's switch, started detached by acquire. It reads the lease every two seconds. When the lease lapses
  (nobody renewed it: Airflow died, the network went, the run was killed), it brings production back, reverts the plugin
  and releases the lease. It ends when the lease is released or another run has it.
Result: ServerFacts of production, or of what stands where there was nothing to do.
Example
  python -m hsx_host guard --spec S --since 1790000000.5
"""

from __future__ import annotations

import contextlib
import time
from argparse import ArgumentParser, Namespace

from hsx_host import borrow, lease, state
from hsx_host.contract import Lease, RunSpec, ServerFacts
from hsx_host.progress import log

HELP = "watch the lease and give the host back when it lapses (started by acquire)"
_RETRY_S = 30.0


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--since", type=float, required=True, help="which grant of the lease: its `since`")


def run(spec: RunSpec, args: Namespace) -> ServerFacts:
    mine = Lease(run_id=spec.run_id, since=args.since, expires=0.0)
    every = min(2.0, max(spec.lease_ttl_s / 10, 0.1))
    while True:
        try:
            now = lease.read(spec)
            if now is None or not lease.same_grant(now, mine):
                log("the lease is given up: nothing to guard")
                return _nothing(spec)
            if not lease.lapsed(now):
                time.sleep(every)
                continue
            _note(spec, "lease lapsed: the guard gives the host back", lapsed_at=now.expires)
            return borrow.give_back(spec, mine)
        except Exception as e:  # whatever it is (a full disk, say), nobody else would bring production back
            log(f"production is not back yet: {type(e).__name__}: {e}")
            _note(spec, "guard: production is not back yet", why=str(e)[:500])
            time.sleep(min(_RETRY_S, every * 10))


def _note(spec: RunSpec, event: str, **facts: object) -> None:
    """A line in the journal where there is room for it."""
    with contextlib.suppress(OSError):
        state.journal(spec, event, **facts)


def _nothing(spec: RunSpec) -> ServerFacts:
    server = state.read_server(spec)
    if server is None:
        return ServerFacts("unknown", False, 0, spec.production.port, "", 0.0, "", "")
    return ServerFacts(
        server.mode, False, server.pid, server.port, server.launch_hash, server.ready_s, server.plugin_id, server.log
    )
