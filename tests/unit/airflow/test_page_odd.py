"""What tasks published may be odd (another version, another XCom backend, NaN): it costs its own part of the page."""

from __future__ import annotations

import copy
import json
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from hsx_operators.foretold import FORETOLD
from hsx_operators.published import PROGRESS, TRIES
from hsx_page import reading, web
from hsx_page.reading import Handed, Run, Sighting, Task

NOW = 1_000_000.0


def task(name: str, operator: str, state: str = "success", index: int = -1) -> Task:
    ended = None if state in ("running", "deferred") else NOW - 10
    return Task(name, index, operator, state, 1, NOW - 50, ended)


RUN = Run("d", "r0", "running", "manual", NOW - 100, None)
OTHER = Run("d", "r1", "success", "manual", NOW - 900, NOW - 800)
EXTRACT = "ExtractShardOperator"
TASKS = [
    task("plan", "PlanOperator"), task("disk_check", "DiskSpaceOperator"), task("gate", "GateOperator"),
    task("benchmark_before", "BenchmarkOperator"), task("acquire", "AcquireHostOperator"),
    task("stop", "StopServerOperator"), task("start", "StartServerOperator"), task("probe", "ProbeOperator"),
    task("clean", "CleanupOldStatesOperator"), task("extract", EXTRACT, "success", 0),
    task("extract", EXTRACT, "deferred", 1), task("extract", EXTRACT, "failed", 2),
    task("verify", "VerifyDatasetOperator"), task("restore", "RestoreProductionOperator", "deferred"),
    task("handoff", "TrainingHandoffOperator", "failed"), task("verdict", "VerdictOperator", ""),
]  # fmt: skip
PLAN = {"dataset_id": "ds", "dataset_dir": "/d", "todo": 5, "todo_tokens": 50, "todo_bytes": 500, "done": 2,
        "rejects": ["row 3"]}  # fmt: skip
SERVER = {"mode": "production", "port": 1, "pid": 3, "ready_s": 3.0}
PUBLISHED: dict[str, Any] = {
    "run": {"ssh_conn_id": "g", "lease_ttl_s": 900, "profile": "p", "dry_run": False},
    "plan": PLAN,
    "shards": [{"id": i, "name": f"s{i}", "todo": 10, "tokens": 100, "bytes": 1000} for i in range(3)],
    "plan/plan": PLAN,
    "disk_check/return_value": {"text": "t"},
    f"gate/{FORETOLD}": {"samples": 1, "tok_s": 3.0, "lines": ["a"], "deletes": [{"path": "/x", "bytes": 3}]},
    "benchmark_before/return_value": {"when": "before", "loads": {"single": {"output_tok_s": 1.0}}, "text": "t"},
    "start/return_value": SERVER,
    "stop/return_value": {"mode": "stopped"},
    "probe/return_value": {"cases": 3, "seconds": 4.0},
    "clean/return_value": {"deleted": [], "freed_bytes": 3},
    "verify/return_value": {"samples": 1, "proved": 3, "failed": 0},
    "extract/return_value/0": {"shard": 0, "left": 1, "new_tokens": 3, "new_bytes": 4, "tok_s": 3.0, "seconds": 4.0,
                               "bytes": 3},
    f"extract/{PROGRESS}/1": {"host": "g", "shard": 1, "done": 3, "total": 10, "tokens": 30, "bytes": 300,
                              "tok_s": 4.0, "eta": 2.0, "at": NOW - 1, "points": [[NOW - 9, 0, 0, 0], [NOW, 1, 9, 9]]},
    f"extract/{TRIES}/2": [{"try": 1, "at": NOW - 3, "error": "E", "message": "m"}],
    f"restore/{PROGRESS}": {"host": "g", "verb": "restore", "total": 3, "done": 1, "eta": 3.0},
    "lease": {"run_id": "r0", "since": NOW - 9, "expires": NOW + 9},
    "server": SERVER,
    "handed": {"dataset_id": "old", "samples": 3, "formats": {"a": "/a"}, "layers": [1], "commands": {"x": "y"}},
}  # fmt: skip


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The page's document over what was published, as the api-server would answer it, from no database."""

    def document(published: dict[str, Any]) -> dict[str, Any]:
        facts = {("d", "r0"): {k: published[k] for k in ("run", "plan", "shards")},
                 ("d", "r1"): {"run": {}, "plan": {**PLAN, "dataset_id": "older"}}}  # fmt: skip
        told = {
            (parts[0], int(parts[2]) if len(parts) > 2 else -1, parts[1]): value
            for parts, value in ((k.split("/"), v) for k, v in published.items())
            if len(parts) > 1
        }
        seen = [Sighting(RUN, TASKS[4], published["lease"], {"host": "g"}),
                Sighting(RUN, TASKS[6], published["server"], {"host": "g"}),
                Sighting(OTHER, TASKS[6], SERVER, {"host": "other"})]  # fmt: skip
        handed = [Handed("d", "r", NOW, published["handed"])] if isinstance(published["handed"], dict) else []
        answers: dict[str, Any] = {
            "runs": [RUN, OTHER], "looked": [RUN, OTHER], "run_facts": facts, "tasks": TASKS, "told": told,
            "sightings": seen, "handoffs": handed, "contacts": {}, "verified": {}, "consumers": {}, "order": [],
        }  # fmt: skip
        for name, answer in answers.items():
            monkeypatch.setattr(reading, name, lambda *a, answer=answer, **k: copy.deepcopy(answer))
        found = web.overview(None, ["d"], "", "", assets=True)  # type: ignore[arg-type]
        return json.loads(json.dumps(found, allow_nan=False).encode())  # type: ignore[no-any-return]

    return document


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from paths(value[key], (*at, key))


