"""All I/O towards the GPU host: one SSH connection, the shipped program, one verb at a time."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import posixpath
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import paramiko
from airflow.providers.ssh.hooks.ssh import SSHHook
from airflow.sdk.exceptions import AirflowException, AirflowNotFoundException

from hsx_host import contract as c
from hsx_operators.answers import human_line, parse_answer, verb_command
from hsx_operators.bundle import CHANGED, Bundle, check_command, make_bundle
from hsx_operators.errors import (
    ConfigError,
    HostGarbage,
    HostUnreachable,
)
from hsx_operators.ssh_errors import file_errors, ssh_errors

T = TypeVar("T")

# Ten lines a connection, which say nothing to the reader of a task's log.
for _name in ("asyncssh", "paramiko"):
    logging.getLogger(_name).setLevel(logging.WARNING)

#: A light verb answers in a second; this is for a host that swaps, or a login shell that hangs.
LIGHT_TIMEOUT_S = 120.0


class GpuHostHook:
    """Runs verbs of the host program over the ssh provider's connection.

    :param ssh_conn_id: Airflow connection of type ``ssh``; its ``host_key`` extra is verified.
    :param python: the Python that runs SGLang on the host.
    :param home: hsx's folder on the host.
    :param bundle: content hash of the shipped program; empty until ``ship`` has run.
    """

    def __init__(self, ssh_conn_id: str, python: str, home: str, bundle: str = "") -> None:
        self.ssh_conn_id, self.python, self.home, self.bundle = ssh_conn_id, python, home, bundle
        self.log = logging.getLogger(f"airflow.task.hooks.{type(self).__name__}")
        self._ssh: SSHHook | None = None
        self._checked = False

    def __enter__(self) -> GpuHostHook:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection; the next call opens a new one."""
        if self._ssh is not None and self._ssh.client is not None:
            self._ssh.client.close()
        self._ssh = None

    @property
    def bundle_dir(self) -> str:
        """Where the shipped program lies on the host."""
        return posixpath.join(self.home, "bundles", self.bundle)

    # -------------------------------------------------------------------------- connection

    def client(self) -> paramiko.SSHClient:
        """The open connection; HostUnreachable, HostKeyMismatch or HostLoginRefused say why there is none."""
        if self._ssh is None:
            try:
                self._ssh = SSHHook(ssh_conn_id=self.ssh_conn_id, conn_retry_attempts=1)
            except AirflowNotFoundException:
                raise ConfigError(
                    "there is no such connection",
                    field="host.ssh_conn_id",
                    value=self.ssh_conn_id,
                    fix="add it under Admin > Connections, or as AIRFLOW_CONN_...; type ssh, host_key in its extra",
                ) from None
            except (ValueError, AirflowException) as e:
                raise ConfigError(
                    f"the connection can't be used: {e}",
                    field="host.ssh_conn_id",
                    value=self.ssh_conn_id,
                    fix="correct its host, login, key and host_key",
                ) from None
            if self._ssh.no_host_key_check or self._ssh.allow_host_key_change:
                self._ssh = None
                raise ConfigError(
                    "the connection switches the check of the host's key off",
                    field="host.ssh_conn_id",
                    value=self.ssh_conn_id,
                    fix="take no_host_key_check and allow_host_key_change out of its extra, and set host_key",
                )
        where = f"{self._ssh.remote_host}:{self._ssh.port}"
        with ssh_errors(self.ssh_conn_id, where):
            return self._ssh.get_conn()

    def _execute(self, command: str, timeout_s: float, on_line: Callable[[str], None]) -> tuple[int, str, str]:
        """Run one command; stderr goes to ``on_line`` while it comes. The timeout is for the whole command."""
        client = self.client()
        with ssh_errors(self.ssh_conn_id, "the open connection"):
            transport = client.get_transport()
            if transport is None:
                raise paramiko.SSHException("the connection is closed")
            channel = transport.open_session(timeout=30)
            channel.exec_command(command)
            channel.shutdown_write()
            out, err, shown = bytearray(), bytearray(), 0
            deadline = time.monotonic() + timeout_s
            while True:
                ended = channel.exit_status_ready()
                while channel.recv_ready():
                    out += channel.recv(1 << 16)
                while channel.recv_stderr_ready():
                    err += channel.recv_stderr(1 << 16)
                while (cut := err.find(b"\n", shown)) >= 0:
                    on_line(human_line(err[shown:cut].decode("utf-8", "replace")))
                    shown = cut + 1
                if ended and channel.eof_received and not channel.recv_ready() and not channel.recv_stderr_ready():
                    break
                if time.monotonic() > deadline:
                    channel.close()
                    raise HostUnreachable(f"no answer within {timeout_s:.0f} s to: {command[:200]}")
                if not transport.is_active():
                    raise paramiko.SSHException("the connection broke while a command ran")
                time.sleep(0.02)
            rc = channel.recv_exit_status()
            channel.close()
        return rc, out.decode("utf-8", "replace"), err.decode("utf-8", "replace")

    # -------------------------------------------------------------------------- verbs

    def run_verb(
        self,
        cls: type[T],
        verb: Sequence[str],
        *,
        spec_path: str,
        timeout_s: float = LIGHT_TIMEOUT_S,
        quiet: bool = False,
    ) -> T:
        """Run one verb to its end and read its document.

        :param cls: the contract type that it answers with.
        :param verb: the verb, its subcommand and its arguments; ``--spec`` is added.
        :param quiet: leave its stderr out of the task's log.
        """
        if not self._checked:
            if not self._as_shipped(self.bundle_dir):
                raise changed_program(self.bundle_dir, self.home)
            self._checked = True
        command = verb_command(self.python, self.bundle_dir, with_spec(verb, spec_path))
        show: Callable[[str], None] = (lambda line: None) if quiet else self.log.info
        rc, out, err = self._execute(command, timeout_s, show)
        return parse_answer(cls, verb[0], rc, out, err, self.python)

    def job_start(self, job_id: str, verb: Sequence[str], *, spec_path: str, deadline_s: float = 0.0) -> c.JobStatus:
        """Start ``verb`` detached on the host, or find the job that already bears this id.

        :param deadline_s: its runner ends it after so many seconds, whoever asks or doesn't; 0 lets it run.
        """
        limit = ["--deadline", f"{deadline_s:.0f}"] if deadline_s else []
        return self.run_verb(c.JobStatus, ["job", "start", job_id, *limit, "--", *verb], spec_path=spec_path)

    def job_poll(self, job_id: str, *, spec_path: str, offset: int = 0, resume: bool = False) -> c.JobStatus:
        """What became of a job; renews the lease of the spec's run.

        :param resume: leave out the log that an earlier reader has shown.
        """
        verb = ["job", "poll", job_id, "--offset", str(offset), *(["--resume"] if resume else [])]
        return self.run_verb(c.JobStatus, verb, spec_path=spec_path, quiet=True)

    def job_kill(self, job_id: str, *, spec_path: str, grace_s: float = 30.0) -> c.JobStatus:
        """End a job and everything that it started; no error where it has ended already.

        :param grace_s: seconds that it gets to unwind.
        """
        verb = ["job", "kill", job_id, "--grace", f"{grace_s:g}"]
        return self.run_verb(c.JobStatus, verb, spec_path=spec_path)

    def _as_shipped(self, folder: str) -> bool:
        """Whether the bundle in a folder is what its name says. A missing folder or Python is told better by the verb
        itself."""
        rc, _, _ = self._execute(check_command(self.python, folder, self.bundle), LIGHT_TIMEOUT_S, lambda line: None)
        return rc != CHANGED

    # -------------------------------------------------------------------------- files

    def ship(self, bundle: Bundle | None = None) -> str:
        """Put the program at ``<home>/bundles/<sha256>``, once a content; returns that folder.

        It is written to a folder of this call's own and renamed: parallel shippers can't meet half a program. One that
        lies there already is checked against its hash; where its files were changed, it is put aside and sent anew.
        """
        bundle = bundle or make_bundle()
        self.bundle = bundle.sha256
        target = self.bundle_dir
        with self._sftp() as sftp:
            if _is_dir(sftp, target):
                if self._as_shipped(target):
                    return target
                aside = posixpath.join(self.home, "bundles", f".changed-{bundle.sha256[:16]}-{uuid.uuid4().hex}")
                sftp.posix_rename(target, aside)
                self.log.warning("files of the shipped program were changed on the host: kept as %s", aside)
            _make_dirs(sftp, posixpath.dirname(target))
            temp = posixpath.join(self.home, "bundles", f".{bundle.sha256[:16]}-{uuid.uuid4().hex}")
            sftp.mkdir(temp, 0o700)
            for folder in bundle.folders:
                sftp.mkdir(posixpath.join(temp, folder), 0o700)
            for name, body in bundle.files.items():
                with sftp.open(posixpath.join(temp, name), "wb") as f:
                    f.set_pipelined(True)
                    f.write(body)
            for name, body in bundle.files.items():
                if sftp.stat(posixpath.join(temp, name)).st_size != len(body):
                    raise OSError(f"{name} arrived incomplete")
            try:
                sftp.posix_rename(temp, target)
            except OSError:
                if not _is_dir(sftp, target):
                    raise
                _remove_tree(sftp, temp)
            self.log.info("shipped the host program (%d files) to %s", len(bundle.files), target)
        return target

    def put_document(self, document: Any) -> str:
        """Put a contract document, such as the frozen spec, at ``<home>/specs/<sha256>.json``; returns the path.

        Only its owner may read it: a spec holds the server's environment.
        """
        body = c.encode(document).encode()
        path = posixpath.join(self.home, "specs", f"{hashlib.sha256(body).hexdigest()}.json")
        with self._sftp() as sftp:
            _make_dirs(sftp, posixpath.dirname(path))
            temp = f"{path}.{uuid.uuid4().hex}"
            with sftp.open(temp, "wb") as f:
                sftp.chmod(temp, 0o600)
                f.write(body)
            sftp.posix_rename(temp, path)
        return path

    def read_file(self, path: str) -> bytes | None:
        """A small file of the host, None where there is none."""
        with self._sftp() as sftp:
            try:
                with sftp.open(path, "rb") as f:
                    return bytes(f.read())
            except FileNotFoundError:
                return None

    @contextlib.contextmanager
    def _sftp(self) -> Iterator[paramiko.SFTPClient]:
        client = self.client()
        try:
            with ssh_errors(self.ssh_conn_id, "the open connection"):
                sftp = client.open_sftp()
        except HostUnreachable as e:
            raise HostGarbage(
                f"the host opens no SFTP session: {e.message}",
                field="host.ssh_conn_id",
                value=self.ssh_conn_id,
                fix="switch on sshd's sftp subsystem, and let nothing in the login shell print",
            ) from None
        try:
            with file_errors(self.home):
                yield sftp
        finally:
            sftp.close()


