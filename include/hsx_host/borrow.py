"""Borrowing the host and giving it back: who does it, and when nobody else would.

The setups and the ``restore`` teardown of a run do it for all its steps. A step that finds production running although
it needs the extraction server (a shard cleared by itself) borrows the host itself and gives it back at its end; of
several such steps at once, the last one does.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hsx_host import guards, jobs, lease, leftovers, patch, procid, serve, state
from hsx_host.contract import Lease, RunSpec, ServerFacts
from hsx_host.errors import HsxError, TryAgain
from hsx_host.procid import ProcId
from hsx_host.progress import log


@dataclass(frozen=True)
class Borrowers:
    """``state/borrowers.json``: [pid, start] of the steps that borrowed the host themselves. No file: nobody did; an
    empty list: the last one is giving the host back."""

    run_id: str
    steps: list[list[int]]


def acquire(spec: RunSpec, *, by_step: bool) -> Lease:
    """Take the lease for the spec's run, with its guard. TryAgain while another run holds it, or while production has
    not come back from a run whose lease has lapsed: what brings it back is started where nobody does.

    :param by_step: a step borrows the host for itself; otherwise the run's setup does, and its teardown gives it back.
    """
    if by_step:
        return guards.acquire(spec)
    old = lease.read(spec)
    if old is not None and lease.lapsed(old) and serve.mode_now(spec) not in ("production", "unknown"):
        guards.watch(spec)
        why = "the host was booted since" if lease.rebooted(old) else f"its lease lapsed at {state.utc(old.expires)}"
        raise TryAgain(
            f"production is being brought back after run {old.run_id} ({why})",
            field="lease",
            value=old.run_id,
            fix="wait until it serves; status says what is in the way",
        )
    if old is None or old.run_id == spec.run_id or lease.lapsed(old):
        serve.note_production(spec)
    granted = guards.acquire(spec)
    _borrowers_path(spec).unlink(missing_ok=True)
    return granted


@contextmanager
def extraction_server(spec: RunSpec) -> Iterator[ServerFacts]:
    """The extraction server, for as long as the block lasts.

    Where this run's setups brought the host to extraction, the server is ensured and left to the teardown. Otherwise
    the step borrows the host, and at the end brings production back and releases the lease, on errors too. A step that
    is stopped by a signal lets the lease lapse instead: the guard gives the host back, and the step ends at once.
    """
    if not _enter(spec):
        with _own_heartbeat(spec):
            yield serve.ensure(spec, "extraction")
        return
    log("this step borrows the host itself and gives it back at its end")
    try:
        with _own_heartbeat(spec):
            yield serve.ensure(spec, "extraction")
    except KeyboardInterrupt:
        if _leave(spec):
            lease.expire(spec)
            log("stopped by a signal: the guard gives the host back")
        raise
    except BaseException:
        with contextlib.suppress(Exception):  # the step's own error is the one to see
            _give_back_or_let_lapse(spec)
        raise
    _give_back_or_let_lapse(spec)


def _give_back_or_let_lapse(spec: RunSpec) -> None:
    """The last borrowing step gives the host back; where that fails, the guard goes on trying at once."""
    if not _leave(spec):
        return
    try:
        give_back(spec, by_step=True)
    except Exception as e:
        log(f"giving the host back failed: {e}; the guard tries again")
        lease.expire(spec)
        raise


def give_back(spec: RunSpec, grant: Lease | None = None, *, by_step: bool = False) -> ServerFacts:
    """Production up, plugin reverted, lease released: the one way back, of teardown, step, guard and recovery.

    The lease stays where a setup or a step of this run has borrowed the host anew meanwhile: it is theirs then.

    :param grant: a guard's or a recovery's: only this grant is ended, and only after it has lapsed.
    :param by_step: the last step on the list of borrowers gives the host back.
    """
    facts = serve.ensure(spec, "production", grant=grant)
    leftovers.remove(spec)
    with state.transition(spec, wait_s=spec.production.start_timeout_s, goal="production"):
        current = state.read_server(spec)
        if current is not None and current.mode == "production":  # a new run may be at work already
            patch.revert(spec)
        if grant is None and (_borrowed_anew(spec, by_step) or serve.mode_now(spec) == "extraction"):
            log("this run has borrowed the host anew meanwhile: the lease stays")
        elif grant is None and procid.identify(facts.pid) is None:
            log("production is gone again: the guard brings it back")
            lease.expire(spec)
        else:
            lease.release(spec, grant)
            if by_step:
                _borrowers_path(spec).unlink(missing_ok=True)
    return facts


def _borrowed_anew(spec: RunSpec, by_step: bool) -> bool:
    """Whether a step, or a setup after a step's end, has borrowed the host since it was to be given back."""
    steps = _borrowers(spec)
    if by_step:
        return steps != Borrowers(spec.run_id, [])
    return steps is not None and steps.run_id == spec.run_id and bool(_living(steps.steps))


def _enter(spec: RunSpec) -> bool:
    """Whether this step borrows the host itself. It does where setups did not: no extraction mode under our lease."""
    with state.transition(spec, wait_s=spec.production.start_timeout_s + spec.extraction.start_timeout_s):
        held, server, steps = lease.read(spec), state.read_server(spec), _borrowers(spec)
        ours = held is not None and held.run_id == spec.run_id and not lease.lapsed(held)
        by_setup = ours and steps is None and server is not None and server.mode == "extraction"
        if by_setup:
            return False
        acquire(spec, by_step=True)
        me = procid.identify(os.getpid())
        assert me is not None
        others = steps.steps if steps is not None and steps.run_id == spec.run_id else []
        _write_borrowers(spec, [*_living(others), [me.pid, me.start]])
        return True


def _leave(spec: RunSpec) -> bool:
    """Take this step off the list; whether it was the last one, which gives the host back."""
    with state.transition(spec, wait_s=spec.production.start_timeout_s + spec.extraction.start_timeout_s):
        steps = _borrowers(spec)
        if steps is None or steps.run_id != spec.run_id:
            return False  # a setup or another run took the host over meanwhile
        left = [s for s in _living(steps.steps) if s[0] != os.getpid()]
        if left:
            _write_borrowers(spec, left)
            return False
        try:
            _write_borrowers(spec, [])  # not removed yet: without a list, a step would take the host for its setup's
        except (OSError, TryAgain):  # a full disk; the lease is left to lapse then
            _borrowers_path(spec).unlink(missing_ok=True)
        return True


@contextmanager
def _own_heartbeat(spec: RunSpec) -> Iterator[None]:
    """Renew the lease and watch its guards while the block lasts. In a job only polls renew it, so that a run whose
    Airflow is gone lapses; the job watches the guards, so that one is there then."""
    keep = guards.watch if jobs.JOB_VARIABLE in os.environ else guards.renew
    end = threading.Event()

    def beat() -> None:
        while not end.wait(min(max(spec.lease_ttl_s / 3, 0.05), 10.0)):
            with contextlib.suppress(HsxError, OSError):
                keep(spec)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _borrowers_path(spec: RunSpec) -> Path:
    return state.folder(spec, "state") / "borrowers.json"


def _borrowers(spec: RunSpec) -> Borrowers | None:
    return state.read_document(Borrowers, _borrowers_path(spec))


def _write_borrowers(spec: RunSpec, steps: list[list[int]]) -> None:
    state.write_document(_borrowers_path(spec), Borrowers(spec.run_id, steps))


def _living(steps: list[list[int]]) -> list[list[int]]:
    return [s for s in steps if procid.alive(ProcId(*s))]
