"""Against the extraction server: proof, the shards, the check of what was published, the handoff to training."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import Asset
from airflow.sdk.bases.xcom import BaseXCom
from airflow.sdk.exceptions import AirflowSkipException, DownstreamTasksSkipped

from hsx_host import contract as c
from hsx_operators import alerts, errors, metrics, window
from hsx_operators.answers import human_bytes, human_seconds
from hsx_operators.base import HostVerbOperator
from hsx_operators.hosts import POOL
from hsx_operators.plan import HANDOFF_MISSED, SKIPPED_BECAUSE
from hsx_operators.published import Told
from hsx_operators.retry import HOST_RETRIES

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context

#: XCom of an ``extract`` task whose samples failed: how many, and why.
FAILURES = "failures"
#: XCom of a shard that borrowed the host itself: the production server that it brought back.
GIVEN_BACK = "given_back"
#: Updated by each run that hands a data set to training; ``extra`` tells where it is and how to read it.
HIDDEN_STATES = Asset("hsx_hidden_states")


class ProbeOperator(HostVerbOperator):
    """The probe matrix on the live extraction server, before any shard and before any deletion."""

    result_type = c.ProbeReport

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("on_failure_callback", alerts.Alarm("probe_failed"))
        super().__init__(**kwargs)

    def verb(self, context: Context) -> list[str]:
        """``probe``."""
        return ["probe"]

    def result(self, document: c.ProbeReport, host: dict[str, Any], context: Context) -> Any:
        """Tell every case; a report that isn't ok fails the task."""
        for case in document.cases:
            self.log.info("%s %s (%d tokens) %s", "ok  " if case.ok else "FAIL", case.name, case.tokens, case.text)
        if not document.ok:
            failed = ", ".join(case.name for case in document.cases if not case.ok)
            raise errors.HostRefused("probe", c.ErrorDoc("refused", f"failed: {failed}", "probe", failed))
        return {"ok": True, "cases": len(document.cases), "seconds": document.seconds}


