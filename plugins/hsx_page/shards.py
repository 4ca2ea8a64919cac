"""The shards of one run, from what their tasks published: states, totals, rates over time. Pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hsx_operators.published import PROGRESS, TRIES
from hsx_page.reading import RESULT, Task, Told
from hsx_page.unread import Unread, listing, mapping, number

EXTRACT = "ExtractShardOperator"
#: Airflow's states in the page's words; a task that waits in the triggerer runs on the host.
STATES = {
    "success": "done", "running": "running", "deferred": "running", "queued": "waiting", "scheduled": "waiting",
    "": "waiting", "up_for_retry": "retrying", "up_for_reschedule": "retrying", "restarting": "retrying",
    "failed": "failed", "upstream_failed": "not run", "skipped": "not run", "removed": "not run",
    "awaiting_input": "waiting",
}  # fmt: skip
#: Where a shard has several tasks (one host handed it to another), the first of these is how it stands.
_STANDS = ("done", "running", "retrying", "waiting", "failed", "not run")
_BUCKETS, _SHORTEST_BUCKET_S = 120, 2.0


@dataclass
class Shard:
    """One shard. ``todo`` samples were to do when the run began; ``done`` of them are published, as far as told."""

    id: int
    name: str
    state: str
    todo: int
    tokens_todo: int
    bytes_todo: int
    done: int = 0
    tokens: int = 0
    bytes: int = 0
    tries: int = 0
    tok_s: float | None = None
    eta: float | None = None
    at: float | None = None
    host: str = ""
    task_id: str = ""
    map_index: int = -1
    began: float | None = None
    seconds: float | None = None
    reason: str = ""

    def row(self) -> list[Any]:
        """Values in the order of ``COLUMNS``: five hundred rows stay small."""
        return [getattr(self, name) for name in COLUMNS]


COLUMNS = (
    "id", "name", "state", "todo", "tokens_todo", "bytes_todo", "done", "tokens", "bytes", "tries", "tok_s", "eta",
    "at", "host", "task_id", "map_index", "began", "seconds", "reason",
)  # fmt: skip


def shards_of(
    planned: Sequence[Any], tasks: Iterable[Task], told: Told, *, over: bool, unread: Unread | None = None
) -> list[Shard]:
    """The shards of a run.

    :param planned: plan's XCom ``shards``.
    :param tasks: all tasks of the run.
    :param over: whether the run has ended: a shard that nobody has taken by then is not run.
    """
    unread = unread or Unread()
    extracts = [t for t in tasks if t.operator == EXTRACT and t.map_index >= 0 and t.state != "removed"]
    alone = len({t.task_id for t in extracts}) == 1
    by_id: dict[int, list[Task]] = {}
    for task in extracts:
        whose = f"which shard {task.task_id} {task.map_index} is"
        shard = unread.part(whose, None, _shard_id, task, told, planned if alone else ())
        if shard is not None:
            by_id.setdefault(shard, []).append(task)
    found = (
        unread.part(f"shard {i} of the plan", None, _shard, body, by_id, told, over=over, unread=unread)
        for i, body in enumerate(planned)
    )
    return [shard for shard in found if shard is not None]


def _shard_id(task: Task, told: Told, planned: Sequence[Mapping[str, Any]]) -> int | None:
    for key in (RESULT, PROGRESS):
        value = told.get((task.task_id, task.map_index, key))
        if isinstance(value, dict) and isinstance(value.get("shard"), int):
            return int(value["shard"])
    return int(planned[task.map_index]["id"]) if task.map_index < len(planned) else None


def _shard(
    body: Mapping[str, Any], by_id: Mapping[int, Sequence[Task]], told: Told, *, over: bool, unread: Unread
) -> Shard:
    shard = Shard(
        int(body["id"]), str(body["name"]), "not run" if over else "waiting", int(body["todo"]), int(body["tokens"]),
        int(body["bytes"]),
    )  # fmt: skip
    tasks = by_id.get(shard.id, ())
    if not tasks:
        return shard
    task = min(tasks, key=lambda t: (_STANDS.index(STATES.get(t.state, "waiting")), -(t.began or 0.0)))
    shard.state = STATES.get(task.state, "waiting")
    if over and shard.state == "waiting":
        shard.state = "not run"
    shard.task_id, shard.map_index, shard.began = task.task_id, task.map_index, task.began
    shard.tries = max(task.tries, 1) if task.began else task.tries
    if task.began and task.ended:
        shard.seconds = task.ended - task.began
    unread.part(f"what {shard.name} told", None, _hear, shard, task, told)
    return shard


def _hear(shard: Shard, task: Task, told: Told) -> None:
    """How far a shard is, from what its task told."""
    progress = mapping(told.get((task.task_id, task.map_index, PROGRESS)))
    result = mapping(told.get((task.task_id, task.map_index, RESULT)))
    tries = listing(told.get((task.task_id, task.map_index, TRIES)))
    shard.host = str(progress.get("host", ""))
    if tries and shard.state != "done":
        shard.reason = str(tries[-1].get("message", ""))
    if shard.state == "done":
        shard.done, shard.tokens, shard.bytes = shard.todo, shard.tokens_todo, shard.bytes_todo
        shard.tok_s = number(result.get("tok_s"))
        if left := int(result.get("left") or 0):
            shard.state, shard.reason = "not run", f"the window ended: {left:,} samples are left for the next run"
            shard.done = max(0, shard.todo - left)
            shard.tokens, shard.bytes = int(result.get("new_tokens", 0)), int(result.get("new_bytes", 0))
    elif progress.get("total"):
        # an earlier try may have published some already: then this one had fewer to do
        shard.done = max(0, min(shard.todo, shard.todo - int(progress["total"]) + int(progress.get("done", 0))))
        first = int(progress["total"]) == shard.todo
        part = shard.done / shard.todo if shard.todo else 0.0
        shard.tokens = int(progress.get("tokens", 0)) if first else round(shard.tokens_todo * part)
        shard.bytes = int(progress.get("bytes", 0)) if first else round(shard.bytes_todo * part)
        if shard.state == "running":
            shard.tok_s, shard.eta, shard.at = (number(progress.get(k)) for k in ("tok_s", "eta", "at"))


def totals(shards: Sequence[Shard], courses: Sequence[Course], now: float, *, foretold_tok_s: float | None) -> Any:
    """Sums over all shards, the rate now, and when extraction would be through."""
    states: dict[str, int] = {}
    for shard in shards:
        states[shard.state] = states.get(shard.state, 0) + 1
    running = [s for s in shards if s.state == "running"]
    left = sum(s.tokens_todo - s.tokens for s in shards if s.state not in ("failed", "not run"))
    told = sum(course[-1][1] - course[0][1] for course in courses)
    span = max((c[-1][0] for c in courses), default=now) - min((c[0][0] for c in courses), default=now)
    pace = told / span if span > 0 and told else foretold_tok_s
    return {
        "states": states,
        "samples": sum(s.done for s in shards),
        "samples_todo": sum(s.todo for s in shards),
        "tokens": sum(s.tokens for s in shards),
        "tokens_todo": sum(s.tokens_todo for s in shards),
        "bytes": sum(s.bytes for s in shards),
        "bytes_todo": sum(s.bytes_todo for s in shards),
        "tok_s": sum(s.tok_s or 0.0 for s in running) if running else None,
        "pace_tok_s": pace,
        "eta_s": left / pace if pace and left and (running or states.get("waiting")) else None,
    }


#: ``(time, tokens, bytes)`` of one shard, rising.
Course = list[tuple[float, int, int]]


def courses_of(tasks: Iterable[Task], told: Told, unread: Unread | None = None) -> list[Course]:
    """How each shard's extraction went; of one that told no course, its beginning and end."""
    unread, nothing = unread or Unread(), Course()
    found = (
        unread.part(f"the course of {task.task_id} {task.map_index}", nothing, _course, task, told)
        for task in tasks
        if task.operator == EXTRACT
    )
    return [course for course in found if len(course) >= 2]


