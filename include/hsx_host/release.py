"""What it does
  Gives the lease up; the guard ends. Done already: nothing happens. It does not bring production back: `serve
  production` does, and comes first. Refused while production is not up, unless --abandon says that nobody shall bring
  it back; never given up while the extraction server is up.
Result: Lease (the one that was given up; expires 0 where there was none).
Example
  python -m hsx_host release --spec S
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from hsx_host import lease, procid, state
from hsx_host.contract import Lease, RunSpec
from hsx_host.errors import Refused
from hsx_host.procid import ProcId

HELP = "give this run's lease up"
_WAIT_S = 30.0


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--abandon", action="store_true", help="leave the host as it is, with production stopped")


def run(spec: RunSpec, args: Namespace) -> Lease:
    with state.transition(spec, wait_s=_WAIT_S, goal="production"):  # no other verb starts or stops a server meanwhile
        return _release(spec, abandon=args.abandon)


def _release(spec: RunSpec, *, abandon: bool) -> Lease:
    held = lease.read(spec)
    if held is None or held.run_id != spec.run_id:
        return Lease(run_id=spec.run_id, since=0.0, expires=0.0)
    server = state.read_server(spec)
    up = server is not None and procid.boot_id() == server.boot_id and procid.alive(ProcId(server.pid, server.start))
    mode = server.mode if server is not None and up else "none"
    if server is not None and mode != "production" and not (abandon and mode == "none"):
        raise Refused(
            "production is not up: without a lease nobody would give the host back",
            field="lease",
            value=spec.run_id,
            fix="serve production first",
        )
    return lease.release(spec) or Lease(run_id=spec.run_id, since=0.0, expires=0.0)
