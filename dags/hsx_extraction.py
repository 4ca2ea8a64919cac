"""Borrow a production SGLang host, extract EAGLE-3 hidden states, prove them, give it back, hand them to training."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

from airflow.sdk import (
    DAG,
    BaseOperator,
    CronTriggerTimetable,
    Param,
    TaskGroup,
    TriggerRule,
    XComArg,
    get_parsing_context,
)

from hsx_operators.alerts import deadline
from hsx_operators.disk import ApproveCleanupOperator, CleanupOldStatesOperator, DiskSpaceOperator
from hsx_operators.extraction import (
    ConvertFormatsOperator,
    ExtractShardOperator,
    ProbeOperator,
    TrainingHandoffOperator,
    VerifyDatasetOperator,
)
from hsx_operators.fleet import ReassignOperator, ShareOperator
from hsx_operators.hosts import DAG_ID, TAKE_OVER, dag_id_of
from hsx_operators.plan import GateOperator, PlanOperator
from hsx_operators.profile import FORMATS
from hsx_operators.profile_files import default_profile, remarks
from hsx_operators.sensors import ServerHealthSensor
from hsx_operators.servers import (
    AcquireHostOperator,
    ApplyPatchOperator,
    BenchmarkOperator,
    RestoreProductionOperator,
    StartServerOperator,
    StopServerOperator,
)
from hsx_operators.shapes import HostShape, Shape, shapes
from hsx_operators.spec import AS_PROFILE
from hsx_operators.topup import TopUpOperator
from hsx_operators.unattended import Nightly
from hsx_operators.verdict import VerdictOperator

log = logging.getLogger(__name__)

DOC = """
### What a run does
`plan` freezes the run and sizes it; `disk_check` compares with the space that is left; `gate` ends a dry run, or a run
with nothing to do, before anything is touched. Then the host is borrowed: production stops, the extraction server
starts with the capture plugin, `probe` proves the rows, `extract` does one shard a task, `verify` reads the files
again. `restore` brings production back **whatever happened**, `convert` derives the other formats, `handoff` tells
training where the data is, and `verdict` makes the run red where anything of it failed.

### A shard failed
Clear it (with *downstream*): only its missing samples are extracted; the host is borrowed and given back for it.
Or trigger a run with `shards` = `3,7-9` or `failed`.

### Every night
A profile with `nightly.schedule` has a DAG of its own that runs by it. A night with nothing new leaves production
alone.

