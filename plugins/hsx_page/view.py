"""One run, and the list of runs, as the browser gets them. Pure functions over what was read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hsx_operators.answers import human_bytes, human_seconds
from hsx_operators.foretold import FORETOLD
from hsx_operators.plan import SKIPPED_BECAUSE
from hsx_operators.published import PROGRESS, TRIES
from hsx_page import places
from hsx_page.reading import RESULT, Run, Task, Told
from hsx_page.shards import COLUMNS, courses_of, rates, shards_of, totals

ENDED = ("success", "failed")
#: Tasks that may skip the whole rest of a run; others skip one host's part.
_SKIPPERS = ("GateOperator", "ApproveCleanupOperator")


def run_view(
    run: Run, tasks: Sequence[Task], facts: Mapping[str, Any], told: Told, order: Sequence[str], now: float
) -> dict[str, Any]:
    """Everything about one run.

    :param facts: what the plan said: ``run``, ``plan`` and ``shards``.
    :param order: the DAG's tasks, upstream first.
    :param now: unix seconds.
    """
    foretold = next((v for (_, _, key), v in told.items() if key == FORETOLD), None)
    settings, plan = _dict(facts.get("run")), _dict(facts.get("plan"))
    shards = shards_of(facts.get("shards") or [], tasks, told, over=run.state in ENDED)
    if settings.get("dry_run"):
        shards = []
    courses = courses_of(tasks, told)
    return {
        **run_line(run, facts),
        "url": places.run(run.dag_id, run.run_id),
        "dataset_dir": plan.get("dataset_dir", ""),
        "skipped_because": next((v for t in tasks if t.operator in _SKIPPERS and (v := _skipped(t, told))), ""),
        "foretold": foretold,
        "rejects": plan.get("rejects", []),
        "steps": _steps(run, tasks, told, order),
        "shard_columns": list(COLUMNS),
        "shards": [s.row() for s in shards],
        "totals": totals(shards, courses, now, foretold_tok_s=_dict(foretold).get("tok_s")) if shards else None,
        "rates": rates(courses),
        "failures": _failures(run, tasks, told),
        "benchmarks": _benchmarks(tasks, told),
    }


def run_line(run: Run, facts: Mapping[str, Any]) -> dict[str, Any]:
    """One run in the list of runs."""
    settings, plan = _dict(facts.get("run")), _dict(facts.get("plan"))
    return {
        "dag_id": run.dag_id,
        "run_id": run.run_id,
        "state": run.state,
        "kind": run.kind,
        "began": run.began,
        "ended": run.ended,
        "active": run.state not in ENDED,
        "profile": settings.get("profile") or run.conf.get("profile") or "",
        "dry_run": bool(settings.get("dry_run") or run.conf.get("dry_run")),
        "dataset_id": plan.get("dataset_id", ""),
        "todo": plan.get("todo"),
        "todo_tokens": plan.get("todo_tokens"),
        "todo_bytes": plan.get("todo_bytes"),
    }


def _steps(run: Run, tasks: Sequence[Task], told: Told, order: Sequence[str]) -> list[dict[str, Any]]:
    """The run's tasks in their order; mapped ones are one step."""
    by_id: dict[str, list[Task]] = {}
    for task in tasks:
        by_id.setdefault(task.task_id, []).append(task)
    known = {name: i for i, name in enumerate(order)}
    steps = []
    for name in sorted(by_id, key=lambda n: (known.get(n, len(known)), n)):
        group = by_id[name]
        began = [t.began for t in group if t.began]
        ended = [t.ended for t in group if t.ended]
        state = _together([t.state for t in group])
        over = state in ("success", "failed", "upstream_failed", "skipped", "removed")
        steps.append(
            {
                "task_id": name,
                "state": state,
                "count": len(group) if group[0].map_index >= 0 else None,
                "done": sum(t.state == "success" for t in group),
                "tries": max(t.tries for t in group),
                "began": min(began, default=None),
                "ended": max(ended, default=None) if over else None,
                "says": "" if group[0].map_index >= 0 else _says(group[0], told),
                "url": places.task(run.dag_id, run.run_id, name),
            }
        )
    return steps


def _together(states: Sequence[str]) -> str:
    """The state of a mapped task as a whole: what needs a person first."""
    for state in ("failed", "up_for_retry", "awaiting_input", "running", "deferred", "upstream_failed", "queued",
                  "scheduled", ""):  # fmt: skip
        if state in states:
            return state
    return states[0] if states else ""


