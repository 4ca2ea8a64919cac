"""Borrowing the host and giving it back: lease, servers, patch, benchmark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import SkipMixin

from hsx_host import contract as c
from hsx_operators import alerts, metrics, window
from hsx_operators.base import HostVerbOperator
from hsx_operators.errors import HostHeld, HostRefused, HsxOperatorError
from hsx_operators.hook import hook_of
from hsx_operators.plan import SKIPPED_BECAUSE
from hsx_operators.retry import ACQUIRE_RETRIES, RESTORE_RETRIES, HostRetryPolicy

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context


#: In the pool, giving a host back goes before any step of another run.
GIVE_BACK_FIRST = 1_000_000


class HoldOff(HostVerbOperator, SkipMixin):
    """Of the steps before the host is borrowed: they wait while another run holds it, until the window has ended.

    Then the rest of the run (of this host's group, where there are several) is skipped: the run is green, production
    was not touched, and the next night goes on. They fail at once where the profile says ``tasks.when_held: fail``, and
    after a few tries where something else than a held host fails.
    """

    default_retries: ClassVar[int] = 288  # a day, at five minutes
    default_policy: ClassVar[HostRetryPolicy] = ACQUIRE_RETRIES
    inherits_from_skipmixin = True

    def too_late(self, context: Context) -> bool:
        """Skip what follows where no sample could be asked for any more before the window ends."""
        host = self.host_of(context)
        plan = context["ti"].xcom_pull(task_ids=self.plan_task_id, key="plan") or {}
        takes = float((plan.get("pace") or {}).get("overhead_s") or 0.0)
        if not window.ended(context, host, ahead_s=takes):
            return False
        reason = (
            f"The window ends at {window.clock_of(window.end_of(context, host))}, too soon to borrow the host: "
            "nothing was extracted, production was not touched. The next run goes on."
        )
        self.log.info("%s", reason)
        context["ti"].xcom_push(key=SKIPPED_BECAUSE, value=reason)
        if not self.on:  # of several hosts the hand-off tells, once for all of them
            alerts.tell(context, "window_ended", reason)
        group = self.task_id.rpartition(".")[0] if self.on else ""
        self.skip(ti=context["ti"], tasks=window.rest_of(context, group))
        return True

    def allowed_retries(self, error: HsxOperatorError, host: dict[str, Any]) -> int | None:
        """None of a held host where the profile says ``tasks.when_held: fail``; the rest is the policy's."""
        return 0 if isinstance(error, HostHeld) and host.get("when_held") == "fail" else None


class AcquireHostOperator(HoldOff, HostVerbOperator):
    """Takes the lease on the host for this run; from here on every poll renews it.

    Where another run holds it, the message names the holder.
    """

    result_type = c.Lease
    detached = False

    def execute(self, context: Context) -> Any:
        """Nothing, and the rest is skipped, where the window has ended."""
        return None if self.too_late(context) else self.run_verb(context)

    def verb(self, context: Context) -> list[str]:
        """``acquire``."""
        return ["acquire"]


class ServeOperator(HostVerbOperator):
    """Brings the host to one mode; nothing happens where it is already there."""

    result_type = c.ServerFacts
    mode: ClassVar[str]

    def verb(self, context: Context) -> list[str]:
        """``serve MODE``."""
        return ["serve", self.mode]

    def result(self, document: c.ServerFacts, host: dict[str, Any], context: Context) -> Any:
        """Tell what runs now."""
        changed = "now" if document.changed else "already"
        pid = (
            f", pid {document.pid}, port {document.port}, ready after {document.ready_s:.0f} s" if document.pid else ""
        )
        self.log.info("the host is %s in mode %s%s", changed, document.mode, pid)
        return c.to_dict(document)


class StopServerOperator(ServeOperator):
    """Stops production by its process group, and proves it: port closed, no process left, device memory free."""

    mode = "stopped"


class StartServerOperator(ServeOperator):
    """Starts the extraction server with the capture plugin, waits for a real token, and proves the plugin's seams."""

    mode = "extraction"

    def result(self, document: c.ServerFacts, host: dict[str, Any], context: Context) -> Any:
        """``patch verify`` again, now against the live server."""
        with hook_of(host) as hook:
            report = hook.run_verb(
                c.PatchReport, ["patch", "verify"], spec_path=host["spec_path"], timeout_s=self.inline_timeout_s
            )
        for seam, where in report.seams.items():
            self.log.info("seam %s: %s", seam, where)
        return {**super().result(document, host, context), "seams": report.seams}


class ApplyPatchOperator(HostVerbOperator):
    """Puts the capture plugin's folder in place and proves that the installed SGLang is as its package made it."""

    result_type = c.PatchReport
    detached = False

    def verb(self, context: Context) -> list[str]:
        """``patch apply``."""
        return ["patch", "apply"]

    def result(self, document: c.PatchReport, host: dict[str, Any], context: Context) -> Any:
        """``patch verify`` follows; a file that differs ends the run before a server is started."""
        with hook_of(host) as hook:
            report = hook.run_verb(
                c.PatchReport, ["patch", "verify"], spec_path=host["spec_path"], timeout_s=self.inline_timeout_s
            )
        return c.to_dict(pristine(report))


class BenchmarkOperator(HoldOff, HostVerbOperator):
    """``sglang.bench_serving`` against production: single stream and high concurrency.

    Where another run holds the host, ``before`` waits and tries again, as ``acquire`` does.

    :param phase: ``before`` keeps the baseline with the run, ``after`` compares with it.
    """

    template_fields = ("phase",)
    result_type = c.BenchmarkResult

    def __init__(self, *, phase: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.phase = phase

    def execute(self, context: Context) -> Any:
        """Nothing where the run has its benchmark switched off, or comes too late to borrow the host."""
        if self.phase == "before" and self.too_late(context):
            return None
        if not self.host_of(context)["benchmark"]:
            self.log.info("The benchmark is switched off for this run.")
            return None
        return self.run_verb(context)

    def allowed_retries(self, error: HsxOperatorError, host: dict[str, Any]) -> int | None:
        """``after`` waits for a held host in any case: the hand-off waits for it, and the run has had the host."""
        return super().allowed_retries(error, host) if self.phase == "before" else None

    def verb(self, context: Context) -> list[str]:
        """``benchmark`` before or after."""
        return ["benchmark", "--label", self.phase]

    def result(self, document: c.BenchmarkResult, host: dict[str, Any], context: Context) -> Any:
        """Tell the figures. A production that is slower than the profile tolerates is told here, and makes the run red
        in its verdict: the data is good, and is handed on."""
        say = self.log.info if document.within_tolerance else self.log.warning
        say("%s", document.text)
        return c.to_dict(document)


class RestoreProductionOperator(HostVerbOperator):
    """Gives the host back: production as the profile starts it, the plugin away, SGLang pristine, the lease released.

    Make it the teardown of the tasks that took the host. Its first failure wakes somebody, and its last:
    ``alerts.ProductionAlarm``.
    """

    result_type = c.RestoreReport
    default_retries: ClassVar[int] = 6
    default_policy: ClassVar[HostRetryPolicy] = RESTORE_RETRIES

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("on_retry_callback", alerts.ProductionAlarm(first_try=True))
        kwargs.setdefault("on_failure_callback", alerts.ProductionAlarm())
        kwargs.setdefault("priority_weight", GIVE_BACK_FIRST)
        kwargs.setdefault("weight_rule", "absolute")
        super().__init__(**kwargs)

    def verb(self, context: Context) -> list[str]:
        """``restore``: the same way back as the guard's."""
        return ["restore"]

    def result(self, document: c.RestoreReport, host: dict[str, Any], context: Context) -> Any:
        """Tell how production stands. The host is given back by now; what is not as it was makes the task red."""
        ti = context["ti"]
        lease = ti.xcom_pull(task_ids=f"{self.task_id.removesuffix('restore')}acquire") or {}
        metrics.given_back(ti.start_date.timestamp(), lease.get("since"), host)
        self.log.info("%s; SGLang %s, %d files as installed", document.text, document.sglang, document.files_checked)
        if document.problems:
            raise HostRefused(
                "restore",
                c.ErrorDoc(
                    "refused",
                    "production is up, but not as it was: " + "; ".join(document.problems),
                    "production",
                    f"pid {document.pid}, port {document.port}",
                    "look after it on the host; the lease is released",
                ),
            )
        return c.to_dict(document)


def pristine(report: c.PatchReport) -> c.PatchReport:
    """Refuse to go on with an SGLang whose files aren't its package's."""
    if not report.pristine:
        raise HostRefused(
            "patch",
            c.ErrorDoc(
                "refused",
                "files of the installed SGLang differ from its package",
                "sglang",
                report.sglang,
                "install it anew on the host",
            ),
        )
    return report
