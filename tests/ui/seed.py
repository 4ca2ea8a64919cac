"""Writes a run into Airflow's database as its tasks would have published it: 500 shards without a GPU and an hour.

    AIRFLOW_HOME=... python tests/ui/seed.py --shards 500 --samples 20 --state success|running

Runs in a process with Airflow's environment, after the DAG has been read (``airflow dags reserialize``).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / room) for room in ("plugins", "include")]

DAG_ID = "hsx_extraction"
HOST = "hsx_kimi_host"
BYTES_A_TOKEN = 57_344


def shards(count: int, samples: int, rng: random.Random) -> list[dict[str, Any]]:
    """Plan's XCom: lengths as those of chats."""
    made = []
    for i in range(count):
        tokens = sum(min(10_648, max(99, int(rng.lognormvariate(7.2, 0.7)))) for _ in range(samples))
        first = i * samples
        made.append({
            "id": i, "name": f"shard {i:05d} (rows {first}-{first + samples - 1})", "first_row": first, "rows": samples,
            "todo": samples, "tokens": tokens, "bytes": tokens * BYTES_A_TOKEN,
        })  # fmt: skip
    return made


def course(body: dict[str, Any], begun: float, seconds: float, points: int, part: float = 1.0) -> dict[str, Any]:
    """The progress that a shard's task tells, as far as ``part`` of it."""
    steps = [i / (points - 1) * part for i in range(points)]
    at = begun + seconds * part
    done = int(body["todo"] * part)
    return {
        "host": HOST, "verb": "extract", "shard": body["id"], "since": begun, "at": at, "done": done,
        "total": body["todo"], "tokens": int(body["tokens"] * part), "bytes": int(body["bytes"] * part),
        "rate": body["todo"] / seconds, "tok_s": round(body["tokens"] / seconds, 1),
        "eta": round(seconds * (1 - part), 1),
        "points": [[round(begun + seconds * s, 1), *(int(body[k] * s) for k in ("todo", "tokens", "bytes"))]
                   for s in steps],
    }  # fmt: skip


