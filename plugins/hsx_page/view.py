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
from hsx_page.unread import Unread, listing, mapping, number

ENDED = ("success", "failed")
#: Tasks that may skip the whole rest of a run; others skip one host's part.
_SKIPPERS = ("TopUpOperator", "GateOperator", "ApproveCleanupOperator")


def run_view(
    run: Run,
    tasks: Sequence[Task],
    facts: Mapping[str, Any],
    told: Told,
    order: Sequence[str],
    now: float,
    unread: Unread | None = None,
) -> dict[str, Any]:
    """Everything about one run. What of it can't be read is left out, and said to ``unread``.

    :param facts: what the plan said: ``run``, ``plan`` and ``shards``.
    :param order: the DAG's tasks, upstream first.
    :param now: unix seconds.
    """
    unread = unread or Unread()
    foretold = unread.part("what the gate foretold", None, _foretold, told)
    line, settings, plan = run_line(run, facts, unread), mapping(facts.get("run")), mapping(facts.get("plan"))
    planned = _of_plan(run, facts, "shards", list, unread)
    shards = shards_of(planned, tasks, told, over=run.state in ENDED, unread=unread)
    if settings.get("dry_run"):
        shards = []
    courses = courses_of(tasks, told, unread)
    pace = number(mapping(foretold).get("tok_s"))
    sums = unread.part("the shards' sums", None, totals, shards, courses, now, foretold_tok_s=pace) if shards else None
    return {
        **line,
        "url": places.run(run.dag_id, run.run_id),
        "dataset_dir": plan.get("dataset_dir", ""),
        "skipped_because": next((v for t in tasks if t.operator in _SKIPPERS and (v := _skipped(t, told))), ""),
        "foretold": foretold,
        "rejects": listing(plan.get("rejects")),
        "steps": _steps(run, tasks, told, order, unread),
        "shard_columns": list(COLUMNS),
        "shards": [s.row() for s in shards] if sums else [],
        "totals": sums,
        "rates": unread.part("the rates over time", None, rates, courses),
        "failures": _failures(run, tasks, told, unread),
        "benchmarks": _benchmarks(tasks, told, unread),
    }


def _of_plan(run: Run, facts: Mapping[str, Any], key: str, kind: type[Any], unread: Unread) -> Any:
    """One XCom of the plan; where it is of another kind, said, and empty."""
    value = facts.get(key, kind())
    if isinstance(value, kind):
        return value
    unread.say(
        f"the plan's XCom {key} of {run.dag_id} {run.run_id} can't be read (it holds {str(value)[:60]!r}: an XCom "
        "backend keeps it elsewhere, or another version wrote it)"
    )
    return kind()


def _foretold(told: Told) -> dict[str, Any] | None:
    """What the gate told that would happen."""
    found = next((v for (_, _, key), v in told.items() if key == FORETOLD), None)
    if found is None:
        return None
    deletes = [{**one, "bytes": int(one["bytes"])} for one in found.get("deletes") or []]
    return {**found, "lines": [str(line) for line in found["lines"]], "deletes": deletes}


def run_line(run: Run, facts: Mapping[str, Any], unread: Unread | None = None) -> dict[str, Any]:
    """One run in the list of runs."""
    unread = unread or Unread()
    settings, plan = (_of_plan(run, facts, key, dict, unread) for key in ("run", "plan"))
    return {
        "dag_id": run.dag_id,
        "run_id": run.run_id,
        "state": run.state,
        "kind": run.kind,
        "began": run.began,
        "ended": run.ended,
        "active": run.state not in ENDED,
        "profile": str(settings.get("profile") or run.conf.get("profile") or ""),
        "dry_run": bool(settings.get("dry_run") or run.conf.get("dry_run")),
        "dataset_id": str(plan.get("dataset_id", "")),
        "todo": number(plan.get("todo")),
        "todo_tokens": number(plan.get("todo_tokens")),
        "todo_bytes": number(plan.get("todo_bytes")),
    }


def _steps(run: Run, tasks: Sequence[Task], told: Told, order: Sequence[str], unread: Unread) -> list[dict[str, Any]]:
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
                "says": ""
                if group[0].map_index >= 0
                else unread.part(f"what {name} told", "what it told can't be read", _says, group[0], told),
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
        return _under_way(task, mapping(told.get((task.task_id, -1, PROGRESS))))
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


def _failures(run: Run, tasks: Sequence[Task], told: Told, unread: Unread) -> list[dict[str, Any]]:
    """Each failed try with its reason, newest first; and failed tasks of which nobody could tell one."""
    nothing = list[dict[str, Any]]()
    parts = (
        unread.part(f"the failed tries of {t.task_id}", nothing, _tries, run, t, listing(told.get((*_key(t), TRIES))))
        for t in tasks
    )
    return sorted((line for part in parts for line in part), key=lambda f: -(f["at"] or 0.0))


def _key(task: Task) -> tuple[str, int]:
    return task.task_id, task.map_index


def _tries(run: Run, task: Task, tries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    line = {
        "task_id": task.task_id,
        "map_index": task.map_index,
        "label": task.label or (f"{task.map_index}" if task.map_index >= 0 else ""),
        "state": task.state,
        "url": places.task(run.dag_id, run.run_id, task.task_id, task.map_index),
    }
    if task.state == "failed" and not tries:
        message = "the run's verdict: see the other failures" if task.operator == "VerdictOperator" else ""
        return [{**line, "try": task.tries, "at": task.ended, "error": "", "message": message}]
    return [
        {**line, "try": one.get("try"), "at": number(one.get("at")), **{k: one.get(k) for k in ("error", "message")}}
        for one in tries
    ]


def _benchmarks(tasks: Sequence[Task], told: Told, unread: Unread) -> list[dict[str, Any]]:
    """Production before and after, by load; one entry a host."""
    found: dict[str, dict[str, Any]] = {}
    for task in tasks:
        result = told.get((*_key(task), RESULT))
        if task.operator == "BenchmarkOperator" and isinstance(result, dict):
            progress = mapping(told.get((*_key(task), PROGRESS)))
            host = str(progress.get("host") or task.task_id.rpartition(".")[0])
            if measured := unread.part(f"what {task.task_id} measured", None, _measured, result):
                found.setdefault(host, {"host": host}).update(measured)
    return [found[host] for host in sorted(found)]


def _measured(result: Mapping[str, Any]) -> dict[str, Any]:
    """One measurement, by when it was made."""
    when = result["when"]
    if when not in ("before", "after"):
        raise ValueError(f"when = {when!r}")
    rooms = {key: {str(k): v for k, v in (result.get(key) or {}).items()} for key in ("loads", "ratios")}
    return {when: {**rooms, "within_tolerance": result.get("within_tolerance"), "text": result.get("text")}}
