"""What it does
  Compares what the plan will write (plus the profile's reserve) with what is free on the output's file system, and
  lists the old hidden states below old_state_roots that a cleanup could delete there. Reads the plan of this run; keeps
  its own answer with the run (disk.json), which is what `cleanup` deletes by.
Result: DiskVerdict: `fits`, `cleanup` (fits once the listed sets are deleted) or `short` (does not fit even then).
Example
  python -m hsx_host disk --spec S
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path

from hsx_host import oldstates, state
from hsx_host.contract import DiskVerdict, OldState, PlanResult, RunSpec
from hsx_host.errors import BadInput

HELP = "needed against free against reclaimable disk space"


def add_arguments(parser: ArgumentParser) -> None:
    pass


def run(spec: RunSpec, args: Namespace) -> DiskVerdict:
    answer = verdict(spec)
    state.write_document(state.run_dir(spec) / "disk.json", answer)
    return answer


def verdict(spec: RunSpec) -> DiskVerdict:
    """Needed, free and reclaimable now; nothing is written."""
    plan = read_plan(spec)
    where = existing(spec.host.output_root)
    device = os.stat(where).st_dev
    old = [s for s in oldstates.find(spec, plan.dataset_dir) if s.device == device]
    return judge(plan.todo_bytes + plan.derive_bytes, free_bytes(where), spec.cleanup.reserve_bytes, old)


def judge(needed: int, free: int, reserve: int, old: list[OldState]) -> DiskVerdict:
    """The verdict from bare numbers (bytes). ``old`` are sets on the output's file system."""
    reclaimable = sum(s.bytes for s in old)
    if not needed or needed + reserve <= free:
        what = "fits"
    elif needed + reserve <= free + reclaimable:
        what = "cleanup"
    else:
        what = "short"
    text = f"needed {gib(needed)} + reserve {gib(reserve)}, free {gib(free)}, reclaimable {gib(reclaimable)}"
    if what == "fits":
        text = f"fits: {text}"
    elif what == "cleanup":
        text = f"fits only after {len(old)} old sets are deleted: {text}"
    else:
        text = f"short by {gib(needed + reserve - free - reclaimable)} even without the old sets: {text}"
    if old:
        text += f"; list {oldstates.list_hash(old)}: " + ", ".join(
            f"{s.path} ({gib(s.bytes)}, last used {state.utc(max(s.newest, s.accessed))})" for s in old[:20]
        )
    return DiskVerdict(
        verdict=what,
        needed_bytes=needed,
        free_bytes=free,
        reserve_bytes=reserve,
        reclaimable_bytes=reclaimable,
        old_states=old,
        text=text,
    )


def read_plan(spec: RunSpec) -> PlanResult:
    """The plan that this run keeps."""
    path = state.run_dir(spec) / "plan.json"
    plan = state.read_document(PlanResult, path)
    if plan is None:
        raise BadInput("this run has no plan yet", field="plan", value=path, fix="run the verb plan first")
    return plan


def free_bytes(path: Path) -> int:
    """What an unprivileged user may still write there, in bytes."""
    info = os.statvfs(path)
    return info.f_bavail * info.f_frsize


def existing(path: str) -> Path:
    """The nearest folder above that exists."""
    where = Path(path)
    while not where.exists():
        where = where.parent
    return where


def gib(count: int) -> str:
    """Bytes for a person."""
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 28 else f"{count / (1 << 20):.2f} MiB"