def changed(value: Any, path: tuple[Any, ...], to: Any) -> Any:
    whole = copy.deepcopy(value)
    place = whole
    for key in path[:-1]:
        place = place[key]
    if to == "gone" and len(path) > 1:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return whole


@pytest.mark.parametrize(
    "to",
    ["gone", None, "x", "s3://xcom/d/r0", [], {}, [None], {"a": [1]}, -1, 1e308, float("nan"), float("inf"), "\ud800"],
)
def test_nothing_that_a_task_can_publish_takes_the_page_down(page: Any, to: Any) -> None:
    good = page(PUBLISHED)
    assert good["unread"] == []
    for path in paths(PUBLISHED):
        if not path:
            continue
        found = page(changed(PUBLISHED, path, to))
        assert len(found["runs"]) == 2, path
        assert found["run"]["run_id"] == "r0", path
        assert [s["state"] for s in found["run"]["steps"]] == [s["state"] for s in good["run"]["steps"]], path
        assert "other" in [h["name"] for h in found["hosts"]], path
        assert "older" in [d["dataset_id"] for d in found["datasets"]], path
        assert len(found["unread"]) <= 6, (path, found["unread"])


@pytest.mark.parametrize(
    ("path", "to", "says"),
    [
        (("shards",), "s3://bucket/shards.json", "the plan's XCom shards of d r0 can't be read (it holds 's3://bucket"),
        (("plan",), "s3://bucket/plan.json", "the plan's XCom plan of d r0 can't be read"),
        (("shards", 1), None, "shard 1 of the plan can't be read"),
        (("plan", "done"), "gone", "the data set ds in the plan of d r0 can't be read (KeyError: 'done')"),
        ((f"extract/{PROGRESS}/1", "total"), "x", "what s1 told can't be read"),
        (("probe/return_value",), {}, "what probe told can't be read (KeyError: 'cases')"),
        (("lease", "expires"), float("nan"), "what acquire of r0 told of the host g can't be read"),
    ],
)
def test_the_page_says_what_it_could_not_read(page: Any, path: tuple[Any, ...], to: Any, says: str) -> None:
    found = page(changed(PUBLISHED, path, to))
    assert any(line.startswith(says) for line in found["unread"]), found["unread"]


