"""``make test-hosts``: a host that fails, a host that is away, nights, a window and a backfill, on real parts.

Too long for ``make test``: each test is one or more runs of the whole DAG. The tests are one story, in this order.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from dag_story import Run
from stands import write_samples
from two_hosts import DAG, TwoHosts

from hsx_demo import processes
from hsx_demo.client import AirflowClient
from hsx_host import contract as c

NIGHT = "hsx_extraction__night"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, host_python: str, tiny_model: Path) -> Iterator[TwoHosts]:
    """Both hosts, and Airflow."""
    made = TwoHosts(tmp_path_factory.mktemp("hosts"), host_python, tiny_model)
    try:
        yield made.start()
    finally:
        made.stop()


@pytest.fixture(scope="module")
def client(hosts: TwoHosts) -> AirflowClient:
    assert hosts.a.airflow is not None
    client = hosts.a.airflow.client()
    client.unpause(NIGHT)
    return client


def kill_extraction_server(hosts: TwoHosts) -> None:
    record = json.loads((hosts.b.host_dir / "hsx" / "state" / "server.json").read_text())
    assert record["mode"] == "extraction"
    os.killpg(record["pid"], signal.SIGKILL)


def test_a_failed_hosts_shards_are_done_by_the_other(hosts: TwoHosts, client: AirflowClient) -> None:
    run = Run(client, dag_id=DAG)
    run.wait("b.extract.0", "running", "deferred")
    shards = {shard["id"] for shard in run.xcom("b.share")}
    run.until(lambda: len(hosts.published(shards)) >= 3)  # in mid-shard: before, the step would start the server anew
    kill_extraction_server(hosts)
    assert run.end() == "failed", run.story()
    states = run.states()
    assert "failed" in {states["b.extract.0"], states["b.extract.1"]}
    assert states["b.restore"] == states["b.production_healthy"] == "success", run.story()
    taken = run.xcom("reassign")
    assert list(taken) == ["a"]
    assert states["take_over.a.restore"] == states["handoff"] == "success", run.story()
    assert states["take_over.b.acquire"] == "skipped"
    assert run.xcom("handoff")["samples"] == 120
    said = run.log("verdict")
    assert "Failed: b.extract" in said
    assert "handed on: 120 samples" in said
    assert hosts.a.production_healthy()
    assert hosts.b.production_healthy()


def test_a_host_that_is_away_stops_nothing(hosts: TwoHosts, client: AirflowClient, tmp_path: Path) -> None:
    assert hosts.b.ssh is not None
    processes.stop(hosts.b.ssh.child)
    before = hosts.journal(hosts.b)
    run = Run(client, {"dataset": str(write_samples(tmp_path / "away.jsonl", seed=12, samples=40))}, DAG)
    assert run.end() == "failed", run.story()
    states = run.states()
    assert states["plan"] == states["a.restore"] == states["handoff"] == "success", run.story()
    assert states["b.share"] == "failed"
    assert states["b.acquire"] == "upstream_failed"
    assert "can't be reached" in run.log("b.share")
    assert run.xcom("handoff")["samples"] == 40
    assert hosts.journal(hosts.b) == before
    assert hosts.b.production_healthy()


def hold(hosts: TwoHosts, verb: str) -> None:
    """Acquire or release the host as a person's run would, from a shell on the host."""
    spec = hosts.a.work / "person.json"
    spec.write_text(c.encode(hosts.a.spec("a-person")))
    env = {**os.environ, "PYTHONPATH": hosts.a.env["PYTHONPATH"]}
    command = [hosts.a.python_host, "-m", "hsx_host", verb, "--spec", str(spec)]
    subprocess.run(command, env=env, check=True, capture_output=True)


def test_a_night_waits_while_a_person_has_the_host(hosts: TwoHosts, client: AirflowClient, tmp_path: Path) -> None:
    data = str(write_samples(tmp_path / "held.jsonl", seed=13, samples=20))
    hold(hosts, "acquire")
    run = Run(client, {"dataset": data, "profile": "night"}, NIGHT)
    try:
        run.wait("acquire", "up_for_retry")
        assert hosts.a.production_healthy()
        tries: Any = run.log("acquire")
        assert "a-person" in tries
    finally:
        hold(hosts, "release")
    client.clear(NIGHT, run.id, ["acquire"], only_failed=False)  # instead of waiting five minutes
    assert run.end() == "success", run.story()
    assert run.xcom("handoff")["samples"] == 20


def test_a_window_ends_in_good_order_and_the_next_run_goes_on(
    hosts: TwoHosts, client: AirflowClient, tmp_path: Path
) -> None:
    data = write_samples(tmp_path / "window.jsonl", seed=14, samples=40_000, longest=199)  # more than minutes allow
    soon = datetime.now(UTC) + timedelta(minutes=8)  # to borrow the host takes one, or four on a busy machine
    berlin = client_clock(soon)
    run = Run(client, {"dataset": str(data), "stop_after": berlin}, NIGHT)
    assert run.end() == "success", run.story()
    states, said = run.states(), run.log("verdict")
    assert states["handoff"] == "skipped"
    assert states["restore"] == states["production_healthy"] == "success"
    assert "The window has ended: " in said
    assert "samples are left for the next run" in said
    published = run.xcom("verify")["samples"]
    assert 0 < published < 40_000
    assert hosts.a.production_healthy()
    subject, text = hosts.told()[-1]
    assert subject == "hsx: window_ended"
    assert "samples are left for the next run" in text
    again = Run(client, {"dataset": str(data), "dry_run": True}, NIGHT)
    assert again.end() == "success", again.story()
    assert again.xcom("plan", "plan")["done"] == published


def test_a_short_disk_is_told_and_touches_nothing(hosts: TwoHosts, client: AirflowClient, tmp_path: Path) -> None:
    data = str(write_samples(tmp_path / "short.jsonl", seed=16, samples=20))
    run = Run(client, {"profile": "short", "dataset": data})
    assert run.end() == "failed", run.story()
    assert run.states()["acquire"] == "upstream_failed"
    subject, text = hosts.told()[-1]
    assert subject == "hsx: disk_short"
    assert "disk_check" in text


def client_clock(at: datetime) -> str:
    from zoneinfo import ZoneInfo

    return at.astimezone(ZoneInfo("Europe/Berlin")).strftime("%H:%M")


def test_a_backfill_does_what_is_missing_once(hosts: TwoHosts, client: AirflowClient, tmp_path: Path) -> None:
    assert hosts.a.airflow is not None
    data = str(write_samples(tmp_path / "backfill.jsonl", seed=15, samples=20))
    words = ["backfill", "create", "--dag-id", NIGHT, "--from-date", "2026-03-01", "--to-date", "2026-03-03"]
    hosts.a.airflow.command(*words, "--max-active-runs", "1", "--dag-run-conf", json.dumps({"dataset": data}))
    runs = [r for r in client.get(f"dags/{NIGHT}/dagRuns", limit=100)["dag_runs"] if r["run_type"] == "backfill"]
    assert len(runs) in (2, 3)
    ids = [r["dag_run_id"] for r in sorted(runs, key=lambda r: r["logical_date"])]
    ended = [Run(client, dag_id=NIGHT, run_id=run_id) for run_id in ids]
    assert [r.end() for r in ended] == ["success"] * len(ended), [r.story() for r in ended]
    assert ended[0].xcom("handoff")["samples"] == 20
    for later in ended[1:]:
        assert "Nothing to do: all 20 samples" in later.log("gate")
        assert later.states()["acquire"] == "skipped"
