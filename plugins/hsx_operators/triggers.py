"""The triggers: they watch the host from the triggerer over one open SSH connection, and tell typed ends."""

from __future__ import annotations

import asyncio
import posixpath
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar

import asyncssh
from airflow.providers.ssh.hooks.ssh import SSHHookAsync
from airflow.triggers.base import BaseTrigger, TriggerEvent

from hsx_host import contract as c
from hsx_operators.answers import human_lines, parse_answer, verb_command
from hsx_operators.bundle import CHANGED, check_command
from hsx_operators.errors import (
    HostError,
    HostKeyMismatch,
    HostLoginRefused,
    HostTryAgain,
    HostUnreachable,
    RemoteJobDied,
)
from hsx_operators.hook import changed_program, with_spec
from hsx_operators.published import Told, tell_from_trigger

T = TypeVar("T")

COMMAND_TIMEOUT_S = 60.0
#: Between two polls: soon at first, then calm; each poll also renews the lease on the host and tells the page.
FIRST_POLL_S, SLOWEST_POLL_S = 1.0, 5.0
#: A trigger that fires before the scheduler has seen the worker end makes the scheduler take the task for a lost one
#: ("finished with state success, but the task instance's state is queued"): so no trigger fires at once.
SETTLE_S = 5.0
TAIL_CHARS = 2000
_BROKEN = (OSError, asyncssh.Error, TimeoutError)


