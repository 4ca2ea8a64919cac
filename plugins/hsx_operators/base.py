"""The base of every operator that runs a verb on the host: submit, wait without a worker, read the answer."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.configuration import conf
from airflow.sdk import BaseOperator

from hsx_host import contract as c
from hsx_operators import errors
from hsx_operators.answers import human_lines, parse_answer
from hsx_operators.hook import GpuHostHook, hook_of
from hsx_operators.hosts import POOL
from hsx_operators.published import Told, reasons_kept, tell
from hsx_operators.retry import HOST_RETRIES, HostRetryPolicy, tries_before
from hsx_operators.triggers import TAIL_CHARS, HostJobTrigger, died, ended

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context

_JOB_KEY = "job_id"
_DEPLOYMENT_KEY = "deployment"
#: The runner on the host ends a job at its deadline; the trigger does where the runner is gone.
HOST_FIRST_S = 60.0


class HostVerbOperator(BaseOperator):
    """Runs one verb of the host program.

    A long verb is submitted as a detached job and watched by a trigger: no worker waits, and neither a lost
    connection nor a restarted Airflow ends it. Its id stands in the task state store until an exit code has
    arrived, so that a retry finds the running job instead of starting a second one. A short verb runs within
    the task, over one connection.

    :param plan_task_id: the task whose XCom ``run`` says where the host is and which plan is frozen there.
    :param on: the host's name in a profile that lists several; its XCom is ``run_<name>``.
    :param job_timeout: a detached job is ended after this time, by its runner on the host too; None lets it run.
    """

    result_type: ClassVar[type[Any]]
    detached: ClassVar[bool] = True
    inline_timeout_s: ClassVar[float] = 600.0
    #: How long a job is watched from the worker before the task defers.
    patience_s: ClassVar[float] = 8.0
    default_retries: ClassVar[int] = 4
    default_policy: ClassVar[HostRetryPolicy] = HOST_RETRIES
    ui_color = "#dde8f5"

    def __init__(
        self,
        *,
        plan_task_id: str = "plan",
        on: str = "",
        job_timeout: timedelta | None = timedelta(hours=24),
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("retries", self.default_retries)
        kwargs.setdefault("retry_delay", timedelta(seconds=30))
        kwargs.setdefault("retry_policy", self.default_policy)
        kwargs.setdefault("pool", POOL)
        super().__init__(**kwargs)
        self.plan_task_id, self.on, self.job_timeout = plan_task_id, on, job_timeout
        self._job: tuple[dict[str, Any], str] | None = None

    # -------------------------------------------------------------------------- what a subclass says

    def verb(self, context: Context) -> list[str]:
        """The verb, its subcommand and its arguments, without ``--spec``."""
        raise NotImplementedError

    def result(self, document: Any, host: dict[str, Any], context: Context) -> Any:
        """What becomes of the answer; returns the XCom."""
        return c.to_dict(document)

    # -------------------------------------------------------------------------- the way of a task

    def execute(self, context: Context) -> Any:
        """Run a short verb; submit a long one and defer."""
        return self.run_verb(context)

    def run_verb(self, context: Context) -> Any:
        """What ``execute`` does, for subclasses that decide something before."""
        with reasons_kept(context):
            host = self.host_of(context)
            verb = self.verb(context)
            try:
                with hook_of(host) as hook:
                    return self._run(hook, host, verb, context)
            except errors.HsxOperatorError as e:
                e.allowed_retries = self.allowed_retries(e, host)
                raise

    def _run(self, hook: GpuHostHook, host: dict[str, Any], verb: list[str], context: Context) -> Any:
        if self.detached:
            return self.submit(hook, host, verb, context)
        tell(context, self.told(host, verb))
        document = hook.run_verb(self.result_type, verb, spec_path=host["spec_path"], timeout_s=self.inline_timeout_s)
        return self.result(document, host, context)

    def told(self, host: dict[str, Any], verb: Sequence[str]) -> Told:
        """What the page is told of this task, from its start."""
        return Told(host["ssh_conn_id"], verb)

    def submit(self, hook: GpuHostHook, host: dict[str, Any], verb: Sequence[str], context: Context) -> Any:
        """Start the job, or find the one that an earlier try left running, and wait for it in a trigger."""
        store = context["task_state_store"]
        known = self._left_by_an_earlier_try(hook, host, context)
        job_id = known or job_name(context, host["spec_path"])
        # Kept before the start: a worker that dies in between must not lead to a second copy.
        store.set(_JOB_KEY, job_id)
        self._job = (host, job_id)
        limit = self.job_timeout.total_seconds() if self.job_timeout else 0.0
        status = hook.job_start(job_id, verb, spec_path=host["spec_path"], deadline_s=limit)
        self.log.info("%s the job %s (pid %d)", "found" if known else "started", job_id, status.pid)
        told = self.told(host, verb)
        tell(context, told)
        kept: dict[str, Any] = {"host": host, "job_id": job_id, "verb": list(verb)}
        event, offset = self._watch_a_while(hook, host, job_id, told)
        tell(context, told)
        if event is not None:
            return self.execute_complete(context, event, **kept)
        return self.defer(
            trigger=HostJobTrigger(
                host=host,
                job_id=job_id,
                offset=offset,
                told=told.document(),
                deadline=time.time() + limit + HOST_FIRST_S if limit else 0.0,
            ),
            method_name="execute_complete",
            kwargs=kept,
        )

    def _left_by_an_earlier_try(self, hook: GpuHostHook, host: dict[str, Any], context: Context) -> str:
        """The job to go on with, "" for none: one that still runs, or one that an outage hid and that ended well.

        One that ended badly was ended with its task, or has told what the next try will meet again; its log is shown to
        its end. After a clear no ended job counts: the host may have been given back since. Verbs do nothing twice.
        """
        known = context["task_state_store"].get(_JOB_KEY)
        if not known or known == job_name(context, host["spec_path"]):
            return str(known or "")
        job_id = str(known)
        status = hook.job_poll(job_id, spec_path=host["spec_path"], resume=True)
        if status.state in ("running", "absent") or (status.rc == 0 and tries_before(context)):
            return job_id
        while status.log:
            for line in human_lines(status.log):
                self.log.info("%s", line)
            status = hook.job_poll(job_id, spec_path=host["spec_path"], offset=status.offset)
        end = "is gone" if status.rc is None else f"ended with {status.rc}"
        self.log.info("the job %s of an earlier try %s: another one is started", job_id, end)
        return ""

    def _watch_a_while(
        self, hook: GpuHostHook, host: dict[str, Any], job_id: str, told: Told
    ) -> tuple[dict[str, Any] | None, int]:
        """The end of a job that takes seconds, without a detour over the triggerer; else None and the log's offset."""
        tail, offset, until, resume = "", 0, time.monotonic() + self.patience_s, True
        while True:
            status = hook.job_poll(job_id, spec_path=host["spec_path"], offset=offset, resume=resume)
            resume = False
            offset, tail = status.offset, (tail + status.log)[-TAIL_CHARS:]
            for line in human_lines(told.hear(status.log)):
                self.log.info("%s", line)
            if status.state == "running":
                if time.monotonic() > until:
                    return None, offset
                time.sleep(0.5)
            elif not status.log:  # the end of a log comes in chunks too
                return ended(status, tail), offset

    def execute_complete(
        self, context: Context, event: dict[str, Any], host: dict[str, Any], job_id: str, verb: list[str]
    ) -> Any:
        """The job has ended: read its document, or raise why there is none."""
        with reasons_kept(context):
            try:
                document = self._document(event, host, job_id, verb, context)
            except errors.HsxOperatorError as e:
                e.allowed_retries = self.allowed_retries(e, host)
                raise
            return self.result(document, host, context)

    def _document(
        self, event: dict[str, Any], host: dict[str, Any], job_id: str, verb: list[str], context: Context
    ) -> Any:
        if event["end"] == "error":
            # The job may still run: its id stays in the store, and the next try finds it.
            raise errors.named_error(event["error"], event["message"])
        context["task_state_store"].delete(_JOB_KEY)
        if event["end"] == "died":
            raise died(job_id, event["log_tail"])
        if event["end"] == "deadline":
            raise errors.RemoteJobDied(
                f"the job {job_id} was ended after {self.job_timeout}", fix="raise job_timeout, or look why it hangs"
            )
        return parse_answer(
            self.result_type, verb[0], int(event["rc"]), event["document"], event["log_tail"], host["python"]
        )

    def allowed_retries(self, error: errors.HsxOperatorError, host: dict[str, Any]) -> int | None:
        """How often this failure may be retried; None leaves it to ``retries``."""
        return None

    def host_of(self, context: Context) -> dict[str, Any]:
        """Where the host is and which plan is frozen there: plan's XCom ``run``, or that of one host of several."""
        return run_of(context, self.plan_task_id, self.on)

    def on_kill(self) -> None:
        """The task was killed while it submitted: end the remote job too."""
        if self._job is not None:
            host, job_id = self._job
            with hook_of(host) as hook:
                hook.job_kill(job_id, spec_path=host["spec_path"], grace_s=2.0)


