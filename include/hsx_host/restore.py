"""What it does
  restore          gives the host back as a run's teardown does: production up, plugin reverted, lease released, and
                   the proof that SGLang's files are untouched. Refused while another run holds the host.
  restore --now    the same by hand, from any state and whoever holds the host: the lease ends, a start of the
                   extraction server that is under way is stopped, production comes back. The run that held the host
                   can't borrow it again (its retries are refused); --hold refuses every run.
  restore --lift   lends the host again after --now.
  Without --spec it goes by the run that was granted the host last.
  A terminal gets a few lines for people instead of the document.
Result: RestoreReport.
Example
  python -m hsx_host restore --now
"""

from __future__ import annotations

import signal
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from hsx_host import adopt, borrow, guards, inherited, jobs, launch, lease, leftovers, patch, procid, serve, state
from hsx_host.contract import Lease, RestoreReport, RunSpec, ServerFacts
from hsx_host.errors import BadInput, HsxError
from hsx_host.procid import ProcId
from hsx_host.progress import log

HELP = "give the host back; --now: whatever its state, by hand"
_UNWIND_S = 30.0
_DOCUMENTS: dict[str, type[Any]] = {
    "lease.json": Lease,
    "hold.json": lease.Hold,
    "guard.json": guards.GuardRecord,
    "server.json": state.ServerState,
    "borrowers.json": borrow.Borrowers,
    "launch_base.json": inherited.LaunchBase,
}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--now", action="store_true", help="whoever holds the host, and whatever its state")
    parser.add_argument("--hold", action="store_true", help="with --now: no run may borrow the host until --lift")
    parser.add_argument("--lift", action="store_true", help="lend the host again after --now")


def run(spec: RunSpec, args: Namespace) -> RestoreReport:
    if args.hold and not args.now:
        raise BadInput("goes with --now only", field="--hold", value="", fix="restore --now --hold")
    if args.lift:
        if args.now:
            raise BadInput("does not go with --now", field="--lift", value="", fix="one after the other")
        lease.lift(spec)
        return report("nothing", "the host is lent again", serve.recorded_facts(spec))
    if args.now:
        # A terminal that goes ends no way back. A handler, not SIG_IGN: production would inherit that.
        signal.signal(signal.SIGHUP, lambda *_: None)
        return by_hand(spec, everybody=args.hold)
    if left := jobs.end_left(spec, _UNWIND_S):
        log(f"ended what tasks of this run have left at work: {', '.join(left)}")
    return proved(spec, borrow.give_back(spec))


def by_hand(spec: RunSpec, *, everybody: bool) -> RestoreReport:
    """Production back from any state. Documents of hsx that can't be read are set aside, never trusted."""
    if "hold.json" in set_broken_aside(spec):
        everybody = True  # whom it held off is not known any more
    held, was_down = lease.read(spec), serve.mode_now(spec) in ("stopped", "extraction")
    run_id = held.run_id if held else spec.run_id
    problems: list[str] = []
    with _told(problems, f"run {run_id} is not refused, mark it failed in Airflow"):
        lease.hold(spec, run_id, everybody=everybody)
    with _told(problems, f"the lease of run {run_id} can't be ended, it may take the host away again"):
        lease.take_back(spec)
    with _told([], "no guard would finish this, should it be cut off"):
        guards.watch(spec)
    _end_other_transition(spec)
    try:
        facts = serve.ensure(spec, "production", by_hand=True)
    except (OSError, HsxError):
        if held is None:  # nobody had the host: without that lease its guards end, as none were there before
            _release_lapsed(spec, problems)
        raise
    with (
        _told(problems, "the capture plugin's files are still there"),
        state.transition(spec, wait_s=spec.production.start_timeout_s, goal="production"),
    ):
        current = state.read_server(spec)
        if current is not None and current.mode == "production":
            patch.revert(spec)
    leftovers.remove(spec)
    _release_lapsed(spec, problems)
    report = proved(spec, facts)  # a guard may have been first
    return replace(report, changed=report.changed or was_down, problems=[*problems, *report.problems])


