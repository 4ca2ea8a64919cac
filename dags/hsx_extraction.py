"""Borrow a production SGLang host, extract EAGLE-3 hidden states, prove them, give it back, hand them to training."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta

from airflow.sdk import DAG, Param, XComArg

from hsx_operators.disk import ApproveCleanupOperator, CleanupOldStatesOperator, DiskSpaceOperator
from hsx_operators.extraction import (
    ExtractShardOperator,
    ProbeOperator,
    TrainingHandoffOperator,
    VerifyDatasetOperator,
)
from hsx_operators.plan import GateOperator, PlanOperator
from hsx_operators.profile import FORMATS, default_profile, list_profiles
from hsx_operators.sensors import ServerHealthSensor
from hsx_operators.servers import (
    AcquireHostOperator,
    ApplyPatchOperator,
    BenchmarkOperator,
    RestoreProductionOperator,
    StartServerOperator,
    StopServerOperator,
)
from hsx_operators.spec import AS_PROFILE
from hsx_operators.verdict import VerdictOperator

DOC = """
### What a run does
`plan` freezes the run and sizes it; `disk_check` compares with the space that is left; `gate` ends a dry run, or a run
with nothing to do, before anything is touched. Then the host is borrowed: production stops, the extraction server
starts with the capture plugin, `probe` proves the rows, `extract` does one shard a task, `verify` reads the files
again. `restore` brings production back **whatever happened**, `handoff` tells training where the data is, and
`verdict` makes the run red where anything of it failed.

### A shard failed
Clear it (with *downstream*): only its missing samples are extracted; the host is borrowed and given back for it.
Or trigger a run with `shards` = `3,7-9`.

### Every night
Set `HSX_SCHEDULE` (a cron line) where Airflow's processes see it. A night with nothing new leaves production alone.
"""

PARAMS = {
    "profile": Param(
        default_profile(),
        type="string",
        enum=list_profiles(),
        title="Profile",
        description="The host and model: one of include/profiles, or of the folder that $HSX_PROFILES names.",
        section="What",
    ),
    "dataset": Param(
        "",
        type="string",
        title="Data set",
        description="Pre-tokenised .jsonl or .jsonl.gz, an absolute path on the host. Empty: the profile's.",
        section="What",
    ),
    "shards": Param(
        "",
        type="string",
        pattern=r"^[0-9,\- ]*$",
        title="Shards",
        description="Numbers and ranges, such as 3,7-9. Empty: all that are not done.",
        section="What",
    ),
    "output_root": Param(
        "",
        type="string",
        title="Output",
        description="Folder on the host below which the data set is written. Empty: the profile's.",
        section="Output",
    ),
    "formats": Param(
        [],
        type="array",
        items={"type": "string", "enum": list(FORMATS)},
        examples=list(FORMATS),
        title="Formats",
        description="What the trainer reads. Empty: the profile's.",
        section="Output",
    ),
    "cleanup_policy": Param(
        AS_PROFILE,
        type="string",
        enum=[AS_PROFILE, "never", "ask", "auto"],
        title="Old hidden states",
        description="When the space is short: never delete, ask a person, or delete what the disk check listed.",
        section="Safety",
    ),
    "benchmark": Param(
        AS_PROFILE,
        type="string",
        enum=[AS_PROFILE, "on", "off"],
        title="Benchmark",
        description="Measure production before and after.",
        section="Safety",
    ),
    "dry_run": Param(
        False,
        type="boolean",
        title="Dry run",
        description="Stop after plan and disk check, and say what would happen.",
        section="Safety",
    ),
}

with DAG(
    dag_id="hsx_extraction",
    description="EAGLE-3 hidden states from a borrowed SGLang host, proved, and the host given back",
    doc_md=DOC,
    schedule=os.environ.get("HSX_SCHEDULE") or None,
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,  # one server state a host; the pool (one slot) and the lease on the host guard it too
    params=PARAMS,
    tags=["hsx", "eagle3", "sglang"],
    default_args={"owner": "hsx", "execution_timeout": timedelta(hours=2)},
    render_template_as_native_obj=True,
) as dag:
    plan = PlanOperator(task_id="plan")
    run, planned, shards = XComArg(plan, "run"), XComArg(plan, "plan"), XComArg(plan, "shards")
    disk_check = DiskSpaceOperator(task_id="disk_check")
    gate = GateOperator(task_id="gate", run=run, plan=planned, shards=shards, disk=disk_check.output)
    # Asked for before the host is borrowed, so that production never waits for a person.
    approve_cleanup = ApproveCleanupOperator(task_id="approve_cleanup", disk=disk_check.output, run=run)
    benchmark_before = BenchmarkOperator(task_id="benchmark_before", phase="before")

    acquire = AcquireHostOperator(task_id="acquire")
    stop = StopServerOperator(task_id="stop_production")
    patch = ApplyPatchOperator(task_id="apply_patch")
    start = StartServerOperator(task_id="start_extraction")
    extraction_healthy = ServerHealthSensor(task_id="extraction_healthy", mode_wanted="extraction")
    probe = ProbeOperator(task_id="probe")
    # Deleted only now: the probe has shown that new states can be made.
    cleanup = CleanupOldStatesOperator(task_id="cleanup_old_states", disk=disk_check.output)
    extract = ExtractShardOperator.partial(
        task_id="extract", map_index_template="{{ task.shard['name'] }}", **ExtractShardOperator.partial_defaults
    ).expand(shard=gate.output)
    verify = VerifyDatasetOperator(task_id="verify")
    restore = RestoreProductionOperator(task_id="restore").as_teardown(setups=[acquire, stop, patch, start])

    production_healthy = ServerHealthSensor(task_id="production_healthy", mode_wanted="production")
    benchmark_after = BenchmarkOperator(task_id="benchmark_after", phase="after")
    handoff = TrainingHandoffOperator(task_id="handoff")
    verdict = VerdictOperator(task_id="verdict").as_teardown(on_failure_fail_dagrun=True)

    plan >> disk_check >> gate >> approve_cleanup >> benchmark_before
    benchmark_before >> acquire >> stop >> patch >> start >> extraction_healthy >> probe >> cleanup >> extract >> verify
    # Not only after verify: one failed shard decides verify at once, while other shards are still being extracted.
    [extract, verify] >> restore >> production_healthy >> benchmark_after
    [verify, benchmark_after] >> handoff
    [restore, production_healthy, benchmark_after, handoff] >> verdict