def run_key(on: str = "") -> str:
    """The XCom of plan that says where a host is: ``run``, or ``run_<name>`` of one of several."""
    return f"run_{on}" if on else "run"


def run_of(context: Context, plan_task_id: str, on: str = "") -> dict[str, Any]:
    """Plan's XCom about a host; ConfigError where the plan has not told it, and what kept the plan from this host."""
    host = context["ti"].xcom_pull(task_ids=plan_task_id, key=run_key(on))
    if isinstance(host, dict) and "problem" in host:
        raise errors.HostLeftOut(
            f"the plan could not count on this host: {host['problem']}",
            field="host",
            value=on,
            fix="repair it and trigger a new run; this run's other hosts do its shards",
        )
    if not isinstance(host, dict):
        raise errors.ConfigError(
            "has not told where the host is",
            field="plan_task_id",
            value=plan_task_id,
            fix="clear the plan task of this run first",
        )
    return host


def host_run_id(context: Context) -> str:
    """The run's name on the host, by which its lease, guards and jobs know it: ``dag/run@deployment``.

    Airflow's run id alone is no name: nights of two DAGs, or of two Airflows, that begin in one minute share it. What
    tells deployments apart is the id that Airflow's database gave this version of the DAG; it is kept in the task state
    store, so that a plan that is cleared after the DAG has changed keeps the name.
    """
    ti, store = context["ti"], context["task_state_store"]
    known = store.get(_DEPLOYMENT_KEY)
    if not known:
        here = f"{conf.get('api', 'base_url', fallback='')}\0{ti.dag_version_id}"
        known = hashlib.sha256(here.encode()).hexdigest()[:8]
        store.set(_DEPLOYMENT_KEY, known)
    return f"{ti.dag_id}/{ti.run_id}@{known}"


def job_name(context: Context, spec_path: str) -> str:
    """The id of a job: readable, and the same for the same run, task, map index, spec and try.

    A try whose job has ended gives the next try another id; one whose job may still run hands its id on
    through the task state store.
    """
    ti = context["ti"]
    map_index = ti.map_index if ti.map_index is not None else -1
    key = "\0".join([ti.dag_id, ti.run_id, ti.task_id, str(map_index), spec_path])
    shard = f"-{map_index}" if map_index >= 0 else ""
    task = re.sub(r"[^A-Za-z0-9._-]", "-", ti.task_id)[:60]
    return f"{task}{shard}-{hashlib.sha256(key.encode()).hexdigest()[:16]}-{ti.try_number}"