def changed_program(folder: str, home: str) -> HostGarbage:
    """The error where a shipped bundle isn't what its name says (any more)."""
    return HostGarbage(
        f"the program on the host is not the one that was shipped there: {folder}",
        field="host.home",
        value=home,
        fix="look who changes files there; clear the plan task: it ships the program anew",
    )


def with_spec(verb: Sequence[str], spec_path: str) -> list[str]:
    """Put ``--spec`` before a ``--`` that separates a job's own verb, else at the end."""
    words = list(verb)
    at = words.index("--") if "--" in words else len(words)
    return [*words[:at], "--spec", spec_path, *words[at:]]


def _is_dir(sftp: paramiko.SFTPClient, path: str) -> bool:
    try:
        return stat.S_ISDIR(sftp.stat(path).st_mode or 0)
    except FileNotFoundError:
        return False


def _make_dirs(sftp: paramiko.SFTPClient, path: str) -> None:
    """Like ``mkdir -p``; what is made belongs to the login alone."""
    if path in ("", "/") or _is_dir(sftp, path):
        return
    _make_dirs(sftp, posixpath.dirname(path))
    try:
        sftp.mkdir(path, 0o700)
    except OSError:
        if not _is_dir(sftp, path):
            raise


def _remove_tree(sftp: paramiko.SFTPClient, path: str) -> None:
    for entry in sftp.listdir_attr(path):
        inside = posixpath.join(path, entry.filename)
        if stat.S_ISDIR(entry.st_mode or 0):
            _remove_tree(sftp, inside)
        else:
            sftp.remove(inside)
    sftp.rmdir(path)


def hook_of(run: dict[str, Any]) -> GpuHostHook:
    """The hook of a run, from plan's XCom."""
    return GpuHostHook(run["ssh_conn_id"], run["python"], run["home"], run["bundle"])
