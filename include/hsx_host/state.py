"""The host's home: where everything lies, atomic JSON files, the lock of transitions and their journal."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hsx_host import procid
from hsx_host.contract import ContractError, RunSpec, decode, encode
from hsx_host.errors import BadInput, Refused, TryAgain
from hsx_host.layouts import faults
from hsx_host.procid import ProcId
from hsx_host.progress import log

T = TypeVar("T")

_MACHINE_ID = Path("/etc/machine-id")


@dataclass(frozen=True)
class ServerState:
    """``state/server.json``: the server that hsx started or took over. Private to the host program.

    ``phase``: starting, running or stopped. ``tree`` holds [pid, start] of every process that was tied to the server
    when it was last looked at, so that processes reparented after a crash are still known as its own. ``shm`` maps
    the /dev/shm files that only this server had open then to their inodes. ``cgroup``: the control group of the
    systemd unit that runs it.
    """

    mode: str
    phase: str
    pid: int
    start: int
    pgid: int
    sid: int
    boot_id: str
    port: int
    launch_hash: str
    plugin_id: str
    spool: str
    log: str
    since: float
    ready_s: float
    tree: list[list[int]] = field(default_factory=list)
    shm: dict[str, int] = field(default_factory=dict)
    cgroup: str = ""


def home(spec: RunSpec) -> Path:
    """``<home>`` of the design, as a path."""
    return Path(spec.host.home)


def folder(spec: RunSpec, *parts: str) -> Path:
    """A folder below the home, made where it is missing."""
    path = home(spec).joinpath(*parts)
    try:
        if not home(spec).is_dir():
            os.makedirs(home(spec), mode=0o700, exist_ok=True)  # its owner's alone, with all that comes to lie in it
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise BadInput(
            f"hsx's home can't be written: {e.strerror} ({e.filename})",
            field="host.home",
            value=spec.host.home,
            fix="make it writable for this user",
        ) from None
    return path


def check_machine(spec: RunSpec) -> None:
    """BadInput where the home is another machine's (``state/machine``): of two that share one by NFS, each would take
    the other's lease for one from before a boot, and start production. One without an id can't be told apart.
    """
    mine = machine_id()
    path = folder(spec, "state") / "machine"
    try:
        known, _, name = path.read_text().strip().partition(" ")
    except FileNotFoundError:
        known, name = "", ""
    if known and mine and known != mine:
        raise BadInput(
            f"this home is that of the machine {name}: two machines can't share one",
            field="host.home",
            value=spec.host.home,
            fix=f"give each host a home of its own, on a local disk; where {name} is no more, remove {path}",
        )
    if mine and not known:
        with contextlib.suppress(OSError, TryAgain):  # a full disk keeps nobody from bringing production back
            write_text(path, f"{mine} {os.uname().nodename}\n")


def machine_id() -> str:
    """What systemd calls this installation; empty where nothing does (most containers)."""
    try:
        return _MACHINE_ID.read_text().strip()
    except OSError:
        return ""


def run_dir(spec: RunSpec) -> Path:
    """``<home>/runs/<run key>``: what one run keeps (plan.json, disk.json, benchmark-before.json)."""
    return folder(spec, "runs", run_key(spec.run_id))


def run_key(run_id: str) -> str:
    """A run id as a folder name: readable, and unique where characters had to go (Airflow's hold ``:`` and ``+``)."""
    digest = hashlib.sha256(run_id.encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', run_id)[:80].strip('.-')}-{digest}"


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """``write_whole`` of a text."""
    write_whole(path, text.encode(), mode)


def write_whole(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a whole file or nothing: temporary name, fsync, rename, fsync of the folder.

    :raises TryAgain: the disk is full; says how many bytes are needed. Nothing of the try stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(fd, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException as e:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if faults.is_full(e):
            raise TryAgain(
                f"no space: {e.strerror}; {path.name} needs {len(data)} bytes",
                field="disk",
                value=path.parent,
                fix="make room, then start it again",
            ) from None
        raise
    parent = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def write_document(path: Path, document: Any, mode: int = 0o644) -> None:
    """A dataclass as a JSON file, atomically."""
    write_text(path, encode(document) + "\n", mode)


def read_document(cls: type[T], path: Path) -> T | None:
    """The document in a file, None where there is no file. Refused where the file is not what it should be."""
    try:
        return decode(cls, path.read_bytes())
    except FileNotFoundError:
        return None
    except ContractError as e:
        raise Refused(
            f"a state file of hsx can't be read: {e}",
            field=path.name,
            value=path,
            fix="look what stands there; remove it by hand once no server of hsx runs",
        ) from None


def read_or_none(cls: type[T], path: Path) -> T | None:
    """``read_document`` of what can be done without: None, with a line in the log, where it can't be read."""
    try:
        return read_document(cls, path)
    except Refused as e:
        log(f"{path} is left out: {e.doc.message}")
        return None


def last_spec(spec: RunSpec) -> Path:
    """The spec of the run that was granted the lease last: what a person's command without ``--spec`` goes by."""
    return home(spec) / "state" / "spec.json"


def utc(seconds: float) -> str:
    """A unix time for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def server_path(spec: RunSpec) -> Path:
    return home(spec) / "state" / "server.json"


def read_server(spec: RunSpec) -> ServerState | None:
    """What ``state/server.json`` says, whether or not that server still lives."""
    return read_document(ServerState, server_path(spec))


def write_server(spec: RunSpec, server: ServerState) -> None:
    folder(spec, "state")
    write_document(server_path(spec), server)


def journal(spec: RunSpec, event: str, **facts: object) -> None:
    """Append one line to ``state/journal.jsonl``: time, run, event, facts.

    A disk that takes no line (full, read-only) keeps nobody from bringing production back: it is said on stderr only.
    """
    line = {"time": round(time.time(), 3), "run_id": spec.run_id, "pid": os.getpid(), "event": event, **facts}
    path = folder(spec, "state") / "journal.jsonl"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as e:
        log(f"not in the journal ({e.strerror}): {json.dumps(line, default=str)}")
        return
    try:
        size = os.fstat(fd).st_size
        cut = b"\n" if size and os.pread(fd, 1, size - 1) != b"\n" else b""  # a line that a power cut left half
        # one write: lines of two writers don't mix
        os.write(fd, cut + (json.dumps(line, default=str) + "\n").encode())
    except OSError as e:
        log(f"not in the journal ({e.strerror}): {json.dumps(line, default=str)}")
    finally:
        os.close(fd)


def journal_tail(spec: RunSpec, lines: int) -> list[str]:
    """The last lines of the journal, whole, oldest first."""
    path = home(spec) / "state" / "journal.jsonl"
    try:
        with path.open("rb") as f:
            size, back = f.seek(0, os.SEEK_END), 400 * max(lines, 1)
            while True:
                f.seek(max(0, size - back))
                found = f.read().split(b"\n")
                if back >= size or len(found) > lines + 1:  # the first one may be half
                    return [text.decode(errors="replace") for text in found if text][-lines:] if lines > 0 else []
                back *= 4
    except FileNotFoundError:
        return []


@contextmanager
def locked(path: Path, *, wait_s: float, what: str, goal: str = "") -> Iterator[None]:
    """Hold a flock; the kernel frees it when the holder dies. TryAgain after ``wait_s`` seconds.

    :param what: what the lock guards, for the message.
    :param goal: what it is held for; stands in the file beside the holder's pid.
    """
    fd = _open_lock(path)
    try:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = os.pread(fd, 200, 0).decode(errors="replace").strip()
                    raise TryAgain(
                        f"another process is busy with {what}: {holder or 'unknown'}",
                        field=path.name,
                        fix="it frees the lock at its end",
                    ) from None
                time.sleep(0.05)
        with contextlib.suppress(OSError):  # a note for people: a full disk may lack the room
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"pid {os.getpid()} {goal}".strip().encode() + b"\n", 0)
        yield
    finally:
        os.close(fd)


def _open_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as e:
        if e.errno != errno.EROFS or not path.exists():
            raise
        return os.open(path, os.O_RDONLY)  # a flock needs no write: production comes back on a read-only disk too


@contextmanager
def transition(spec: RunSpec, wait_s: float, goal: str = "") -> Iterator[None]:
    """The one lock of server transitions: whoever starts or stops a server, or changes the plugin, holds it.

    :param goal: the mode that the host goes to, where a server is started or stopped.
    """
    check_machine(spec)
    with locked(transition_lock(spec), wait_s=wait_s, what="a transition of this host", goal=goal):
        yield


def transition_lock(spec: RunSpec) -> Path:
    """The file of the transition lock."""
    return folder(spec, "state") / "lock"


def transition_holder(spec: RunSpec) -> tuple[ProcId, str] | None:
    """The process in a transition now, proved by the lock file that it has open, and its goal; None where none is."""
    path = transition_lock(spec)
    try:
        note = path.read_text(errors="replace").split()
        proc = procid.identify(int(note[1]))
        inode = os.stat(path)
        if proc is None or proc.pid == os.getpid():
            return None
        for fd in Path(f"/proc/{proc.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                seen = os.stat(fd)
                if (seen.st_dev, seen.st_ino) == (inode.st_dev, inode.st_ino) and not is_free(path):
                    return proc, note[2] if len(note) > 2 else ""
    except (OSError, ValueError, IndexError):
        pass
    return None


def is_free(path: Path) -> bool:
    """Whether nobody holds the lock."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def set_aside(path: Path) -> None:
    """Rename a document so that it stands in nobody's way and can still be looked at."""
    os.replace(path, path.with_name(f"{path.name}.broken-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}"))
