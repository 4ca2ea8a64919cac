"""What must hold of every DAG of the package, in each shape that profiles give it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from airflow.sdk import DAG
from airflow.serialization.serialized_objects import DagSerialization
from fleet_profile import REPO, body, dag_bag, write

from hsx_operators.alerts import ProductionAlarm
from hsx_operators.hosts import POOL

#: Tasks that touch no host: they decide, wait for a person, or run where the trainer is.
OFF_HOST = {"gate", "approve_cleanup", "share", "reassign", "verdict"}


@pytest.fixture(scope="module")
def dags(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DAG]:
    """Every DAG, with profiles of one host with nights, of three hosts, and one that can't be read."""
    folder = tmp_path_factory.mktemp("profiles")
    three = body()
    three["hosts"] = [{**three["hosts"][0], "name": name, "ssh_conn_id": name} for name in ("gpu1", "gpu2", "gpu3")]
    one = body(nightly={"schedule": "0 1 * * *", "timezone": "Europe/Berlin", "stop_after": "05:00"})
    one["host"] = {k: v for k, v in one.pop("hosts")[0].items() if k != "name"}
    for name, document in (("three", three), ("one", one), ("broken", "hosts: 7")):
        write(folder, name, document)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HSX_PROFILES", str(folder))
        return dict(dag_bag().dags)  # which has no import error


@pytest.fixture(scope="module")
def extractions(dags: dict[str, DAG]) -> dict[str, DAG]:
    found = {name: dag for name, dag in dags.items() if name.startswith("hsx_extraction")}
    assert set(found) == {"hsx_extraction", *(f"hsx_extraction__{n}" for n in ("one", "three", "broken"))}
    return found


def test_every_dag_is_told_owned_and_serializes(dags: dict[str, DAG]) -> None:
    for name, dag in dags.items():
        assert dag.doc_md, name
        assert dag.description, name
        assert "hsx" in dag.tags, name
        assert not dag.catchup, name
        assert dag.max_active_runs == 1, name
        assert all(t.owner == "hsx" for t in dag.tasks), name
        data = json.loads(json.dumps(DagSerialization.to_dict(dag)))
        assert len(data["dag"]["tasks"]) == len(dag.tasks), name


def test_the_form_triggers_as_it_stands(dags: dict[str, DAG]) -> None:
    """Airflow's form won't trigger while a field is empty whose type does not take null."""
    for name, dag in dags.items():
        for key in dag.params:
            param = dag.params.get_param(key)
            assert param.value not in ("", []) or "null" in param.schema["type"], (name, key)


def test_every_task_has_a_time_limit_and_every_host_task_retries(dags: dict[str, DAG]) -> None:
    for name, dag in dags.items():
        for task in dag.tasks:
            assert task.execution_timeout is not None, (name, task.task_id)
    for name in (n for n in dags if n.startswith("hsx_extraction")):
        for task in dags[name].tasks:
            if task.task_id.rpartition(".")[2] not in OFF_HOST:
                assert task.retries, (name, task.task_id)


def test_every_host_task_is_in_its_hosts_pool(extractions: dict[str, DAG]) -> None:
    for name, dag in extractions.items():
        for task in dag.tasks:
            *groups, last = task.task_id.split(".")
            if last in OFF_HOST:
                continue
            host = groups[-1] if groups else "gpu1"  # plan, disk check and hand-off take the first host's
            wanted = f"{POOL}_{host}" if name.endswith("__three") else POOL
            assert task.pool == wanted, (name, task.task_id)
            assert task.pool_slots == 1


def test_giving_back_goes_first_and_is_a_teardown(extractions: dict[str, DAG]) -> None:
    for dag in extractions.values():
        restores = [t for t in dag.tasks if t.task_id.endswith("restore")]
        assert len(restores) == (6 if len(dag.tasks) > 50 else 1)
        for task in restores:
            assert task.is_teardown
            assert task.weight_rule.total_weight if hasattr(task.weight_rule, "total_weight") else task.weight_rule
            assert task.priority_weight > 1000 * len(dag.tasks)  # beyond what weights of others sum up to
            assert any(isinstance(a, ProductionAlarm) for a in task.on_failure_callback)
        assert dag.get_task("verdict").on_failure_fail_dagrun


def test_nights_have_the_profiles_clock(extractions: dict[str, DAG]) -> None:
    import pendulum
    from airflow.timetables.base import TimeRestriction

    assert extractions["hsx_extraction"].schedule is None
    assert extractions["hsx_extraction__broken"].schedule is None
    dag = extractions["hsx_extraction__one"]
    assert dag.start_date is None  # with one, the night before is made up for when the DAG is unpaused at noon
    served = DagSerialization.from_dict(DagSerialization.to_dict(dag))
    info = served.timetable.next_dagrun_info(
        last_automated_data_interval=None,
        restriction=TimeRestriction(earliest=None, latest=None, catchup=False),
    )
    assert info is not None
    now, gap = pendulum.now("UTC"), pendulum.duration(hours=2.5)
    assert info.run_after > now - gap
    assert info.run_after.in_timezone("Europe/Berlin").hour == 1


WATCH = """
import sys
from pathlib import Path
import airflow.sdk, airflow.providers.ssh.hooks.ssh, airflow.providers.standard.operators.hitl
import airflow.providers.standard.utils.skipmixin, asyncssh, yaml, pydantic, croniter, zoneinfo
sys.path.insert(0, sys.argv[1])
seen, watching = [], True

def hook(event, args):
    if watching and event in ("open", "socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system"):
        seen.append((event, str(args[0]), repr(sys._getframe(1))))

sys.addaudithook(hook)
import time
t = time.process_time()
import hsx_extraction
took, watching = time.process_time() - t, False
import json
print(json.dumps([took, seen, "torch" in sys.modules]))
"""


def test_parsing_reads_nothing_but_profiles(tmp_path: Path) -> None:
    """Airflow's and libraries' own imports apart. With ``-s`` it says the CPU seconds, which should stay under one."""
    for i in range(3):
        write(tmp_path, f"fleet{i}", body(nightly={"schedule": "0 1 * * *"}))
    env = {**os.environ, "HSX_PROFILES": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", WATCH, str(REPO / "dags")],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    took, seen, torch = json.loads(done.stdout.strip().splitlines()[-1])
    code = (".py", ".pyc", "/zoneinfo", "METADATA", "entry_points.txt", "tzdata")
    zones = "/usr/share/zoneinfo"
    strange = [
        (event, what, frame)
        for event, what, frame in seen
        if event != "open" or not (what.endswith((*code, ".yaml")) or ".cpython-" in what or what.startswith(zones))
    ]
    assert strange == []
    assert not torch
    print(f"parsing took {took:.2f} CPU seconds")
