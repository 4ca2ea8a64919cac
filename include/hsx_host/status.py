"""What it does
  Says how the host stands and changes nothing: the mode on record and whether its server lives, the lease, the last
  lines of the journal. --health also asks the server for one token.
Result: StatusResult.
Example
  python -m hsx_host status --spec S
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from hsx_host import guards, lease, procid, state
from hsx_host.contract import RunSpec, StatusResult
from hsx_host.procid import ProcId

HELP = "the host's mode, lease and last transitions"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--health", action="store_true", help="ask the server for a real token")
    parser.add_argument("--renew", action="store_true", help="renew the lease of the spec's run: for a sensor's polls")
    parser.add_argument("--lines", type=int, default=10, help="journal lines to show")


def run(spec: RunSpec, args: Namespace) -> StatusResult:
    if args.renew:
        guards.renew(spec)
    server = state.read_server(spec)
    alive = (
        server is not None
        and server.phase != "stopped"
        and server.boot_id == procid.boot_id()
        and procid.alive(ProcId(server.pid, server.start))
    )
    mode = "unknown" if server is None else server.mode if alive else "stopped"
    problem = ""
    if args.health:
        from hsx_host import health  # requests takes longer to import than the rest of this verb

        settings = spec.extraction if mode == "extraction" else spec.production
        problem = health.problem(settings)
    return StatusResult(
        mode=mode,
        phase=server.phase if server is not None and alive else "",
        pid=server.pid if server is not None and alive else 0,
        healthy=args.health and not problem,
        problem=problem,
        lease=lease.read(spec),
        journal=state.journal_tail(spec, args.lines),
    )