def seed(count: int, samples: int, state: str, *, points: int, run_id: str) -> None:
    """One run with ``count`` shards; ``running`` leaves the last fifth undone, one shard running and one failed."""
    from airflow.models.dagrun import DagRun
    from airflow.models.serialized_dag import SerializedDagModel
    from airflow.models.task_state_store import TaskStateStoreModel
    from airflow.models.taskinstance import TaskInstance
    from airflow.models.xcom import XComModel
    from airflow.utils.session import create_session
    from airflow.utils.state import DagRunState
    from airflow.utils.types import DagRunType

    from hsx_operators.published import PROGRESS, TRIES

    rng = random.Random(7)
    planned = shards(count, samples, rng)
    rate = 2_400.0
    with create_session() as session:
        row = SerializedDagModel.get(DAG_ID, session=session)
        assert row is not None, "the DAG has not been read yet"
        dag, version = row.dag, row.dag_version_id
        now = datetime.now(UTC)
        total_s = sum(b["tokens"] for b in planned) / rate
        begun = now - timedelta(seconds=total_s + 900)
        run = DagRun(
            dag_id=DAG_ID, run_id=run_id, run_type=DagRunType.MANUAL, run_after=begun, logical_date=None,
            start_date=begun, state=DagRunState(state), conf={"profile": "kimi-k2.5"},
        )  # fmt: skip
        run.end_date = now if state == "success" else None
        run.dag_version_id = version  # type: ignore[attr-defined]
        run.created_dag_version_id = version
        session.add(run)
        session.flush()

        where: dict[str, Any] = {"dag_run_id": run.id, "dag_id": DAG_ID, "run_id": run_id}

        def xcom(task_id: str, key: str, value: Any, index: int = -1, at: datetime = now) -> None:
            session.add(XComModel(**where, task_id=task_id, map_index=index, key=key, value=value, timestamp=at))

        def instance(task_id: str, index: int, how: str | None, start: datetime | None, end: datetime | None,
                     tries: int = 1, label: str | None = None) -> None:  # fmt: skip
            ti = TaskInstance(dag.get_task(task_id), run_id=run_id, state=how, map_index=index, dag_version_id=version)
            ti.start_date, ti.end_date, ti.try_number = start, end, tries if start else 0
            ti.operator = dag.get_task(task_id).task_type
            if label:
                ti._rendered_map_index = label
            session.add(ti)

        over = state == "success"
        at = begun + timedelta(seconds=30)
        before = ["plan", "top_up", "disk_check", "gate", "approve_cleanup", "benchmark_before", "acquire",
                  "stop_production",
                  "apply_patch", "start_extraction", "extraction_healthy", "probe", "cleanup_old_states"]  # fmt: skip
        after = ["verify", "restore", "production_healthy", "benchmark_after", "handoff", "verdict"]
        for task_id in before:
            instance(task_id, -1, "success", at, at + timedelta(seconds=20))
            at += timedelta(seconds=22)
        edge = count if over else count * 4 // 5
        for i, body in enumerate(planned):
            seconds = body["tokens"] / rate
            start = at
            if i < edge and not (not over and i == 7):
                end = start + timedelta(seconds=seconds)
                instance("extract", i, "success", start, end, 2 if i == 3 else 1, body["name"])
                at = end
            elif i == 7:
                instance("extract", i, "failed", start, start + timedelta(seconds=4), 3, body["name"])
                at += timedelta(seconds=4)
            elif i == edge:
                instance("extract", i, "deferred", start, None, 1, body["name"])
            else:
                instance("extract", i, None, None, None)
        for task_id in after:
            instance(task_id, -1, "success" if over else None, at if over else None, now if over else None)
        session.flush()

        at = begun + timedelta(seconds=300)
        for i, body in enumerate(planned):
            seconds = body["tokens"] / rate
            if i > edge:
                break
            part = 1.0 if i < edge else 0.4
            xcom("extract", PROGRESS, course(body, at.timestamp(), seconds, points, part), i)
            if i < edge and (over or i != 7):
                xcom("extract", "return_value", {
                    "shard": i, "name": body["name"], "samples": samples, "published": samples, "extracted": samples,
                    "failed": 0, "tokens": body["tokens"], "bytes": body["bytes"], "seconds": round(seconds, 2),
                    "tok_s": round(rate, 1), "proof": f"{min(8, samples)} of {min(8, samples)} next tokens right",
                    "failures": [], "type": "ShardSummary", "version": 1,
                }, i)  # fmt: skip
            at += timedelta(seconds=seconds)
        totals = {k: sum(b[k] for b in planned) for k in ("todo", "tokens", "bytes")}
        xcom("plan", "run", {"ssh_conn_id": HOST, "profile": "kimi-k2.5", "dry_run": False, "lease_ttl_s": 900,
                             "cleanup_policy": "ask", "benchmark": True})  # fmt: skip
        xcom("plan", "plan", {
            "dataset_id": "kimi-k2.5-eagle3-1f2e3d4c", "dataset_dir": "/data/hidden_states/kimi-k2.5-eagle3-1f2e3d4c",
            "todo": totals["todo"], "todo_tokens": totals["tokens"], "todo_bytes": totals["bytes"], "done": 0,
            "rejected": 0, "rejects": [], "pace": None,
        })  # fmt: skip
        xcom("plan", "shards", planned)
        xcom("acquire", "return_value", {"run_id": run_id, "since": begun.timestamp() + 140,
                                         "expires": begun.timestamp() + 1040, "boot_id": ""})  # fmt: skip
        xcom("start_extraction", "return_value", {"mode": "extraction", "pid": 41234, "port": 30000, "ready_s": 190.0})
        if not over:
            tries = [{"try": n, "at": now.timestamp() - 60 * n, "error": "HostTryAgain",
                      "message": "extraction = 30000: extract: the server is gone; 12 samples of shard 00007 are left "
                                 "(read the server's log; run this shard again, it does only what is missing)"}
                     for n in (1, 2, 3)]  # fmt: skip
            session.add(
                TaskStateStoreModel(**where, task_id="extract", map_index=7, key=TRIES, value=json.dumps(tries))
            )


def main() -> None:
    """Seed from a shell."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shards", type=int, default=500)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--points", type=int, default=48)
    parser.add_argument("--state", choices=("success", "running"), default="running")
    parser.add_argument("--run-id", default="manual__seeded")
    options = parser.parse_args()
    seed(options.shards, options.samples, options.state, points=options.points, run_id=options.run_id)


if __name__ == "__main__":
    main()
