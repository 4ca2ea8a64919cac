"""What the page reads of Airflow's database: plain rows, in a fixed number of queries however many shards there are."""

from __future__ import annotations

import graphlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from airflow.models.asset import AssetEvent, AssetModel, association_table
from airflow.models.dag import DagTag
from airflow.models.dagrun import DagRun
from airflow.models.serialized_dag import SerializedDagModel
from airflow.models.task_state_store import TaskStateStoreModel
from airflow.models.taskinstance import TaskInstance
from airflow.models.xcom import XComModel
from sqlalchemy import and_, func, or_, select
from sqlalchemy.orm import Session

from hsx_operators.extraction import GIVEN_BACK, HIDDEN_STATES
from hsx_operators.foretold import FORETOLD
from hsx_operators.plan import SKIPPED_BECAUSE
from hsx_operators.published import PROGRESS, TRIES
from hsx_page.unread import mapping, number

#: DAGs with this tag are the page's: those that extract, not those that train on what was extracted.
TAG = "hidden-states"
RESULT = "return_value"
#: Of these, results are read; a gate's result is the list of shards, which plan has told already.
TOLD_BY = (
    "PlanOperator", "DiskSpaceOperator", "BenchmarkOperator", "AcquireHostOperator", "StopServerOperator",
    "StartServerOperator", "ServerHealthSensor", "ProbeOperator", "CleanupOldStatesOperator", "ExtractShardOperator",
    "VerifyDatasetOperator", "RestoreProductionOperator", "TrainingHandoffOperator", "VerdictOperator",
)  # fmt: skip
#: Operators whose results say in which mode a host is; of a shard that borrowed it itself, ``GIVEN_BACK`` does.
HOST_TOLD_BY = ("AcquireHostOperator", "StopServerOperator", "StartServerOperator", "ServerHealthSensor",
                "RestoreProductionOperator")  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One DAG run. Times are unix seconds, None where not reached."""

    dag_id: str
    run_id: str
    state: str
    kind: str
    began: float | None
    ended: float | None
    conf: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """One task instance. ``label`` names a mapped one."""

    task_id: str
    map_index: int
    operator: str
    state: str
    tries: int
    began: float | None
    ended: float | None
    label: str = ""


@dataclass(frozen=True)
class Handed:
    """One update of the asset ``hsx_hidden_states``: a hand-off to training."""

    dag_id: str
    run_id: str
    at: float
    handoff: dict[str, Any]


#: Values by (task, map index, key).
Told = dict[tuple[str, int, str], Any]


def dags(session: Session) -> list[str]:
    """The DAGs that extract hidden states."""
    return list(session.scalars(select(DagTag.dag_id).where(DagTag.name == TAG).order_by(DagTag.dag_id)))


def runs(session: Session, dag_ids: Collection[str], limit: int) -> list[Run]:
    """The last runs, newest first."""
    query = select(DagRun).where(DagRun.dag_id.in_(dag_ids)).order_by(DagRun.id.desc()).limit(limit)
    return [_run(row) for row in session.scalars(query)]


def looked(session: Session, dag_ids: Collection[str], limit: int) -> list[Run]:
    """The last runs in which a task looked at a host or changed it, newest first: idle nights lie between them."""
    t = TaskInstance
    at_work = select(t.task_id).where(
        t.dag_id == DagRun.dag_id,
        t.run_id == DagRun.run_id,
        t.operator.in_(HOST_TOLD_BY),
        t.state.is_not(None),
        t.state.not_in(("skipped", "upstream_failed", "removed", "scheduled", "queued")),
    )
    query = select(DagRun).where(DagRun.dag_id.in_(dag_ids), at_work.exists()).order_by(DagRun.id.desc()).limit(limit)
    return [_run(row) for row in session.scalars(query)]


def run(session: Session, dag_id: str, run_id: str) -> Run | None:
    """One run, None where there is none."""
    row = session.scalar(select(DagRun).where(DagRun.dag_id == dag_id, DagRun.run_id == run_id))
    return None if row is None else _run(row)


def tasks(session: Session, dag_id: str, run_id: str) -> list[Task]:
    """All task instances of a run."""
    t = TaskInstance
    query = select(
        t.task_id, t.map_index, t.operator, t.state, t.try_number, t.start_date, t.end_date, t._rendered_map_index
    ).where(t.dag_id == dag_id, t.run_id == run_id)
    return [
        Task(name, index, operator or "", state or "", tries, _unix(began), _unix(ended), label or "")
        for name, index, operator, state, tries, began, ended, label in session.execute(query)
    ]


def told(session: Session, dag_id: str, run_id: str) -> Told:
    """What the tasks of a run have published, their results and the reasons of failed tries among it."""
    x, t = XComModel, TaskInstance
    own = (PROGRESS, FORETOLD, SKIPPED_BECAUSE, "plan")
    here = and_(x.dag_id == dag_id, x.run_id == run_id)
    found: Told = {}
    for row in session.execute(select(x.task_id, x.map_index, x.key, x.value).where(here, x.key.in_(own))):
        found[row[0], row[1], row[2]] = _value(row[3])
    same = and_(t.dag_id == x.dag_id, t.run_id == x.run_id, t.task_id == x.task_id, t.map_index == x.map_index)
    results = (
        select(x.task_id, x.map_index, x.value).join(t, same).where(here, x.key == RESULT, t.operator.in_(TOLD_BY))
    )
    for row in session.execute(results):
        found[row[0], row[1], RESULT] = _value(row[2])
    s = TaskStateStoreModel
    reasons = select(s.task_id, s.map_index, s.value).where(s.dag_id == dag_id, s.run_id == run_id, s.key == TRIES)
    for row in session.execute(reasons):
        found[row[0], row[1], TRIES] = _value(row[2])
    return found


@dataclass(frozen=True)
class Sighting:
    """What one task of one run said about a host. ``told`` is its result, ``progress`` what it told on its way."""

    run: Run
    task: Task
    told: Any
    progress: Any


def sightings(session: Session, of: Sequence[Run]) -> list[Sighting]:
    """What the given runs said about hosts; one query for all of them."""
    by_id = {(r.dag_id, r.run_id): r for r in of}
    t, x = TaskInstance, XComModel
    same = and_(t.dag_id == x.dag_id, t.run_id == x.run_id, t.task_id == x.task_id, t.map_index == x.map_index)
    query = (
        select(
            t.dag_id, t.run_id, t.task_id, t.map_index, t.operator, t.state, t.start_date, t.end_date, x.key, x.value
        )
        .join(x, same)
        .where(
            t.dag_id.in_({r.dag_id for r in of}),
            t.run_id.in_({r.run_id for r in of}),
            or_(and_(t.operator.in_(HOST_TOLD_BY), x.key.in_((RESULT, PROGRESS))), x.key == GIVEN_BACK),
        )
    )
    rows: dict[tuple[str, str, str, int], tuple[Task, dict[str, Any]]] = {}
    for dag_id, run_id, task_id, map_index, operator, state, began, ended, key, value in session.execute(query):
        task = Task(task_id, map_index, operator or "", state or "", 1, _unix(began), _unix(ended))
        rows.setdefault((dag_id, run_id, task_id, map_index), (task, {}))[1][key] = _value(value)
    return [
        Sighting(by_id[dag_id, run_id], task, said.get(GIVEN_BACK) or said.get(RESULT), said.get(PROGRESS))
        for (dag_id, run_id, _, _), (task, said) in rows.items()
        if (dag_id, run_id) in by_id
    ]


def run_facts(
    session: Session, of: Sequence[Run], keys: Collection[str] = ("run", "plan")
) -> dict[tuple[str, str], dict[str, Any]]:
    """What the plans of runs said: where the host is (the first word counts), and what is to do (the last one)."""
    x = XComModel
    query = (
        select(x.dag_id, x.run_id, x.key, x.value)
        .where(x.dag_id.in_({r.dag_id for r in of}), x.run_id.in_({r.run_id for r in of}), x.key.in_(keys))
        .order_by(x.timestamp)
    )
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for dag_id, run_id, key, value in session.execute(query):
        facts = found.setdefault((dag_id, run_id), {})
        if key != "run" or "run" not in facts:
            facts[key] = _value(value)
    return found


def contacts(session: Session, of: Sequence[Run]) -> dict[tuple[str, str], float]:
    """When a task of each run last told something on its way."""
    x = XComModel
    query = (
        select(x.dag_id, x.run_id, func.max(x.timestamp))
        .where(x.dag_id.in_({r.dag_id for r in of}), x.run_id.in_({r.run_id for r in of}), x.key == PROGRESS)
        .group_by(x.dag_id, x.run_id)
    )
    return {(dag_id, run_id): at.timestamp() for dag_id, run_id, at in session.execute(query)}


def verified(session: Session, of: Sequence[Handed]) -> dict[tuple[str, str], dict[str, Any]]:
    """Verify's result of the runs that handed off."""
    t, x = TaskInstance, XComModel
    same = and_(t.dag_id == x.dag_id, t.run_id == x.run_id, t.task_id == x.task_id, t.map_index == x.map_index)
    query = (
        select(x.dag_id, x.run_id, x.value)
        .join(t, same)
        .where(
            x.dag_id.in_({h.dag_id for h in of}),
            x.run_id.in_({h.run_id for h in of}),
            x.key == RESULT,
            t.operator == "VerifyDatasetOperator",
        )
    )
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for dag_id, run_id, raw in session.execute(query):
        value = _value(raw)
        if isinstance(value, dict):  # of several hosts each proves its own shards
            sums = found.setdefault((dag_id, run_id), {"proved": 0, "failed": 0})
            for key in sums:
                sums[key] += number(value.get(key)) or 0
    return found


