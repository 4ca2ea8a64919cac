"""Waking somebody from the host itself: the guards have tried to bring production back, and it did not come.

Airflow tells its own people when its restore fails; but where the guards restore, Airflow or the run may be gone. So
the profile may name a command of the owner's (``alerts.host_command``), which is called with one text as its last
argument: at the first try that failed, each hour while it goes on, and once when production is back.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from hsx_host import byhand, procid, program, state
from hsx_host.contract import Lease, RunSpec
from hsx_host.errors import HsxError
from hsx_host.progress import log

AGAIN_S = 3600.0
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Paged:
    """``runs/<run>/paged.json``: when a guard of the grant of ``since`` paged last, on this boot's monotonic clock."""

    since: float
    boot_id: str
    at: float


def not_restored(spec: RunSpec, grant: Lease, why: BaseException) -> None:
    """Page that production may be down, unless a guard of this grant did within the last hour."""
    if not spec.page_command or not _due(spec, grant):
        return
    command = state.home(spec) / byhand.NAME
    _page(
        spec,
        f"PRODUCTION MAY BE DOWN on host {socket.gethostname()}, port {spec.production.port}: the guard of run "
        f"{grant.run_id} has not brought it back and goes on trying: {why}\n"
        f"On the host: {command} status, {command} restore --now",
    )


def restored(spec: RunSpec, grant: Lease) -> None:
    """Page that production is back, where somebody was woken."""
    known = _read(spec)
    if spec.page_command and known is not None and known.since == grant.since:
        try:
            _path(spec).unlink()
        except FileNotFoundError:  # the other guard has told it
            return
        except OSError as e:
            log(f"{_path(spec)} can't be removed: {e}")
        _page(spec, f"production is back on host {socket.gethostname()}, port {spec.production.port}: {grant.run_id}")


def _due(spec: RunSpec, grant: Lease) -> bool:
    """Whether it is time to page, and note it. A disk that takes no note keeps nobody asleep."""
    try:
        with state.locked(_path(spec).with_suffix(".lock"), wait_s=10.0, what="the page"):
            known, now = _read(spec), time.monotonic()
            same = known is not None and (known.since, known.boot_id) == (grant.since, procid.boot_id())
            if same and known is not None and now - known.at < AGAIN_S:
                return False
            state.write_document(_path(spec), Paged(grant.since, procid.boot_id(), now))
    except (OSError, HsxError) as e:
        log(f"when somebody was paged can't be noted: {e}")
    return True


def _page(spec: RunSpec, text: str) -> None:
    """Call the command; one that fails is told, and keeps the guard from nothing."""
    env = program.of_others()
    try:
        done = subprocess.run(
            [*spec.page_command, text],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd="/",
            env=env,
            timeout=_TIMEOUT_S,
            start_new_session=True,
        )
        said = done.stderr.decode(errors="replace").strip()[-300:]
        failed = f"it ended with {done.returncode}: {said}" if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as e:
        failed = str(e)
    state.journal(spec, "paging failed" if failed else "somebody was paged", program=spec.page_command[0], why=failed)
    if failed:
        log(f"nobody was paged: {spec.page_command[0]}: {failed}")


def _read(spec: RunSpec) -> Paged | None:
    with contextlib.suppress(HsxError, OSError):
        return state.read_document(Paged, _path(spec))
    return None


def _path(spec: RunSpec) -> Path:
    return state.home(spec) / "runs" / state.run_key(spec.run_id) / "paged.json"