### Several hosts
A profile that lists `hosts` has a DAG of its own with one group of tasks a host: each is borrowed and given back by
itself. Shards are spread over them; `reassign` hands what a failed host left to the others (`take_over`).
"""

WHAT, WHERE, HOST = "What to extract", "Where it goes", "The borrowed host"

# A field whose type does not take null must not be empty, says Airflow's form, and won't trigger.
PARAMS = {
    "dry_run": Param(
        False,
        type="boolean",
        title="Dry run",
        description="Touches nothing. Says on the page Hidden states what would happen: samples, bytes, hours at the "
        "measured rate, what would be deleted, how long production would be down.",
        section=WHAT,
    ),
    "dataset": Param(
        "",
        type=["null", "string"],
        title="Data set",
        description="A .jsonl(.gz, .zst), .parquet or .arrow file, or a saved data set: an absolute path on the host. "
        "Rows of input_ids and loss_mask, or conversations. Empty: the profile's.",
        examples=["/data/eagle3/chats.jsonl"],
        section=WHAT,
    ),
    "shards": Param(
        "",
        type=["null", "string"],
        pattern=r"^(failed|[0-9,\- ]*)$",
        title="Shards",
        description="Numbers and ranges, such as 3,7-9, or the word failed: those with samples that failed. Empty: all "
        "that are not done. What is published is never extracted again.",
        examples=["failed", "0", "3,7-9"],
        section=WHAT,
    ),
    "output_root": Param(
        "",
        type=["null", "string"],
        title="Output",
        description="Folder on the host below which the data set is written, an absolute path. Empty: the profile's.",
        examples=["/data/hidden_states"],
        section=WHERE,
    ),
    "formats": Param(
        [],
        type=["null", "array"],
        items={"type": "string", "enum": list(FORMATS)},
        examples=list(FORMATS),
        title="Formats",
        description="What trainers read. The capture writes the first, the others are derived. Empty: the profile's.",
        section=WHERE,
    ),
    "cleanup_policy": Param(
        AS_PROFILE,
        type="string",
        enum=[AS_PROFILE, "never", "ask", "auto"],
        values_display={
            "never": "never: the run stops at the disk check instead",
            "ask": "ask: a person sees the list and approves it first",
            "auto": "auto: what the disk check listed goes after the probe",
        },
        title="Old hidden states",
        description="May they be deleted where the space is short? Only below the profile's old_state_roots, and "
        "never more than the disk check has listed.",
        section=WHERE,
    ),
    "stop_after": Param(
        "",
        type=["null", "string"],
        pattern=r"^(([01][0-9]|2[0-3]):[0-5][0-9])?$",
        title="Stop after",
        description="A time of day such as 05:00, in the profile's time zone: extraction ends then in good order and "
        "the host is given back; another run goes on. Empty: a nightly run stops when its profile says, a run "
        "by hand when all is done.",
        examples=["05:00"],
        section=HOST,
    ),
    "benchmark": Param(
        AS_PROFILE,
        type="string",
        enum=[AS_PROFILE, "on", "off"],
        values_display={"on": "on: before the host is borrowed and after it is back", "off": "off: not measured"},
        title="Benchmark of production",
        description="sglang.bench_serving against production, before and after, compared by output tokens a second.",
        section=HOST,
    ),
}


def borrow(host: HostShape, shards: XComArg, disk: XComArg) -> tuple[BaseOperator, list[BaseOperator]]:
    """One host is borrowed, does its shards, and is given back whatever happened: its first step and its last ones."""
    here: dict[str, Any] = {"on": host.name, "pool": host.pool}
    before = BenchmarkOperator(task_id="benchmark_before", phase="before", **here)
    acquire = AcquireHostOperator(task_id="acquire", **here)
    stop = StopServerOperator(task_id="stop_production", **here)
    patch = ApplyPatchOperator(task_id="apply_patch", **here)
    start = StartServerOperator(task_id="start_extraction", **here)
    extraction_healthy = ServerHealthSensor(task_id="extraction_healthy", mode_wanted="extraction", **here)
    probe = ProbeOperator(task_id="probe", **here)
    # Deleted only now: the probe has shown that new states can be made.
    cleanup = CleanupOldStatesOperator(task_id="cleanup_old_states", disk=disk, **here)
    extract = ExtractShardOperator.partial(
        task_id="extract",
        map_index_template="{{ task.shard['name'] }}",
        **{**ExtractShardOperator.partial_defaults, **here},
    ).expand(shard=shards)
    # Skipped shards are those that the end of the window has left for the next run.
    rule = TriggerRule.NONE_FAILED_MIN_ONE_SUCCESS
    verify = VerifyDatasetOperator(task_id="verify", shards=shards if host.name else None, trigger_rule=rule, **here)
    restore = RestoreProductionOperator(task_id="restore", **here).as_teardown(setups=[acquire, stop, patch, start])
    production_healthy = ServerHealthSensor(task_id="production_healthy", mode_wanted="production", **here)
    after = BenchmarkOperator(task_id="benchmark_after", phase="after", **here)

    before >> acquire >> stop >> patch >> start >> extraction_healthy >> probe >> cleanup >> extract >> verify
    # Not only after verify: one failed shard decides verify at once, while other shards are still being extracted.
    [extract, verify] >> restore >> production_healthy >> after
    return before, [verify, restore, production_healthy, after]


def one_host(host: HostShape, approve: BaseOperator, shards: XComArg, disk: XComArg) -> list[BaseOperator]:
    """The runbook of one host; the steps that the verdict waits for."""
    first, (verify, restore, production_healthy, after) = borrow(host, shards, disk)
    # Skipped upstreams are no reason not to: a format may be added to a data set that has nothing left to extract, and
    # all but the hand-off may have been done before; then the gate skips the rest.
    convert = ConvertFormatsOperator(task_id="convert", trigger_rule=TriggerRule.NONE_FAILED, pool=host.pool)
    handoff = TrainingHandoffOperator(
        task_id="handoff", behind=verify.task_id, trigger_rule=TriggerRule.NONE_FAILED, pool=host.pool
    )
    approve >> first
    [verify, after] >> convert >> handoff
    return [restore, production_healthy, after, convert, handoff]


def several_hosts(
    hosts: tuple[HostShape, ...], approve: BaseOperator, shares: XComArg, disk: XComArg
) -> list[BaseOperator]:
    """The same for each host, in a group of its own; then ``take_over``, the same again for what a host has left."""
    # Whatever became of a host, skipped included: the others' work goes on.
    reassign = ReassignOperator(
        task_id="reassign", hosts=[host.name for host in hosts], trigger_rule=TriggerRule.ALL_DONE
    )
    # Mostly nothing was to be taken over, and all of take_over is skipped.
    behind: dict[str, Any] = {
        "plan_task_id": "reassign", "trigger_rule": TriggerRule.NONE_FAILED, "pool": hosts[0].pool
    }  # fmt: skip
    convert = ConvertFormatsOperator(task_id="convert", **behind)
    handoff = TrainingHandoffOperator(task_id="handoff", **behind)
    ends: list[BaseOperator] = []
    for host in hosts:
        with TaskGroup(host.name):
            share = ShareOperator(task_id="share", on=host.name, shares=shares)
            first, last = borrow(host, share.output, disk)
            approve >> share >> first
            last >> reassign
            ends += last
    with TaskGroup(TAKE_OVER):
        for host in hosts:
            with TaskGroup(host.name):
                share = ShareOperator(task_id="share", on=host.name, shares=reassign.output)
                first, last = borrow(host, share.output, disk)
                share >> first
                last >> convert
                ends += last
    # behind approve too: reassign ends well in a run that was never planned, or whose disk is short
    [approve, reassign] >> convert >> handoff
    return [*ends, convert, handoff]


def extraction(dag_id: str, profiles: list[str], shape: Shape, default: str) -> DAG:
    """The DAG over profiles of one shape."""
    with DAG(
        dag_id=dag_id,
        description="EAGLE-3 hidden states from a borrowed SGLang host, proved, and the host given back",
        doc_md=f"### Something is wrong with the profiles\n```\n{shape.problem}\n```\n{DOC}" if shape.problem else DOC,
        schedule=nights(shape.nightly),
        deadline=deadline(shape.profile, shape.alerts),
        catchup=False,
        max_active_runs=1,  # one server state a host; its pool (one slot) and the lease on the host guard it too
        params={"profile": profile_param(profiles, default), **PARAMS},
        tags=["hsx", "eagle3", "hidden-states", "sglang", *(["broken profile"] if shape.problem else [])],
        default_args={"owner": "hsx", "execution_timeout": timedelta(hours=2)},
        render_template_as_native_obj=True,
        auto_register=False,  # a DAG whose making fails halfway is none
    ) as dag:
        names = [host.name for host in shape.hosts if host.name]
        pool = shape.hosts[0].pool
        plan = PlanOperator(task_id="plan", hosts=names, pool=pool)
        run = XComArg(plan, "run")
        # Before the host is borrowed: production itself answers.
        top_up = TopUpOperator(task_id="top_up", hosts=names, pool=pool)
        planned, shards = XComArg(top_up, "plan"), XComArg(top_up, "shards")
        disk_check = DiskSpaceOperator(task_id="disk_check", pool=pool)
        disk = disk_check.output
        # What an earlier run has missed is made up for; of several hosts reassign finds one for it.
        behind = (*(["reassign"] if names else []), "convert", "handoff")
        gate = GateOperator(task_id="gate", run=run, plan=planned, shards=shards, disk=disk, handoff_task_ids=behind)
        # Asked for before the host is borrowed, so that production never waits for a person.
        approve_cleanup = ApproveCleanupOperator(task_id="approve_cleanup", disk=disk, run=run)
        plan >> top_up >> disk_check >> gate >> approve_cleanup

        if names:
            ends = several_hosts(shape.hosts, approve_cleanup, XComArg(top_up, "shares"), disk)
        else:
            ends = one_host(shape.hosts[0], approve_cleanup, gate.output, disk)
        ends >> VerdictOperator(task_id="verdict", hosts=names, plan_task_id="top_up").as_teardown(
            on_failure_fail_dagrun=True
        )
    return dag


def nights(nightly: Nightly) -> CronTriggerTimetable | None:
    """By the profile's clock. With a start date of the DAG, unpausing it at noon would run the missed night at once."""
    if not nightly.schedule:
        return None
    return CronTriggerTimetable(nightly.schedule, timezone=nightly.timezone, run_immediately=False)