def _release_lapsed(spec: RunSpec, problems: list[str]) -> None:
    with _told(problems, "the lease that has ended can't be removed"):
        left = lease.read(spec)
        if left is not None and lease.lapsed(left):
            lease.release(spec, left)


@contextmanager
def _told(problems: list[str], what: str) -> Iterator[None]:
    """What a full or read-only disk keeps a person's command from is told, and keeps production from nothing."""
    try:
        yield
    except (OSError, HsxError) as e:
        log(f"{what}: {e}")
        problems.append(f"{what}: {e}")


def set_broken_aside(spec: RunSpec, *, leave: Collection[str] = ()) -> list[str]:
    """Put documents of hsx that can't be read out of the way; the names of those that were.

    :param leave: names of documents that stay as they are.
    """
    aside = []
    for name, cls in _DOCUMENTS.items():
        if name in leave:
            continue
        path = state.folder(spec, "state") / name
        try:
            state.read_document(cls, path)
        except HsxError as e:
            log(f"set aside: {e}")
            try:
                state.set_aside(path)
            except OSError as why:  # a read-only disk
                log(f"{name} can't be set aside: {why.strerror}")
                continue
            aside.append(name)
            state.journal(spec, "broken document set aside", file=name, why=str(e)[:300])
    return aside


def proved(spec: RunSpec, facts: ServerFacts) -> RestoreReport:
    """The report about production that is up, with the proof that SGLang's files are as installed."""
    problems: list[str] = []
    version, checked, pristine = "", 0, False
    server = state.read_server(spec)
    if server is None or server.pid != facts.pid:
        problems.append("production runs without a record of hsx's (is the home's disk full or read-only?)")
    elif adopted := adopt.launch_of(spec):
        problems += inherited.differences(spec, adopted, sorted(launch.owned(server).living(), key=lambda p: p.pid))
    try:
        version, checked = patch.check_installed()
        pristine = True
    except HsxError as e:
        problems.append(str(e))
    text = f"production is up (pid {facts.pid}, port {facts.port})"
    return report("restored", text, facts, version, checked, pristine, problems)


def lines(answer: RestoreReport) -> list[str]:
    """The answer for a person."""
    return [f"{answer.action}: {answer.text}", *(f"problem: {why}" for why in answer.problems)]


def report(
    action: str,
    text: str,
    facts: ServerFacts,
    version: str = "",
    checked: int = 0,
    pristine: bool = False,
    problems: list[str] | None = None,
) -> RestoreReport:
    """The document about a server."""
    return RestoreReport(
        action=action,
        text=text,
        mode=facts.mode,
        changed=facts.changed,
        pid=facts.pid,
        port=facts.port,
        ready_s=facts.ready_s,
        log=facts.log,
        sglang=version,
        files_checked=checked,
        pristine=pristine,
        problems=problems or [],
    )


def _end_other_transition(spec: RunSpec) -> None:
    """Stop the verb that is taking the host away from production right now: SIGTERM, time to unwind, SIGKILL. Only a
    process that has this home's lock file open is one; one that brings production up is left to it."""
    holder = state.transition_holder(spec)
    if holder is None or holder[1] == "production":
        return
    proc, goal = holder
    log(f"pid {proc.pid} is taking the host to {goal or 'another mode'}: it is stopped")
    state.journal(spec, "transition ended by hand", holder_pid=proc.pid, goal=goal)
    deadline = time.monotonic() + _UNWIND_S + spec.production.stop_grace_s
    procid.send(proc, signal.SIGTERM)
    while procid.alive(proc) and _holds(spec, proc):
        if time.monotonic() > deadline:
            procid.send(proc, signal.SIGKILL)
        time.sleep(0.1)


def _holds(spec: RunSpec, proc: ProcId) -> bool:
    now = state.transition_holder(spec)
    return now is not None and now[0] == proc
