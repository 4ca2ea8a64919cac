"""The deployment of docker-compose.yaml: healthy, closed, and no task of a run is lost. One story, in this order."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import requests
from deployment import AIRFLOW_SERVICES, WIDE_POOL, WIDE_SHARDS, Deployment, wait_until

from hsx_demo.client import AirflowClient, Task
from hsx_demo.stack import DAG_ID

WIDE_DAG = f"{DAG_ID}__wide"
RUN_TIMEOUT_S = 2400.0


@pytest.fixture
def client(deployment: Deployment) -> AirflowClient:
    """The REST API, as the UI uses it."""
    return deployment.client()


def start(client: AirflowClient, dag_id: str, conf: dict[str, Any]) -> str:
    wait_until(lambda: client.has_dag(dag_id), f"the DAG {dag_id}")
    assert client.import_errors() == []
    client.unpause(dag_id)
    return client.trigger(dag_id, conf)


def end(client: AirflowClient, dag_id: str, run_id: str) -> str:
    state = client.watch(dag_id, run_id, timeout_s=RUN_TIMEOUT_S, poll_s=3.0)
    failed = [t for t in client.tasks(dag_id, run_id) if t.state == "failed"]
    for task in failed[:3]:
        print(f"--- {task.name}", *list(client.log_lines(dag_id, run_id, task))[-25:], sep="\n")
    return state


def shards(client: AirflowClient, dag_id: str, run_id: str) -> dict[int, Task]:
    return {t.map_index: t for t in client.tasks(dag_id, run_id) if t.task_id == "extract" and t.map_index >= 0}


def published(deployment: Deployment, dataset: str) -> list[int]:
    """Rows of the manifests, sorted; a row that was published twice stands there twice."""
    assert deployment.stack.output is not None
    files = deployment.stack.output.glob(f"{dataset}-*/shards/*/manifest.jsonl")
    return sorted(json.loads(line)["index"] for f in files for line in f.read_text().splitlines())


def test_every_part_is_up_healthy_and_comes_back(deployment: Deployment, client: AirflowClient) -> None:
    found = deployment.containers()
    assert set(found) == {*AIRFLOW_SERVICES, "postgres", "redis", "prepare", "init"}
    for service in ("prepare", "init"):
        assert [c["State"]["ExitCode"] for c in found.pop(service)] == [0], service
    assert len(found["worker"]) == 2
    for service, containers in found.items():
        for c in containers:
            assert c["State"]["Health"]["Status"] == "healthy", (service, c["State"]["Health"])
            assert c["HostConfig"]["RestartPolicy"]["Name"] == "unless-stopped", service
    assert client.unhealthy() == []


def test_nothing_is_open_that_need_not_be(deployment: Deployment) -> None:
    published_ports = {
        (service, port, binding["HostIp"])
        for service, containers in deployment.containers().items()
        for c in containers
        for port, bindings in (c["NetworkSettings"]["Ports"] or {}).items()
        for binding in bindings or []
    }
    assert published_ports == {("api-server", "8080/tcp", "127.0.0.1")}
    assert deployment.exec("worker", "id -u").strip() == deployment.setting("AIRFLOW_UID") != "0"
    for file in ("secrets/hsx", "secrets/known_hosts", "profiles/compose.yaml"):
        said = deployment.exec("worker", f"echo x >> /opt/airflow/{file} || echo refused", check=False)
        assert said.strip() == "refused", file
    refused = deployment.exec("worker", "python -c 'import redis; redis.Redis(\"redis\").ping()' || echo refused")
    assert refused.strip() == "refused"
    # no password on a command line of a long-running container
    secrets = [deployment.setting(n) for n in ("POSTGRES_PASSWORD", "REDIS_PASSWORD", "AIRFLOW__API__SECRET_KEY")]
    for service, containers in deployment.containers(*AIRFLOW_SERVICES, "postgres", "redis").items():
        for c in containers:
            words = json.dumps([c["Config"]["Entrypoint"], c["Config"]["Cmd"], c["Args"]])
            assert not any(s in words for s in secrets), service


def test_a_run_of_the_dag_is_green(deployment: Deployment, client: AirflowClient) -> None:
    run_id = start(client, DAG_ID, {"profile": "compose"})
    assert end(client, DAG_ID, run_id) == "success"
    tasks = {t.task_id: t.state for t in client.tasks(DAG_ID, run_id)}
    assert {n for n, s in tasks.items() if s == "skipped"} <= {"cleanup_old_states", "approve_cleanup", "top_up"}
    assert set(tasks.values()) <= {"success", "skipped"}
    assert published(deployment, "compose-few") == list(range(20))
    handoff = client.xcom(DAG_ID, run_id, "handoff")
    assert Path(handoff["path"]).is_file()
    assert deployment.stack.production_healthy()
    # by the workers, not by another executor
    workers = {c["Config"]["Hostname"] for c in deployment.containers("worker")["worker"]}
    answer = client.get(f"dags/{DAG_ID}/dagRuns/{run_id}/taskInstances", limit=500)["task_instances"]
    assert {t["hostname"] for t in answer if t["task_id"] == "extract"} <= workers
    # the log of a task is read where it was written
    extract = shards(client, DAG_ID, run_id)[0]
    assert any("samples published" in line for line in client.log_lines(DAG_ID, run_id, extract))


def test_the_page_is_behind_the_login_and_shows_the_run(deployment: Deployment, client: AirflowClient) -> None:
    page = f"{client.url}/hsx/api/overview"
    assert requests.get(page, timeout=60).status_code == 401
    login = {"username": "admin", "password": deployment.setting("ADMIN_PASSWORD")}
    token = requests.post(f"{client.url}/auth/token", json=login, timeout=60).json()["access_token"]
    answer = requests.get(page, headers={"Authorization": f"Bearer {token}"}, timeout=60)
    assert answer.status_code == 200, answer.text[:2000]
    body = answer.json()
    assert (body["run"]["dag_id"], body["run"]["state"]) == (DAG_ID, "success")
    assert len(body["datasets"]) == 1


def test_60_shards_queued_at_once_and_none_is_lost(deployment: Deployment, client: AirflowClient) -> None:
    """All 60 are in Celery's queue while no worker lives and Redis starts anew; then two workers do them all."""
    pool = client.get(f"pools/{WIDE_POOL}")
    assert (pool["slots"], pool["include_deferred"]) == (1, True)  # as `init` made it from the profile
    run_id = start(client, WIDE_DAG, {"profile": "wide"})

    def states() -> Counter[str]:
        assert client.run_state(WIDE_DAG, run_id) in ("queued", "running")
        return Counter(t.state for t in shards(client, WIDE_DAG, run_id).values())

    wait_until(lambda: sum(states().values()) == WIDE_SHARDS, "60 mapped tasks", RUN_TIMEOUT_S)
    deployment.compose("stop", "worker")  # what a worker has begun ends first, or goes on in the triggerer
    try:
        more = {"pool": WIDE_POOL, "slots": WIDE_SHARDS + 4, "include_deferred": True}
        client.patch(f"pools/{WIDE_POOL}?update_mask=slots", more)
        wait_until(lambda: set(states()) <= {"queued", "success"}, "all to be queued")
        queued = states()["queued"]
        print(f"queued at once, without a worker: {queued} of {WIDE_SHARDS}")
        assert queued > WIDE_SHARDS // 2

        def in_redis() -> int:
            said = deployment.compose("exec", "-T", "redis", "redis-cli", "llen", "default", check=False).strip()
            return int(said) if said.isdigit() else 0

        wait_until(lambda: in_redis() >= queued, "the queue")
        deployment.compose("restart", "redis")
        wait_until(lambda: in_redis() >= queued, "the queue after Redis began anew")
    finally:
        deployment.compose("start", "worker")  # the next test needs it, too

    assert end(client, WIDE_DAG, run_id) == "success"
    done = shards(client, WIDE_DAG, run_id)
    assert sorted(done) == list(range(WIDE_SHARDS))
    assert {t.state for t in done.values()} == {"success"}
    assert {t.try_number for t in done.values()} == {1}
    assert published(deployment, "wide-wide") == list(range(2 * WIDE_SHARDS))
    assert deployment.stack.production_healthy()


def test_an_upgrade_in_the_middle_of_a_run(deployment: Deployment, client: AirflowClient) -> None:
    """A new image while a shard is extracted: the run ends green with the program that it began with; the next run
    ships the new one."""
    old = deployment.bundles()
    assert len(old) == 1
    data = deployment.stack.work.parent / "wide.jsonl"
    run_id = start(client, DAG_ID, {"profile": "compose", "dataset": str(data), "benchmark": "off"})
    wait_until(lambda: bool(published(deployment, "compose-wide")), "the first sample", RUN_TIMEOUT_S)
    assert client.run_state(DAG_ID, run_id) == "running"
    with (deployment.checkout / "include" / "hsx_host" / "__init__.py").open("a") as f:
        f.write("# a newer version\n")
    deployment.compose("build")
    deployment.compose("up", "--detach", "--wait")

    client.login()
    assert end(client, DAG_ID, run_id) == "success"
    assert published(deployment, "compose-wide") == list(range(2 * WIDE_SHARDS))
    assert deployment.bundles() == old
    run_id = start(client, DAG_ID, {"profile": "compose", "dry_run": True})
    assert end(client, DAG_ID, run_id) == "success"
    assert len(deployment.bundles()) == 2
    assert deployment.stack.production_healthy()