def consumers(session: Session, of: Sequence[Handed]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The DAG runs that hand-offs have started, by the run that handed off."""
    e, r, link = AssetEvent, DagRun, association_table
    query = (
        select(e.source_dag_id, e.source_run_id, r.dag_id, r.run_id, r._state)
        .join(link, link.c.event_id == e.id)
        .join(r, r.id == link.c.dag_run_id)
        .where(e.source_dag_id.in_({h.dag_id for h in of}), e.source_run_id.in_({h.run_id for h in of}))
        .order_by(r.id)
    )
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for source_dag, source_run, dag_id, run_id, state in session.execute(query):
        found.setdefault((source_dag or "", source_run or ""), []).append(
            {"dag_id": dag_id, "run_id": run_id, "state": state or ""}
        )
    return found


def handoffs(session: Session, dag_ids: Collection[str], limit: int) -> list[Handed]:
    """The last hand-off of each data set, made by one of the given DAGs, newest first.

    :param limit: so many data sets.
    """
    e = AssetEvent
    last = (
        select(func.max(e.id))
        .join(AssetModel, AssetModel.id == e.asset_id)
        .where(AssetModel.name == HIDDEN_STATES.name, e.source_dag_id.in_(dag_ids))
        .group_by(e.extra["dataset_id"].as_string())
    )
    query = (
        select(e.source_dag_id, e.source_run_id, e.timestamp, e.extra)
        .where(e.id.in_(last))
        .order_by(e.timestamp.desc())
        .limit(limit)
    )
    return [
        Handed(dag_id or "", run_id or "", at.timestamp(), extra if isinstance(extra, dict) else {})
        for dag_id, run_id, at, extra in session.execute(query)
    ]


def order(session: Session, dag_id: str) -> list[str]:
    """The DAG's tasks in the order of their dependencies; empty where Airflow has not read the DAG."""
    row = SerializedDagModel.get(dag_id, session=session)
    found = row.data if row is not None else None
    return dependency_order(found) if found else []


def dependency_order(dag: dict[str, Any]) -> list[str]:
    """The tasks of a serialized DAG, upstream first."""
    graph: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter()
    for entry in dag["dag"]["tasks"]:
        task = entry.get("__var", entry)
        graph.add(task["task_id"])
        for after in task.get("downstream_task_ids") or []:
            graph.add(after, task["task_id"])
    return list(graph.static_order())


def _run(row: DagRun) -> Run:
    return Run(
        row.dag_id, row.run_id, str(row.state or ""), str(row.run_type or ""), _unix(row.start_date),
        _unix(row.end_date), mapping(row.conf),
    )  # fmt: skip


def _unix(at: datetime | None) -> float | None:
    return None if at is None else at.timestamp()


def _value(value: Any) -> Any:
    """XComs of some writers are JSON text within JSON."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value