def test_an_odd_part_costs_itself_alone(page: Any) -> None:
    good = page(PUBLISHED)
    one = page(changed(PUBLISHED, ("shards", 1), {"id": "x"}))
    assert [row[1] for row in one["run"]["shards"]] == ["s0", "s2"]
    told = page(changed(PUBLISHED, (f"extract/{PROGRESS}/1", "tokens"), "many"))["run"]
    assert [row[:2] for row in told["shards"]] == [row[:2] for row in good["run"]["shards"]]
    assert told["rates"] == good["run"]["rates"]
    held = page(changed(PUBLISHED, ("lease", "expires"), None))["hosts"][0]
    assert held["lease"] == {"unread": True}, "a lease that can't be read is not no lease"
    nan = page(changed(PUBLISHED, ("handed", "samples"), float("nan")))
    assert nan["datasets"][0]["samples"] is None
    assert nan["datasets"][1:] == good["datasets"][1:]
    lines = page({**PUBLISHED, "shards": [None] * 500})["unread"]
    assert len(lines) == 11
    assert lines[-1].startswith("and 49")


# ------------------------------------------------------------------------------ what is read of the database


@pytest.fixture
def session() -> Iterator[Any]:
    """An empty database with the tables that these queries read."""
    from airflow.models import import_all_models
    from airflow.models.base import Base
    from sqlalchemy import create_engine
    from sqlalchemy.orm import Session

    import_all_models()
    engine = create_engine("sqlite://")
    tables = ("dag_run", "task_instance", "asset", "asset_event")
    Base.metadata.create_all(engine, tables=[Base.metadata.tables[name] for name in tables])
    with Session(engine) as made:
        yield made


def add(session: Any, table: str, **values: Any) -> None:
    from airflow.models.base import Base

    known = Base.metadata.tables[table]
    now = datetime(2026, 1, 1, tzinfo=UTC)
    for column in known.columns:  # what must be there and means nothing here
        if not column.nullable and column.name not in values and column.default is None:
            kind = column.type.python_type
            values[column.name] = now if kind is datetime else "" if kind is str else kind(0) if kind is int else {}
    session.execute(known.insert().values(**values))


def test_a_host_is_known_after_any_number_of_idle_nights(session: Any) -> None:
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    for night in range(40):
        run_id = f"n{night}"
        add(session, "dag_run", id=night + 1, dag_id="d", run_id=run_id, run_type="scheduled", state="success",
            run_after=begin, log_template_id=None)  # fmt: skip
        for name, operator in (("acquire", "AcquireHostOperator"), ("restore", "RestoreProductionOperator")):
            add(session, "task_instance", id=uuid.uuid4(), dag_id="d", run_id=run_id,
                task_id=name, map_index=-1, operator=operator, state="success" if night < 2 else "skipped",
                start_date=begin + timedelta(days=night))  # fmt: skip
    assert [r.run_id for r in reading.looked(session, ["d"], 10)] == ["n1", "n0"]
    assert reading.looked(session, ["e"], 10) == []


def test_a_data_set_is_known_after_any_number_of_hand_offs_of_another(session: Any) -> None:
    add(session, "asset", id=1, name="hsx_hidden_states", uri="hsx_hidden_states", group="asset")
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    extras: list[Any] = [
        {"dataset_id": "rare", "samples": 1},
        {},
        *({"dataset_id": "nightly", "samples": i} for i in range(250)),
    ]
    for i, extra in enumerate(extras):
        add(session, "asset_event", id=i + 1, asset_id=1, extra=extra, source_dag_id="d", source_run_id=f"r{i}",
            timestamp=begin + timedelta(days=i))  # fmt: skip
    found = reading.handoffs(session, ["d"], 200)
    assert [(h.run_id, h.handoff.get("samples")) for h in found] == [("r251", 249), ("r1", None), ("r0", 1)]
