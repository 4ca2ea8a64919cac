"""What it does
  Says how the host stands and changes nothing: the mode on record and whether its server lives, who holds the host
  since when and until when, its guards, what is in the way, and the last lines of the journal. --health also asks the
  server for one token, and waits 10 seconds for it. A terminal gets a few lines for people instead of the document.
  Without --spec it goes by the run that was granted the host last.
Result: StatusResult.
Example
  python -m hsx_host status --spec S
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import TypeVar

from hsx_host import guards, lease, procid, state
from hsx_host.contract import Lease, RunSpec, StatusResult
from hsx_host.errors import HsxError
from hsx_host.procid import ProcId

T = TypeVar("T")
_PERSON_WAITS_S = 10.0  # for a server that hangs

HELP = "the host's mode, who holds it, what is in the way, and the last transitions"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--health", action="store_true", help="ask the server for a real token")
    parser.add_argument("--renew", action="store_true", help="renew the lease of the spec's run: for a sensor's polls")
    parser.add_argument("--lines", type=int, default=20, help="journal lines to show")


def run(spec: RunSpec, args: Namespace) -> StatusResult:
    if args.renew:
        guards.renew(spec)
    ways: list[str] = []
    server = _read(lambda: state.read_server(spec), ways)
    held = _read(lambda: lease.read(spec), ways)
    alive = (
        server is not None
        and server.phase != "stopped"
        and server.boot_id == procid.boot_id()
        and procid.alive(ProcId(server.pid, server.start))
    )
    mode = "unknown" if server is None else server.mode if alive else "stopped"
    watching = (_read(lambda: guards.living(spec, held), ways) or []) if held else []
    problem = ""
    if args.health:
        from hsx_host import health  # requests takes longer to import than the rest of this verb

        settings = spec.extraction if mode == "extraction" else spec.production
        wait_s = health.REQUEST_TIMEOUT_S if args.renew else _PERSON_WAITS_S
        problem = health.problem(settings, wait_s)
        ways += [f"the server does not serve: {problem}"] if problem else []
    ways += _of_the_lease(spec, held, watching)
    if (taken := _read(lambda: lease.read_hold(spec), ways)) is not None:
        who = "every run" if taken.everybody else " and ".join(f"run {run}" for run in (*taken.earlier, taken.run_id))
        ways.append(f"taken back by hand at {state.utc(taken.since)}: {who} is refused until restore --lift")
    if server is not None and server.phase != "stopped" and not alive:
        ways.append(f"the {server.mode} server on record (pid {server.pid}) is gone: {server.log or 'it has no log'}")
    if not args.renew:  # a sensor's poll is frequent, and asks for one thing
        ways += _strangers(spec, server if alive else None)
    if held is None and mode in ("stopped", "extraction"):
        ways.append(f"nobody has the host, and its mode is {mode}: restore --now brings production back")
    return StatusResult(
        mode=mode,
        phase=server.phase if server is not None and alive else "",
        pid=server.pid if server is not None and alive else 0,
        healthy=args.health and not problem,
        problem=problem,
        lease=held,
        lapses_in_s=round(lease.left_s(held), 1) if held else 0.0,
        guards=[p.pid for p in watching],
        in_the_way=ways,
        journal=state.journal_tail(spec, args.lines),
    )


def lines(answer: StatusResult) -> list[str]:
    """The answer for a person."""
    serves = ", serves" if answer.healthy else ""
    told = [f"mode: {answer.mode} {answer.phase}".rstrip() + (f", pid {answer.pid}" if answer.pid else "") + serves]
    if answer.lease:
        told.append(
            f"held by: {answer.lease.run_id}, since {state.utc(answer.lease.since)}, lapses at "
            f"{state.utc(answer.lease.expires)} (in {answer.lapses_in_s:.0f} s); guards {answer.guards or 'none'}"
        )
    else:
        told.append("held by: nobody")
    told += [f"in the way: {way}" for way in answer.in_the_way]
    for line in answer.journal:
        try:
            body = json.loads(line)
            told.append(f"  {state.utc(body['time'])}  {body['event']}  ({body['run_id']}, pid {body['pid']})")
        except (ValueError, KeyError, TypeError):
            told.append(f"  {line[:200]}")
    return told


def _read(get: Callable[[], T], ways: list[str]) -> T | None:
    """What a document says; one that can't be read is in the way, and None."""
    try:
        return get()
    except HsxError as e:
        ways.append(str(e))
        return None


def _of_the_lease(spec: RunSpec, held: Lease | None, watching: list[ProcId]) -> list[str]:
    ways = []
    if held is not None and lease.rebooted(held):
        ways.append("the host was booted since the lease was renewed: recover brings production back")
    elif held is not None and lease.lapsed(held):
        ways.append("the lease has lapsed: its guard gives the host back")
    if held is not None and not watching:
        ways.append("no guard of the lease lives: recover starts them")
    busy = state.transition_holder(spec)
    if busy is not None:
        ways.append(f"pid {busy[0].pid} is taking the host to {busy[1] or 'another state'}")
    return ways


def _strangers(spec: RunSpec, server: state.ServerState | None) -> list[str]:
    """Who is on the servers' ports or devices without belonging to the server that runs."""
    from hsx_host import devices, processes  # psutil: the light verbs do without

    ours = {pid for pid, _ in server.tree} | {server.pid} if server else set()
    ways = []
    for port in sorted({spec.production.port, spec.extraction.port}):
        ways += [
            f"port {port} is held by {processes.describe(pid)}"
            for pid in processes.listeners(port)
            if pid not in ours and not (server is not None and server.port == port)
        ]
    try:
        others = processes.holders([u for u in devices.compute_apps() if u.pid not in ours])
        ways += [f"device memory is held by somebody else: {other}" for other in others]
    except HsxError as e:
        ways.append(str(e))
    return ways
