"""The first step, which freezes what the run will do, and the gate that ends a run with nothing to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.providers.standard.utils.skipmixin import SkipMixin
from airflow.sdk import BaseOperator

from hsx_host import contract as c
from hsx_operators.answers import human_bytes
from hsx_operators.base import HostVerbOperator
from hsx_operators.foretold import FORETOLD, foretell
from hsx_operators.hook import GpuHostHook
from hsx_operators.profile import load_profile
from hsx_operators.published import reasons_kept
from hsx_operators.spec import build_spec, check_known

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context


class PlanOperator(HostVerbOperator):
    """Reads the profile and the Params, ships the program, checks the host, and plans the shards.

    XComs: ``run`` (where the host is, and the frozen spec), ``plan`` (what is to do), ``shards`` (one entry a shard
    with something to do), ``facts`` (the host's preflight). Everything later rests on them: a profile that changes
    while a run goes on doesn't change that run.

    :param params: the run's Params are read from the context; unknown keys in its conf are refused.
    """

    result_type = c.PlanResult

    def verb(self, context: Context) -> list[str]:
        """``plan``; a dry run writes nothing below the output root."""
        return ["plan", *(["--dry-run"] if context["params"].get("dry_run") else [])]

    def execute(self, context: Context) -> Any:
        """Build and ship the spec, run ``preflight``, submit ``plan``."""
        with reasons_kept(context):
            return self._plan(context)

    def _plan(self, context: Context) -> Any:
        params = dict(context["params"])
        check_known({**params, **(context["dag_run"].conf or {})})
        name = str(params["profile"])
        profile = load_profile(name)
        spec = build_spec(profile, name, params, str(context["run_id"]))
        with GpuHostHook(profile.host.ssh_conn_id, spec.host.python, spec.host.home) as hook:
            hook.ship()
            host: dict[str, Any] = {
                "ssh_conn_id": profile.host.ssh_conn_id,
                "python": spec.host.python,
                "home": spec.host.home,
                "bundle": hook.bundle,
                "bundle_dir": hook.bundle_dir,
                "spec_path": hook.put_document(spec),
                "profile": name,
                "dry_run": bool(params.get("dry_run")),
                "cleanup_policy": spec.cleanup.policy,
                "benchmark": spec.benchmark.enabled,
                "shard_retries": profile.tasks.shard_retries,
                "lease_ttl_s": profile.tasks.lease_ttl_s,
            }
            facts = hook.run_verb(c.PreflightResult, ["preflight"], spec_path=host["spec_path"], timeout_s=300)
            for warning in facts.warnings:
                self.log.warning("%s", warning)
            context["ti"].xcom_push(key="facts", value=c.to_dict(facts))
            return self.submit(hook, host, self.verb(context), context)

    def result(self, document: c.PlanResult, host: dict[str, Any], context: Context) -> None:
        """Tell in words what will be done; each part is an XCom of its own."""
        plan = c.to_dict(document)
        shards = plan.pop("shards")
        for line in document.rejects:
            self.log.warning("rejected: %s", line)
        self.log.info(
            "%s: %d rows, %d valid, %d rejected, %d duplicates, %d done; to do: %d samples in %d shards, %s tokens, %s",
            document.dataset_id,
            document.rows,
            document.valid,
            document.rejected,
            document.duplicates,
            document.done,
            document.todo,
            len(shards),
            f"{document.todo_tokens:,}",
            human_bytes(document.todo_bytes),
        )
        for key, value in (("run", host), ("plan", plan), ("shards", shards)):
            context["ti"].xcom_push(key=key, value=value)


#: XCom of a task that skipped the rest of the run on purpose: why, in one sentence.
SKIPPED_BECAUSE = "skipped_because"


class GateOperator(BaseOperator, SkipMixin):
    """Ends the run green where it is a dry run or nothing is left to do: the rest is skipped, production untouched.

    Its XCom is the list of shards, over which ``extract`` is mapped.

    :param run: plan's XCom ``run``.
    :param plan: plan's XCom ``plan``.
    :param shards: plan's XCom ``shards``.
    :param disk: the disk check's verdict.
    """

    template_fields = ("run", "plan", "shards", "disk")
    inherits_from_skipmixin = True
    ui_color = "#f3e6c8"

    def __init__(self, *, run: Any, plan: Any, shards: Any, disk: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.run, self.plan, self.shards, self.disk = run, plan, shards, disk

    def execute(self, context: Context) -> list[dict[str, Any]]:
        """Skip everything downstream but the teardowns, or let it pass."""
        plan, shards = self.plan, list(self.shards)
        what = (
            f"{plan['todo']:,} samples in {len(shards)} shards, {plan['todo_tokens']:,} tokens, "
            f"{human_bytes(plan['todo_bytes'])} ({plan['todo_bytes']:,} bytes)"
        )
        foretold = foretell(self.run, plan, shards, self.disk)
        context["ti"].xcom_push(key=FORETOLD, value=foretold)
        if not shards:
            reason = f"Nothing to do: all {plan['done']:,} samples of {plan['dataset_id']} are published."
        elif self.run["dry_run"]:
            reason = f"Dry run: would extract {what} into {plan['dataset_dir']}. {self.disk['text']}"
        else:
            self.log.info("To do: %s", what)
            return shards
        self.log.info("%s", reason)
        for line in foretold["lines"]:
            self.log.info("%s", line)
        # The skip ends the task with an exception of Airflow's, so that a returned value would be lost.
        context["ti"].xcom_push(key=SKIPPED_BECAUSE, value=reason)
        rest = [t for t in context["task"].get_flat_relatives(upstream=False) if not t.is_teardown]
        self.skip(ti=context["ti"], tasks=rest)
        return []