class HostTrigger(BaseTrigger):
    """Verbs of one run over one connection that is opened again when it breaks.

    :param host: plan's XCom ``run``: ``ssh_conn_id``, ``python``, ``bundle_dir`` and ``spec_path`` are used.
    :param outage_s: how long the host may be unreachable before the task is told so.
    :param deadline: unix seconds at which the watch ends; 0 means never.
    """

    def __init__(self, host: dict[str, Any], outage_s: float = 900.0, deadline: float = 0.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.host, self.outage_s, self.deadline = host, outage_s, deadline
        self._conn: asyncssh.SSHClientConnection | None = None

    async def verb(self, cls: type[T], verb: Sequence[str]) -> T:
        """Run one light verb; raises the typed errors of ``errors``."""
        python = self.host["python"]
        command = verb_command(python, self.host["bundle_dir"], with_spec(verb, self.host["spec_path"]))
        try:
            if self._conn is None:
                self._conn = await SSHHookAsync(ssh_conn_id=self.host["ssh_conn_id"]).get_conn()
                await self._check_program(self._conn)
            done = await self._conn.run(
                command, timeout=COMMAND_TIMEOUT_S, check=False, encoding="utf-8", errors="replace"
            )
        except asyncssh.HostKeyNotVerifiable as e:
            raise HostKeyMismatch(
                f"the host's key can't be verified: {e}",
                field="host.ssh_conn_id",
                value=self.host["ssh_conn_id"],
                fix="compare the host's key with its owner, then set host_key in the connection's extra",
            ) from None
        except asyncssh.PermissionDenied as e:
            raise HostLoginRefused(
                f"the host refuses the login: {e}",
                field="host.ssh_conn_id",
                value=self.host["ssh_conn_id"],
                fix="correct the connection's login, password or private key",
            ) from None
        except _BROKEN as e:
            await self.close()
            raise HostUnreachable(f"no answer over SSH: {e or type(e).__name__}") from None
        if done.exit_status is None or done.exit_status < 0:
            await self.close()
            raise HostUnreachable("the connection broke while a verb ran")
        try:
            return parse_answer(cls, verb[0], done.exit_status, str(done.stdout), str(done.stderr), python)
        except RemoteJobDied as e:  # this short verb was killed, not the job that it asks about
            raise HostUnreachable(e.message) from None

    async def _check_program(self, conn: asyncssh.SSHClientConnection) -> None:
        """HostGarbage where the program that the polls of this connection would run isn't the one that was shipped."""
        folder = self.host["bundle_dir"]
        check = check_command(self.host["python"], folder, posixpath.basename(folder))
        if (await conn.run(check, timeout=COMMAND_TIMEOUT_S, check=False)).exit_status == CHANGED:
            await self.close()
            raise changed_program(folder, posixpath.dirname(posixpath.dirname(folder)))

    async def tell(self, told: Told) -> None:
        """Tell the page; a watch goes on where Airflow can't take it just now."""
        try:
            await tell_from_trigger(self.task_instance, told)
        except Exception as e:
            self.log.warning("the page could not be told: %s: %s", type(e).__name__, e)

    async def close(self) -> None:
        """Ends the connection; the next verb opens a new one."""
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.abort()

    async def cleanup(self) -> None:
        """Called at every end of the trigger."""
        await self.close()

    async def patient(self, cls: type[T], verb: Sequence[str]) -> T:
        """``verb``, waiting out outages and "try again later" up to ``outage_s``."""
        since: float | None = None
        delay = 1.0
        while True:
            try:
                return await self.verb(cls, verb)
            except (HostUnreachable, HostTryAgain) as e:
                now = time.time()
                since = since or now
                if now - since > self.outage_s:
                    raise
                self.log.warning("%s: trying again in %.0f s", e, delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, 15.0)


class HostJobTrigger(HostTrigger):
    """Watches one detached verb: streams its log into the task's log and ends with how it ended.

    The event is ``{"end": "done", "rc": 0, "document": "..."}``, or ``{"end": "died" | "deadline"}``, or
    ``{"end": "error", "error": <class name>, "message": ...}``; ``log_tail`` is the end of the log.

    :param host: see HostTrigger.
    :param job_id: the job.
    :param offset: bytes of its log that were already shown.
    :param told: what the page was told of it so far, as of ``offset``.
    """

    def __init__(
        self,
        host: dict[str, Any],
        job_id: str,
        offset: int = 0,
        told: dict[str, Any] | None = None,
        outage_s: float = 900.0,
        deadline: float = 0.0,
    ) -> None:
        super().__init__(host, outage_s, deadline)
        self.job_id, self.offset, self.told = job_id, offset, told

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """For the triggerer."""
        kwargs = {
            "host": self.host,
            "job_id": self.job_id,
            "offset": self.offset,
            "told": self.told,
            "outage_s": self.outage_s,
            "deadline": self.deadline,
        }
        return f"{type(self).__module__}.{type(self).__qualname__}", kwargs

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Poll until the job has ended."""
        try:
            await asyncio.sleep(SETTLE_S)
            yield TriggerEvent(await self._watch())
        except HostError as e:
            yield TriggerEvent({"end": "error", "error": type(e).__name__, "message": str(e), "log_tail": ""})

    async def _watch(self) -> dict[str, Any]:
        tail, wait = "", FIRST_POLL_S
        told = Told(self.host["ssh_conn_id"], ["job"], kept=self.told)
        resume = ["--resume"]  # a restarted triggerer has the offset of the task's deferral: the host knows better
        while True:
            ask = ["job", "poll", self.job_id, "--offset", str(self.offset), *resume]
            status, resume = await self.patient(c.JobStatus, ask), []
            self.offset = status.offset
            for line in human_lines(told.hear(status.log)):
                self.log.info("%s", line)
            await self.tell(told)
            tail = (tail + status.log)[-TAIL_CHARS:]
            if status.state != "running":
                if status.log:
                    continue  # the end of a log comes in chunks too
                return ended(status, tail)
            if self.deadline and time.time() > self.deadline:
                await self.patient(c.JobStatus, ["job", "kill", self.job_id])
                return {"end": "deadline", "log_tail": tail}
            await asyncio.sleep(wait)
            wait = min(wait * 1.2, SLOWEST_POLL_S)

    async def on_kill(self) -> None:
        """A person marked or cleared the waiting task: the remote job must not go on without it."""
        self.log.info("ending the remote job %s", self.job_id)
        await self.verb(c.JobStatus, ["job", "kill", self.job_id, "--grace", "15"])


def ended(status: c.JobStatus, log_tail: str) -> dict[str, Any]:
    """The event for a job that no longer runs."""
    if status.rc == c.JOB_DEADLINE:
        return {"end": "deadline", "log_tail": log_tail}
    if status.state == "done":
        return {"end": "done", "rc": status.rc, "document": status.document, "log_tail": log_tail}
    return {"end": "died", "log_tail": log_tail}


def died(job_id: str, log_tail: str) -> RemoteJobDied:
    """The error for a job that is gone without an exit code."""
    last = "\n".join(log_tail.strip().splitlines()[-10:])
    return RemoteJobDied(
        f"the job {job_id} is gone without an exit code; its log ends with:\n{last}",
        fix="look for the out-of-memory killer in the host's kernel log, and whether the host was restarted",
    )
