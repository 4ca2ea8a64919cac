"""The first step, which freezes what the run will do, and the gate that ends a run with nothing to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from airflow.configuration import conf
from airflow.providers.standard.utils.skipmixin import SkipMixin
from airflow.sdk import BaseOperator

from hsx_host import contract as c
from hsx_operators.alerts import check as check_alerts
from hsx_operators.answers import human_bytes
from hsx_operators.base import HostVerbOperator, host_run_id, run_key
from hsx_operators.errors import ConfigError, HostError
from hsx_operators.foretold import FORETOLD, foretell, nothing_to_do
from hsx_operators.hook import GpuHostHook, hook_of
from hsx_operators.hosts import dag_id_of, spread
from hsx_operators.profile import Profile, load_hosts
from hsx_operators.published import reasons_kept
from hsx_operators.shapes import alerts_as_written
from hsx_operators.spec import build_spec, check_known, wants_failed
from hsx_operators.window import end_for, rest_of

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context


class PlanOperator(HostVerbOperator):
    """Reads the profile and the Params, ships the program, checks the host, and plans the shards.

    XComs: ``run`` (where the host is, and the frozen spec), ``plan`` (what is to do), ``shards`` (one entry a shard
    with something to do), ``facts`` (the host's preflight). Everything later rests on them: a profile that changes
    while a run goes on doesn't change that run.

    Where the profile lists several hosts, each is shipped to and checked; the first one that is well plans, and the
    others must see its data set. Then there are also ``run_<name>`` for each host (or what is wrong with it), and
    ``shares``: for each host that is well its shards.

    :param params: the run's Params are read from the context; unknown keys in its conf are refused.
    :param hosts: names of the profile's hosts, as the DAG was made from them; empty for one host.
    """

    result_type = c.PlanResult

    def __init__(self, *, hosts: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hosts = list(hosts)

    def verb(self, context: Context) -> list[str]:
        """``plan``; a dry run writes nothing below the output root."""
        params = context["params"]
        return [
            "plan",
            *(["--dry-run"] if params.get("dry_run") else []),
            *(["--failed"] if wants_failed(params.get("shards")) else []),
        ]

    def execute(self, context: Context) -> Any:
        """Build and ship the spec, run ``preflight``, submit ``plan``."""
        with reasons_kept(context):
            return self._plan(context)

    def _plan(self, context: Context) -> Any:
        params = dict(context["params"])
        check_known({**params, **(context["dag_run"].conf or {})})
        profiles = load_hosts(str(params["profile"]))
        check_hosts(str(params["profile"]), [p.host.name for p in profiles], self.hosts)
        check_alerts(profiles[0].alerts)
        runs: dict[str, dict[str, Any]] = {}
        lead: dict[str, Any] = {}
        sglang = ""
        for profile in profiles:
            name = profile.host.name
            try:
                runs[name], facts = self.prepare(profile, params, context, sglang)
            except (HostError, ConfigError) as e:
                if profile is profiles[-1] and not lead:
                    raise
                self.log.error("host %s is left out of this run: %s", name, e)
                runs[name] = {"problem": str(e)}
                continue
            if not lead:
                lead, sglang = runs[name], facts.sglang
                context["ti"].xcom_push(key="facts", value=c.to_dict(facts))
        with hook_of(lead) as hook:
            return self.submit(hook, {**lead, "runs": runs}, self.verb(context), context)

    def prepare(
        self, profile: Profile, params: dict[str, Any], context: Context, sglang: str
    ) -> tuple[dict[str, Any], c.PreflightResult]:
        """Ship program and spec to one host and look at it; what later tasks need to know about it.

        :param sglang: the version on the host that plans; empty where this is the first.
        """
        name = str(params["profile"])
        spec = build_spec(profile, name, params, host_run_id(context))
        with GpuHostHook(profile.host.ssh_conn_id, spec.host.python, spec.host.home) as hook:
            hook.ship()
            host: dict[str, Any] = {
                "ssh_conn_id": profile.host.ssh_conn_id,
                "python": spec.host.python,
                "home": spec.host.home,
                "output_root": spec.host.output_root,
                "bundle": hook.bundle,
                "bundle_dir": hook.bundle_dir,
                "spec_path": hook.put_document(spec),
                "profile": name,
                "dry_run": bool(params.get("dry_run")),
                "cleanup_policy": spec.cleanup.policy,
                "benchmark": spec.benchmark.enabled,
                "top_up": spec.top_up is not None,
                "stop_after": end_for(profile.nightly, str(params.get("stop_after") or ""), context["dag_run"]),
                "when_held": profile.tasks.when_held,
                "shard_retries": profile.tasks.shard_retries,
                "lease_ttl_s": profile.tasks.lease_ttl_s,
                "alerts": alerts_as_written(name),
            }
            facts = hook.run_verb(c.PreflightResult, ["preflight"], spec_path=host["spec_path"], timeout_s=300)
        for warning in facts.warnings:
            self.log.warning("%s", warning)
        if sglang and facts.sglang != sglang:
            raise ConfigError(
                f"runs SGLang {facts.sglang}, the host that plans {sglang}: their rows don't belong together",
                field="host",
                value=profile.host.name,
                fix="install the same version on all hosts of the profile",
            )
        return host, facts

    def result(self, document: c.PlanResult, host: dict[str, Any], context: Context) -> None:
        """Tell in words what will be done; each part is an XCom of its own."""
        runs = host.pop("runs")
        if wants_failed(context["params"].get("shards")) and document.shards:
            for run in {id(r): r for r in (host, *runs.values()) if "problem" not in r}.values():
                run["spec_path"] = narrowed(run, [shard.id for shard in document.shards])
        if self.hosts:
            self._share_out(document, host, runs, context)
        context["ti"].xcom_push(key="run", value=host)
        tell_plan(document, context["ti"], self.log)

    def _share_out(
        self, document: c.PlanResult, lead: dict[str, Any], runs: dict[str, dict[str, Any]], context: Context
    ) -> None:
        """Spread the shards over the hosts that are well and see the planned data set."""
        if not lead["dry_run"]:
            for name, run in runs.items():
                if "problem" not in run and (why := unseen(document.dataset_id, lead, run)):
                    self.log.error("host %s is left out of this run: %s", name, why)
                    runs[name] = {"problem": why}
        for name in self.hosts:
            context["ti"].xcom_push(key=run_key(name), value=runs[name])
        share_out(document, runs, context["ti"], self.log)


def tell_plan(document: c.PlanResult, ti: Any, log: Any) -> None:
    """A plan in words, and as the XComs ``plan`` and ``shards`` of the task."""
    check_mappable(document)
    plan = c.to_dict(document)
    shards = plan.pop("shards")
    for line in document.rejects:
        log.warning("rejected: %s", line)
    log.info(
        "%s: %d rows, %d valid, %d rejected, %d duplicates, %d done (%d of them moved to another row); "
        "to do: %d samples (%d changed) in %d shards, %s tokens, %s; %d to derive in other formats",
        document.dataset_id,
        document.rows,
        document.valid,
        document.rejected,
        document.duplicates,
        document.done,
        document.moved,
        document.todo,
        document.changed,
        len(shards),
        f"{document.todo_tokens:,}",
        human_bytes(document.todo_bytes),
        document.derive,
    )
    for shard in document.shards:
        if shard.failed:
            log.warning("%s: %d samples failed before: %s", shard.name, shard.failed, "; ".join(shard.reasons))
    for key, value in (("plan", plan), ("shards", shards)):
        ti.xcom_push(key=key, value=value)


def check_mappable(document: c.PlanResult) -> None:
    """ConfigError where the shards are more than Airflow maps a task over: its api-server would refuse them later."""
    limit, shards = conf.getint("core", "max_map_length", fallback=1024), document.shards
    if len(shards) > limit:
        # one less than the limit: samples topped up begin a shard of their own
        size = math.ceil((document.rows + document.top_ups) / max(1, limit - 1))
        raise ConfigError(
            f"makes {len(shards):,} shards with something to do; Airflow maps a task over at most {limit:,}",
            field="data.shard_size",
            value=max(shard.rows for shard in shards),
            fix=f"set AIRFLOW__CORE__MAX_MAP_LENGTH to {len(shards)} or more for every component, or shard_size to "
            f"{size} or more, or do a part by the Param shards, such as {shards[0].id}-{shards[limit - 1].id}",
        )


def share_out(document: c.PlanResult, runs: dict[str, dict[str, Any]], ti: Any, log: Any) -> None:
    """The plan's shards over the hosts that are well, as the XCom ``shares``."""
    shares = spread(c.to_dict(document)["shards"], [name for name, run in runs.items() if "problem" not in run])
    for name in runs:
        share = shares.get(name, [])
        log.info("%s: %d shards, %s tokens", name, len(share), f"{sum(s['tokens'] for s in share):,}")
    ti.xcom_push(key="shares", value=shares)


def narrowed(run: dict[str, Any], shards: list[int]) -> str:
    """Freeze on a host which shards the plan has found; the path of the new spec."""
    with hook_of(run) as hook:
        spec = c.decode(c.RunSpec, hook.read_file(run["spec_path"]) or b"")
        return hook.put_document(replace(spec, data=replace(spec.data, shards=shards)))


def check_hosts(profile: str, listed: list[str], made_of: list[str]) -> None:
    """Refuse a profile whose hosts are not those that the DAG's tasks were made from."""
    if listed == made_of or (len(listed) == 1 and not made_of):
        return
    if not made_of:
        fix = f"trigger {dag_id_of(profile)}, which has tasks for each of them"
    else:
        fix = "wait until Airflow has read the DAG again, then trigger a new run"
    raise ConfigError(
        f"lists the hosts {', '.join(listed)}; this DAG was made for {', '.join(made_of) or 'one host'}",
        field="profile",
        value=profile,
        fix=fix,
    )


def unseen(dataset_id: str, lead: dict[str, Any], run: dict[str, Any]) -> str:
    """Why a host can't add to the planned data set; empty where it reads the same plan as the host that planned."""
    try:
        plans = []
        for one in (lead, run):
            with hook_of(one) as hook:
                plans.append(hook.read_file(f"{one['output_root']}/{dataset_id}/plan.json"))
    except HostError as e:
        return str(e)
    if plans[0] == plans[1]:
        return ""
    return (
        f"host.output_root = {run['output_root']!r}: does not hold the data set {dataset_id} that was planned on "
        "another host (mount the same file system on all hosts of the profile, or write one profile a host)"
    )


#: XCom of a task that skipped the rest of the run on purpose: why, in one sentence.
SKIPPED_BECAUSE = "skipped_because"
#: XCom of the gate: everything is published, and an earlier run ended before it was handed off.
HANDOFF_MISSED = "handoff_missed"


class GateOperator(BaseOperator, SkipMixin):
    """Ends the run green where it is a dry run or nothing is left to do: the rest is skipped, production untouched.

    Its XCom is the list of shards, over which ``extract`` is mapped. Where only other formats are left to derive, or an
    earlier run has missed the hand-off, ``handoff_task_ids`` still run: they need no borrowed host.

    :param handoff_task_ids: these tasks; empty where neither is made up for.
    :param run: plan's XCom ``run``.
    :param plan: plan's XCom ``plan``.
    :param shards: plan's XCom ``shards``.
    :param disk: the disk check's verdict.
    """

    template_fields = ("run", "plan", "shards", "disk")
    inherits_from_skipmixin = True
    ui_color = "#f3e6c8"

    def __init__(
        self,
        *,
        run: Any,
        plan: Any,
        shards: Any,
        disk: Any,
        handoff_task_ids: Sequence[str] = ("convert", "handoff"),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.run, self.plan, self.shards, self.disk = run, plan, shards, disk
        self.handoff_task_ids = tuple(handoff_task_ids)

    def execute(self, context: Context) -> list[dict[str, Any]]:
        """Skip everything downstream but the teardowns, or let it pass."""
        plan, shards = self.plan, list(self.shards)
        what = (
            f"{plan['todo']:,} samples in {len(shards)} shards, {plan['todo_tokens']:,} tokens, "
            f"{human_bytes(plan['todo_bytes'])} ({plan['todo_bytes']:,} bytes)"
        )
        foretold = foretell(self.run, plan, shards, self.disk)
        context["ti"].xcom_push(key=FORETOLD, value=foretold)
        kept: tuple[str, ...] = ()
        missed = not shards and plan["done"] and (plan["derive"] or not plan["handed_off"])
        if missed and self.handoff_task_ids and not self.run["dry_run"]:
            reason = f"all {plan['done']:,} samples of {plan['dataset_id']} are published."
            if plan["derive"]:
                reason = f"Nothing to extract, {plan['derive']:,} samples to derive in other formats: {reason}"
            else:
                reason = f"Only the hand-off is missing: {reason}"
            context["ti"].xcom_push(key=HANDOFF_MISSED, value=True)
            kept = self.handoff_task_ids
        elif not shards and not (plan["derive"] and self.run["dry_run"]):
            reason = nothing_to_do(plan)
        elif self.run["dry_run"]:
            reason = f"Dry run: would extract {what} into {plan['dataset_dir']}"
            reason += f", and derive {plan['derive']:,} in other formats" if plan["derive"] else ""
            reason += f". {self.disk['text']}"
        else:
            self.log.info("To do: %s", what)
            return shards
        self.log.info("%s", reason)
        for line in foretold["lines"]:
            self.log.info("%s", line)
        # The skip ends the task with an exception of Airflow's, so that a returned value would be lost.
        context["ti"].xcom_push(key=SKIPPED_BECAUSE, value=reason)
        self.skip(ti=context["ti"], tasks=[t for t in rest_of(context, "") if t.task_id not in kept])
        return []