class ExtractShardOperator(HostVerbOperator):
    """Extracts one shard. Mapped: one task a shard, named by it.

    Resumable by sample: a retry, or a clear in the UI, does only what is missing. Where the host was given back
    meanwhile, the host program borrows it by itself and gives it back at its end.

    :param shard: one entry of plan's ``shards``.
    """

    template_fields = ("shard",)
    result_type = c.ShardSummary
    #: For ``partial``, which doesn't take an operator's own defaults. ``retries`` is a ceiling, which Airflow has to
    #: know when it parses; the profile's ``tasks.shard_retries`` decides below it.
    partial_defaults: ClassVar[dict[str, Any]] = {
        "retries": 5,
        "retry_delay": timedelta(seconds=30),
        "retry_policy": HOST_RETRIES,
        "pool": POOL,
    }

    def __init__(self, *, shard: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.shard = shard

    def verb(self, context: Context) -> list[str]:
        """``extract --shard N``, and until when."""
        until = window.end_of(context, self.host_of(context))
        return ["extract", "--shard", str(self.shard["id"]), *(["--stop-after", repr(until)] if until else [])]

    def told(self, host: dict[str, Any], verb: Sequence[str]) -> Told:
        """The page follows a shard by its number."""
        return Told(host["ssh_conn_id"], verb, shard=int(self.shard["id"]))

    def execute_complete(
        self, context: Context, event: dict[str, Any], host: dict[str, Any], job_id: str, verb: list[str]
    ) -> Any:
        """Tell apart what failed: the samples themselves, which another host would meet too, or the host."""
        try:
            return super().execute_complete(context, event, host, job_id, verb)
        except errors.HostTryAgain as e:
            if e.field == "failures.jsonl":
                context["ti"].xcom_push(key=FAILURES, value=e.message)
                metrics.samples_failed(getattr(e, "count", 0), host)
            raise

    def allowed_retries(self, error: errors.HsxOperatorError, host: dict[str, Any]) -> int | None:
        """Retries of a shard are the profile's; SSH trouble is no fault of the shard and keeps the task's own."""
        return None if isinstance(error, errors.HostUnreachable) else int(host["shard_retries"])

    def result(self, document: c.ShardSummary, host: dict[str, Any], context: Context) -> Any:
        """Tell the shard's figures and every failure."""
        for line in document.failures:
            self.log.warning("failed: %s", line)
        self.log.info(
            "%s: %d of %d samples published (%d now), %d failed, %s tokens, %s in %s, %.0f tok/s; %s",
            document.name,
            document.published,
            document.samples,
            document.extracted,
            document.failed,
            f"{document.tokens:,}",
            human_bytes(document.bytes),
            human_seconds(document.seconds),
            document.tok_s,
            document.proof,
        )
        metrics.shard_done(document, host)
        if document.server is not None and document.server.mode == "production":
            context["ti"].xcom_push(key=GIVEN_BACK, value=c.to_dict(document.server))
        answer = c.to_dict(document)
        if document.left and (rest := self._not_begun(context["ti"])):
            self.log.warning("the window has ended: %d shards are left for the next run", len(rest))
            context["ti"].xcom_push(key=BaseXCom.XCOM_RETURN_KEY, value=answer)
            raise DownstreamTasksSkipped(tasks=[(self.task_id, i) for i in rest])
        return answer

    def _not_begun(self, ti: Any) -> list[int]:
        """Map indexes of this host's shards that no task has taken yet: hundreds of tasks that find the window ended,
        one after the other, would keep production down for as many starts of a task."""
        states: dict[str, str | None] = ti.get_task_states(dag_id=ti.dag_id, run_ids=[ti.run_id]).get(ti.run_id, {})
        mine = {name.removeprefix(f"{self.task_id}_"): state for name, state in states.items()}
        return [int(i) for i, state in mine.items() if i.isdigit() and state in (None, "scheduled", "queued")]


class VerifyDatasetOperator(HostVerbOperator):
    """Reads the published files again, against the manifest and by the next-token proof.

    :param shards: the shards that this host has extracted, where others extract the rest; None for all of the run.
    """

    template_fields = ("shards",)
    result_type = c.VerifyReport

    def __init__(self, *, shards: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.shards = shards

    def verb(self, context: Context) -> list[str]:
        """``verify`` of what was captured; ``convert`` comes behind it."""
        late = ["--window-ended"] if window.left_over(self.host_of(context)) else []
        shards = (word for shard in self.shards or [] for word in ("--shard", str(shard["id"])))
        return ["verify", "--captured", *late, *shards]

    def allowed_retries(self, error: errors.HsxOperatorError, host: dict[str, Any]) -> int | None:
        """What is missing from the data set is still missing at the next try, and production waits for this one."""
        return 0 if isinstance(error, errors.HostTryAgain) and error.field == "manifest.jsonl" else None

    def result(self, document: c.VerifyReport, host: dict[str, Any], context: Context) -> Any:
        """A report that isn't ok fails the task and names the problems."""
        for problem in document.problems:
            self.log.error("%s", problem)
        self.log.info(
            "%d samples, %s tokens, %s; missing %d, failed %d, proved %d",
            document.samples,
            f"{document.tokens:,}",
            human_bytes(document.bytes),
            document.missing,
            document.failed,
            document.proved,
        )
        if not document.ok:
            raise errors.HostRefused(
                "verify",
                c.ErrorDoc(
                    "refused",
                    "; ".join(document.problems[:3]) or "the data set isn't whole",
                    "data set",
                    "",
                    "clear the shards that it names",
                ),
            )
        return c.to_dict(document)


class ConvertFormatsOperator(HostVerbOperator):
    """Derives the run's other formats from the one that the capture wrote. Needs no server: production is up again."""

    result_type = c.ConvertResult

    def verb(self, context: Context) -> list[str]:
        """``convert``, for all that the run's formats name."""
        return ["convert"]

    def execute_complete(
        self, context: Context, event: dict[str, Any], host: dict[str, Any], job_id: str, verb: list[str]
    ) -> Any:
        """Skipped where the window ended before anything was published."""
        try:
            return super().execute_complete(context, event, host, job_id, verb)
        except errors.HostBadInput as e:
            if window.left_over(host):
                raise AirflowSkipException(f"the window has ended: {e.message}") from None
            raise

    def result(self, document: c.ConvertResult, host: dict[str, Any], context: Context) -> Any:
        """Tell each format's figures."""
        for one in document.formats:
            self.log.info(
                "%s: %d samples (%d now), %s, %s in %s",
                one.format,
                one.samples,
                one.written,
                one.final.replace("_", " "),
                human_bytes(one.bytes),
                one.path,
            )
        return c.to_dict(document)


class TrainingHandoffOperator(HostVerbOperator):
    """Writes ``handoff.json`` and updates the Asset ``hsx_hidden_states``, on which the training DAG is scheduled.

    :param behind: with one host: the task that must have verified, or the gate must have found that an earlier run did
        not come so far. Give it ``trigger_rule="none_failed"``: in the second case all that lies between is skipped.
    """

    result_type = c.HandoffResult
    detached = False

    def __init__(self, *, behind: str = "", **kwargs: Any) -> None:
        kwargs.setdefault("outlets", [HIDDEN_STATES])
        super().__init__(**kwargs)
        self.behind = behind

    def execute(self, context: Context) -> Any:
        """Skipped where this run has verified nothing and nothing was missed (a cleanup that a person refused), and
        where the window ended before the data set was whole: the next run hands it on."""
        ti = context["ti"]
        if self.behind and not (
            ti.xcom_pull(task_ids=self.behind) or ti.xcom_pull(task_ids="gate", key=HANDOFF_MISSED)
        ):
            raise AirflowSkipException("this run has verified nothing")
        try:
            return self.run_verb(context)
        except errors.HostTryAgain as e:
            if e.field != "--window-ended":
                raise
            reason = f"The window has ended: {e.message.removeprefix('handoff: ')}."
            ti.xcom_push(key=SKIPPED_BECAUSE, value=reason)
            alerts.tell(context, "window_ended", reason)
            raise AirflowSkipException(reason) from None

    def verb(self, context: Context) -> list[str]:
        """``handoff``."""
        return ["handoff", *(["--window-ended"] if window.left_over(self.host_of(context)) else [])]

    def result(self, document: c.HandoffResult, host: dict[str, Any], context: Context) -> Any:
        """The Asset's ``extra`` is the whole handoff."""
        handoff = c.to_dict(document)
        context["outlet_events"][HIDDEN_STATES].extra = handoff
        self.log.info("%s", document.path)
        for name, command in document.commands.items():
            self.log.info("%s: %s", name, command)
        return handoff