def _course(task: Task, told: Told) -> Course:
    points = mapping(told.get((task.task_id, task.map_index, PROGRESS))).get("points") or []
    # of several at one time the last counts: a rate needs a time that has passed
    course = list({float(p[0]): (float(p[0]), int(p[2]), int(p[3])) for p in points}.values())
    if any(number(time) is None for time, _, _ in course):
        raise ValueError("a time is no number")
    result = mapping(told.get((task.task_id, task.map_index, RESULT)))
    if len(course) < 2 and result.get("seconds") and task.ended:
        tokens, size = int(result["tok_s"] * result["seconds"]), int(result["bytes"])
        course = [(task.ended - float(result["seconds"]), 0, 0), (task.ended, tokens, size)]
    return course


def rates(courses: Sequence[Course]) -> dict[str, Any] | None:
    """Tokens and bytes a second over time, all shards together, in at most 120 steps of one width."""
    if not courses:
        return None
    begun, ended = min(c[0][0] for c in courses), max(c[-1][0] for c in courses)
    if ended <= begun:
        return None
    count = max(1, min(_BUCKETS, int((ended - begun) / _SHORTEST_BUCKET_S)))
    step = (ended - begun) / count
    tokens, size = [0.0] * count, [0.0] * count
    for course in courses:
        for (t0, n0, b0), (t1, n1, b1) in itertools.pairwise(course):
            if t1 <= t0:
                continue
            first, last = int((t0 - begun) / step), min(int((t1 - begun) / step), count - 1)
            for i in range(min(first, count - 1), last + 1):
                left, right = begun + i * step, begun + (i + 1) * step
                part = max(0.0, min(t1, right) - max(t0, left)) / (t1 - t0)
                tokens[i] += part * (n1 - n0)
                size[i] += part * (b1 - b0)
    return {
        "from": begun,
        "step": step,
        "tok_s": [round(n / step, 1) for n in tokens],
        "bytes_s": [round(n / step) for n in size],
    }