def _says(task: Task, told: Told) -> str:
    """The outcome of a step in one short line; of one that runs, what it said last."""
    result = told.get((task.task_id, -1, RESULT))
    if task.state in ("running", "deferred", "up_for_retry", "awaiting_input"):
        return _under_way(task, _dict(told.get((task.task_id, -1, PROGRESS))))
    if task.state == "failed":
        tries = told.get((task.task_id, -1, TRIES))
        return str(tries[-1].get("message", "")).split("\n")[0] if isinstance(tries, list) and tries else ""
    if not isinstance(result, dict) or task.state != "success":
        plan = told.get((task.task_id, -1, "plan"))
        if task.state == "success" and isinstance(plan, dict):
            return (
                f"{plan['todo']:,} samples to do, {plan['todo_tokens']:,} tokens, {human_bytes(plan['todo_bytes'])}; "
                f"{plan['done']:,} done"
            )
        return _skipped(task, told) if task.state == "success" else ""
    match task.operator:
        case "DiskSpaceOperator" | "BenchmarkOperator":
            return str(result.get("text", ""))
        case "StopServerOperator":
            return "production is stopped"
        case "StartServerOperator" | "RestoreProductionOperator":
            return f"{result['mode']} serves on port {result['port']}, ready after {human_seconds(result['ready_s'])}"
        case "ServerHealthSensor":
            return f"{result['mode']} has generated a token"
        case "ProbeOperator":
            return f"{result['cases']} cases right, {human_seconds(result['seconds'])}"
        case "CleanupOldStatesOperator":
            return f"{len(result['deleted'])} folders deleted, {human_bytes(result['freed_bytes'])} freed"
        case "VerifyDatasetOperator":
            return f"{result['samples']:,} samples read again, {result['proved']:,} proved by their next token"
        case "TrainingHandoffOperator":
            return str(result.get("path", ""))
        case "VerdictOperator":
            return str(result.get("verdict", ""))
    return ""


def _skipped(task: Task, told: Told) -> str:
    return str(told.get((task.task_id, task.map_index, SKIPPED_BECAUSE)) or "")


def _under_way(task: Task, progress: Mapping[str, Any]) -> str:
    if task.state == "awaiting_input":
        return "waits for a person's answer: open the task, Required Actions"
    if progress.get("total"):
        eta = f", {human_seconds(progress['eta'])} to go" if progress.get("eta") else ""
        return f"{progress.get('done', 0):,} of {progress['total']:,}{eta}"
    return str(progress.get("text") or "")


def _failures(run: Run, tasks: Sequence[Task], told: Told) -> list[dict[str, Any]]:
    """Each failed try with its reason, newest first; and failed tasks of which nobody could tell one."""
    found = []
    for task in tasks:
        tries = told.get((task.task_id, task.map_index, TRIES))
        tries = tries if isinstance(tries, list) else []
        line = {
            "task_id": task.task_id,
            "map_index": task.map_index,
            "label": task.label or (f"{task.map_index}" if task.map_index >= 0 else ""),
            "state": task.state,
            "url": places.task(run.dag_id, run.run_id, task.task_id, task.map_index),
        }
        for one in tries:
            found.append({**line, **{k: one.get(k) for k in ("try", "at", "error", "message")}})
        if task.state == "failed" and not tries:
            message = "the run's verdict: see the other failures" if task.operator == "VerdictOperator" else ""
            found.append({**line, "try": task.tries, "at": task.ended, "error": "", "message": message})
    return sorted(found, key=lambda f: -(f["at"] or 0.0))


def _benchmarks(tasks: Sequence[Task], told: Told) -> list[dict[str, Any]]:
    """Production before and after, by load; one entry a host."""
    found: dict[str, dict[str, Any]] = {}
    for task in tasks:
        result = told.get((task.task_id, task.map_index, RESULT))
        if task.operator == "BenchmarkOperator" and isinstance(result, dict):
            progress = _dict(told.get((task.task_id, task.map_index, PROGRESS)))
            host = str(progress.get("host") or task.task_id.rpartition(".")[0])
            found.setdefault(host, {"host": host})[str(result["when"])] = {
                k: result.get(k) for k in ("loads", "ratios", "within_tolerance", "text")
            }
    return [found[host] for host in sorted(found)]


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