def profile_param(names: list[str], default: str) -> Param:
    """Which host and model."""
    return Param(
        default,
        type="string",
        enum=names,
        title="Profile",
        description="The host and model: what exists in include/profiles and in the folder of $HSX_PROFILES.",
        section=WHAT,
    )


def own_dag(one: Shape) -> DAG:
    """A profile's own DAG; where it can't be made, one that says why. The other profiles keep theirs."""
    dag_id, name = dag_id_of(one.profile), one.profile
    try:
        return extraction(dag_id, [name], one, name)
    except Exception as e:
        log.exception("%s", dag_id)
        return extraction(dag_id, [name], Shape(name, problem=f"profile {name}: {type(e).__name__}: {e}"), name)


def form(names: list[str]) -> DAG:
    """One DAG over all profiles of one host. A ``HSX_PROFILE`` that is none of them stays the default all the same: a
    run by it is refused, while another default would take another host in silence."""
    for line in (wrong := remarks()):
        log.error("%s", line)
    return extraction(DAG_ID, names, Shape(names[0], problem="\n".join(wrong)), default_profile(names))


# One DAG with a form over all profiles of one host; and one for each profile that has several, or runs by itself: its
# tasks, pools and schedule are its own, and Airflow has one schedule and one set of tasks a DAG.
ALL = shapes()
WANTED = get_parsing_context().dag_id  # a worker that runs a task needs no other DAG
simple = [one.profile for one in ALL if one.in_form]
if simple and WANTED in (None, DAG_ID):
    globals()[DAG_ID] = form(simple)
for one in ALL:
    if one.own_dag and WANTED in (None, dag_id_of(one.profile)):
        globals()[dag_id_of(one.profile)] = own_dag(one)
