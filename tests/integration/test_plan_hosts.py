"""``plan`` over several hosts, on two real SSH servers: each is prepared, one plans, the shards are spread, and a host
that is away, or sees other files, is left out with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from airflow.sdk.exceptions import TaskDeferred
from test_operators import Store, wait_for

from hsx_demo.sshd import SshServer, start_sshd
from hsx_operators.base import run_key
from hsx_operators.errors import HostUnreachable
from hsx_operators.hook import hook_of
from hsx_operators.plan import PlanOperator

CONNS = ("hsx_test_host", "hsx_test_second")


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    """Another host's door."""
    server = start_sshd(tmp_path_factory.mktemp("second"))
    yield server
    server.stop()


@pytest.fixture
def profile(tmp_path: Path, tiny_model: Path, host_python: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two hosts without production; change it and write it with ``plan``."""
    monkeypatch.setenv("HSX_PROFILES", str(tmp_path))
    rows = [{"input_ids": [5 + i] * (10 + i), "loss_mask": [1] * (10 + i)} for i in range(8)]
    (tmp_path / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {"python": host_python, "output_root": str(tmp_path / "out put")}
    return {
        "hosts": [
            {**common, "name": name, "ssh_conn_id": conn, "home": str(tmp_path / f"home {name}")}
            for name, conn in zip("ab", CONNS, strict=True)
        ],
        "model": {"path": str(tiny_model)},
        "production": {"port": 24998},
        "extraction": {"flags": {"disable-radix-cache": True, "disable-cuda-graph": True}},
        "capture": {"layers": [1, 4, 6], "formats": ["speculators_v1"]},
        "data": {"path": str(tmp_path / "set.jsonl"), "shard_size": 2},
    }


@pytest.fixture
def connected(connection: Callable[..., None], second: SshServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both connections."""
    monkeypatch.setenv(f"AIRFLOW_CONN_{CONNS[1].upper()}", second.connection())


def plan(folder: Path, profile: dict[str, Any], **params: Any) -> dict[str, Any]:
    """Write the profile and run ``plan`` to its end; its XComs."""
    (folder / "fleet.yaml").write_text(yaml.safe_dump(profile))
    pushed: dict[str, Any] = {}
    ti = SimpleNamespace(
        dag_id="d", run_id="r", task_id="plan", map_index=-1, try_number=1, dag_version_id="v",
        xcom_pull=lambda task_ids, key: pushed.get(key), xcom_push=lambda key, value: pushed.update({key: value}),
    )  # fmt: skip
    run = SimpleNamespace(conf={}, run_type="manual", run_after=None, clear_number=0)
    context: Any = {
        "ti": ti,
        "task_state_store": Store(),
        "params": {"profile": "fleet", **params},
        "dag_run": run,
    }
    operator = PlanOperator(task_id="plan", hosts=["a", "b"])
    try:
        operator.execute(context)
    except TaskDeferred as deferred:
        operator.execute_complete(context, wait_for(deferred), **(deferred.kwargs or {}))
    return pushed


def test_each_host_is_prepared_and_has_its_share(tmp_path: Path, profile: dict[str, Any], connected: None) -> None:
    told = plan(tmp_path, profile)
    assert {host: [s["id"] for s in share] for host, share in told["shares"].items()} == {"a": [0, 3], "b": [1, 2]}
    assert told["run"]["ssh_conn_id"] == CONNS[0]
    for name, conn in zip("ab", CONNS, strict=True):
        run = told[run_key(name)]
        assert (run["ssh_conn_id"], run["home"]) == (conn, str(tmp_path / f"home {name}"))
        with hook_of(run) as hook:
            assert hook.read_file(run["spec_path"])
            assert hook.read_file(f"{run['bundle_dir']}/hsx_host/contract/told.py")
    assert plan(tmp_path, profile, shards="2")["shares"] == {"a": [told["shares"]["b"][1]], "b": []}


def test_a_host_that_is_away_is_left_out(
    tmp_path: Path, profile: dict[str, Any], connected: None, second: SshServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"AIRFLOW_CONN_{CONNS[1].upper()}", second.connection(port=9))
    told = plan(tmp_path, profile)
    assert [s["id"] for s in told["shares"]["a"]] == [0, 1, 2, 3]
    assert "b" not in told["shares"]
    assert "can't be reached" in told["run_b"]["problem"]


def test_where_no_host_answers_plan_fails(
    tmp_path: Path, profile: dict[str, Any], connection: Callable[..., None], second: SshServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    connection(port=9)
    monkeypatch.setenv(f"AIRFLOW_CONN_{CONNS[1].upper()}", second.connection(port=9))
    with pytest.raises(HostUnreachable):
        plan(tmp_path, profile)


def test_the_first_host_away_another_plans(
    tmp_path: Path, profile: dict[str, Any], connected: None, connection: Callable[..., None]
) -> None:
    connection(port=9)
    told = plan(tmp_path, profile)
    assert list(told["shares"]) == ["b"]
    assert told["run"]["ssh_conn_id"] == CONNS[1]


def test_a_host_with_other_files_is_left_out(tmp_path: Path, profile: dict[str, Any], connected: None) -> None:
    profile["hosts"][1]["output_root"] = str(tmp_path / "elsewhere")
    told = plan(tmp_path, profile)
    assert list(told["shares"]) == ["a"]
    assert "does not hold the data set" in told["run_b"]["problem"]
    # a dry run writes nothing, so that nothing can be compared
    assert set(plan(tmp_path, profile, dry_run=True)["shares"]) == {"a", "b"}
