"""Detached verbs: started over SSH, they outlive the connection and are polled by id.

A job is a folder ``<home>/jobs/<id>/``: ``job.json``, ``stdout``, ``stderr``, ``rc``. A small runner process leads the
job's session, runs the verb as its child and writes ``rc`` at its end; whoever asks needs only the files and /proc.
A job lives as long as anything of its session does: a verb whose runner was killed is still the job, and no second copy
is started beside it.
This module imports nothing heavy: a poll is one short-lived process a time.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hsx_host import procid, program, progress, state
from hsx_host.contract import JOB_DEADLINE, JobStatus, RunSpec
from hsx_host.errors import BUG, BadInput, HsxError, TryAgain

CHUNK_BYTES = 64 * 1024
DEADLINE_GRACE_S = 30.0  # for a verb to unwind when its deadline has passed
JOB_VARIABLE = "HSX_JOB"  # set inside a job: its lease is kept by polls, not by itself
_ID = re.compile(r"[A-Za-z0-9._-]{1,200}")


@dataclass(frozen=True)
class JobRecord:
    """``job.json``: the runner of one job. Private to the host program."""

    id: str
    pid: int
    start: int
    boot_id: str
    run_id: str
    command: list[str]
    started: float
    deadline_s: float = 0.0


def start(spec: RunSpec, job_id: str, command: list[str], *, again: bool, deadline_s: float = 0.0) -> JobStatus:
    """Start a job, or answer with the status of the one that has this id.

    :param command: the arguments of ``python -m hsx_host``.
    :param again: start a finished (done or dead) job anew; its old files are kept with a number. A running job is
        never started twice.
    :param deadline_s: seconds after which the runner ends the job, whether or not anybody still asks; 0 means never.
    """
    where = _folder(spec, job_id)
    where.mkdir(parents=True, exist_ok=True)
    with state.locked(where / "lock", wait_s=30.0, what=f"the start of job {job_id}"):
        now = poll(spec, job_id, 0)
        if now.state == "running" or (now.state != "absent" and not again):
            return now
        if now.state != "absent":
            _rotate(where)
        _launch(spec, job_id, where, command, deadline_s)
        state.journal(spec, "job started", job=job_id, command=command)
    return poll(spec, job_id, 0)


def poll(spec: RunSpec, job_id: str, offset: int, *, resume: bool = False) -> JobStatus:
    """How the job stands, and its new stderr from ``offset`` (bytes): at most CHUNK_BYTES, whole lines while it runs.

    A finished job may have more log than one chunk: ask on until ``log`` is empty. An offset says that all
    before it was shown, and is kept: a reader that starts anew gives ``resume`` and goes on where the last one stopped.
    """
    where = _folder(spec, job_id)
    record = state.read_document(JobRecord, where / "job.json")
    if record is None:
        return JobStatus(id=job_id, state="absent", rc=None, pid=0, log="", offset=offset, document="")
    if not 0 <= offset <= sys.maxsize:
        raise BadInput("is no place in a log", field="--offset", value=offset, fix="give what the last poll answered")
    offset = _shown(where, offset, resume)
    here = procid.alive(procid.ProcId(record.pid, record.start)) and record.boot_id == procid.boot_id()
    here = here or bool(_living(record))
    rc = _rc(where)  # after the look at the process: a runner that has just ended has written it
    now = "done" if rc is not None else "running" if here else "dead"
    log, offset = _log(where / "stderr", offset, whole=now != "running")
    document = _text(where / "stdout") if now == "done" else ""
    return JobStatus(id=job_id, state=now, rc=rc, pid=record.pid, log=log, offset=offset, document=document)


def kill(spec: RunSpec, job_id: str, grace_s: float) -> JobStatus:
    """End a job: SIGTERM to its process group, ``grace_s`` seconds to unwind, then SIGKILL."""
    where = _folder(spec, job_id)
    record = state.read_document(JobRecord, where / "job.json")
    if record is None or poll(spec, job_id, 0).state != "running":
        return poll(spec, job_id, 0)
    state.journal(spec, "job killed", job=job_id)
    _send(_living(record), signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and poll(spec, job_id, 0).state == "running":
        time.sleep(0.1)
    if poll(spec, job_id, 0).state == "running":
        while left := _living(record):
            _send(left, signal.SIGKILL)
            time.sleep(0.02)
        if _rc(where) is None:
            state.write_text(where / "rc", f"{128 + signal.SIGKILL}\n")
    return poll(spec, job_id, 0)


def end_left(spec: RunSpec, grace_s: float) -> list[str]:
    """End the jobs of the spec's run that still live, this one apart; their ids.

    For the end of a run: Airflow tells nobody of a task that is marked between its deferral and its trigger's start.
    A job whose files can't be read or written is told and left: production comes back behind this.
    """
    ended = []
    for file in sorted((state.home(spec) / "jobs").glob("*/job.json")):
        try:
            record = state.read_document(JobRecord, file)
            mine = record is not None and record.run_id == spec.run_id and record.id != os.environ.get(JOB_VARIABLE)
            if record is not None and mine and _living(record):
                kill(spec, record.id, grace_s)
                ended.append(record.id)
        except (HsxError, OSError) as e:
            progress.log(f"whether job {file.parent.name} is still at work can't be told: {e}")
    return ended


def detach(argv: list[str], *, log: Path, cwd: Path) -> int:
    """Run a command in a session of its own that no longer belongs to this process; gives its pid."""
    code = (
        "import os,sys\npid=os.fork()\nif pid: print(pid); sys.stdout.flush(); os._exit(0)\nos.setsid()\n"
        "os.dup2(2, 1)\nos.execv(sys.argv[1], sys.argv[1:])"
    )
    with log.open("ab") as err:
        started = subprocess.run(
            [sys.executable, "-ISc", code, *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=err,
            cwd=cwd,
            env=program.environment(),
            check=True,
        )
    return int(started.stdout)


def _launch(spec: RunSpec, job_id: str, where: Path, command: list[str], deadline_s: float) -> None:
    """Fork the runner and wait until its ``job.json`` stands."""
    receive, send = os.pipe()
    first = os.fork()
    if first == 0:
        if os.fork():
            os._exit(0)
        os.setsid()  # after the second fork: the runner leads a session and a group, which kill uses
        _runner(spec, job_id, where, command, deadline_s, send)
    os.close(send)
    os.waitpid(first, 0)
    with os.fdopen(receive, "rb") as pipe:
        said = pipe.read()
    if said != b"ok":
        raise TryAgain(f"the job's runner did not start: {said.decode(errors='replace')}", field="job", value=job_id)


def _runner(spec: RunSpec, job_id: str, where: Path, command: list[str], deadline_s: float, send: int) -> NoReturn:
    """The job's runner: never returns. Holds no file of its starter, ignores SIGTERM (the verb gets it too)."""
    rc = BUG
    try:
        os.chdir(state.home(spec))
        null = os.open(os.devnull, os.O_RDONLY)
        out = os.open(where / "stdout", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        err = os.open(where / "stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for fd, target in ((null, 0), (out, 1), (err, 2)):
            os.dup2(fd, target)
        os.closerange(3, send)
        os.closerange(send + 1, os.sysconf("SC_OPEN_MAX"))
        # A handler, not SIG_IGN: an ignored signal would stay ignored in the verb.
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGINT, lambda *_: None)
        me = procid.identify(os.getpid())
        assert me is not None
        record = JobRecord(job_id, me.pid, me.start, procid.boot_id(), spec.run_id, command, time.time(), deadline_s)
        state.write_document(where / "job.json", record)
        os.write(send, b"ok")
        os.close(send)
        environment = {**program.environment(), JOB_VARIABLE: job_id}
        verb = subprocess.Popen([sys.executable, "-m", "hsx_host", *command], env=environment, stdin=subprocess.DEVNULL)
        try:
            code = verb.wait(deadline_s or None)
            rc = code if code >= 0 else 128 - code
        except subprocess.TimeoutExpired:
            os.write(2, f"the job's deadline of {deadline_s:.0f} s has passed: it is ended\n".encode())
            rc = JOB_DEADLINE
            _end_verb(record, verb)
    except BaseException as e:
        os.write(2, f"the job's runner failed: {type(e).__name__}: {e}\n".encode())
    finally:
        os.killpg(0, signal.SIGTERM)  # what the verb left behind in the job's group; the runner itself goes on
        state.write_text(where / "rc", f"{rc}\n")
        os._exit(0)


def _end_verb(record: JobRecord, verb: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the job's session, time to unwind, then SIGKILL to all of it but this runner."""
    os.killpg(0, signal.SIGTERM)
    try:
        verb.wait(DEADLINE_GRACE_S)
    except subprocess.TimeoutExpired:
        _send([p for p in _living(record) if p.pid != os.getpid()], signal.SIGKILL)
        verb.wait()


def _living(record: JobRecord) -> list[procid.ProcId]:
    """The processes of the job's session that live, those of a job whose runner was killed too."""
    if record.boot_id != procid.boot_id():
        return []
    return procid.session(procid.ProcId(record.pid, record.start))


def _send(members: list[procid.ProcId], number: signal.Signals) -> None:
    for member in members:
        procid.send(member, number)


def _shown(where: Path, offset: int, resume: bool) -> int:
    """Keep how far the log was shown; with ``resume`` the kept place counts where it is further."""
    file = where / "shown"
    try:
        kept = int(file.read_text())
    except (FileNotFoundError, ValueError):
        kept = 0
    if offset > kept:
        with contextlib.suppress(OSError):  # a full disk: some lines may be shown twice
            state.write_text(file, f"{offset}\n")
    return max(offset, kept) if resume else offset


def _folder(spec: RunSpec, job_id: str) -> Path:
    if not _ID.fullmatch(job_id) or job_id.startswith("."):
        raise BadInput("not a job id", field="job id", value=job_id, fix="use letters, digits, '.', '_' and '-'")
    return state.home(spec) / "jobs" / job_id


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except FileNotFoundError:  # the runner failed before it had one
        return ""


def _rc(where: Path) -> int | None:
    try:
        return int((where / "rc").read_text())
    except (FileNotFoundError, ValueError):  # not there yet, or not written yet
        return None


def _rotate(where: Path) -> None:
    """Keep the files of the last try as ``<name>.<n>``; ``rc`` goes first, so that no half-rotated job looks done."""
    number = 1 + max((int(p.suffix[1:]) for p in where.glob("job.json.*") if p.suffix[1:].isdigit()), default=0)
    (where / "shown").unlink(missing_ok=True)
    for name in ("rc", "job.json", "stdout", "stderr"):
        if (where / name).exists():
            (where / name).rename(where / f"{name}.{number}")


def _log(path: Path, offset: int, *, whole: bool) -> tuple[str, int]:
    """Text of the log from ``offset``, and where to go on. Cut at a line end, or between characters of a huge line."""
    try:
        with path.open("rb") as f:
            f.seek(offset)
            chunk = f.read(CHUNK_BYTES)
    except FileNotFoundError:
        return "", offset
    full = len(chunk) == CHUNK_BYTES
    if full or not whole:
        end = chunk.rfind(b"\n") + 1
        if not end and full:
            end = _character_end(chunk)
        chunk = chunk[:end]
    return chunk.decode(errors="replace"), offset + len(chunk)


def _character_end(chunk: bytes) -> int:
    """The end of the last whole UTF-8 character."""
    for back in range(1, 5):
        first = chunk[-back]
        if first & 0xC0 != 0x80:  # not a continuation byte: a character starts here
            length = 1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4
            return len(chunk) if length <= back else len(chunk) - back
    return len(chunk)
