"""What plan decides once for a run: its name on the host, and that Airflow can map over its shards."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from hsx_host import contract as c
from hsx_operators.base import host_run_id
from hsx_operators.errors import ConfigError
from hsx_operators.plan import tell_plan

NIGHT = "scheduled__2026-11-30T01:00:00+00:00"
VERSIONS = ("0199c0de-0000-7000-8000-000000000001", "0199c0de-0000-7000-8000-000000000002")


class Store(dict[str, Any]):
    """The task state store: lives through retries and clears."""

    set = dict.__setitem__


def context(dag_id: str = "hsx_extraction__kimi", version: str = VERSIONS[0], store: Store | None = None) -> Any:
    ti = SimpleNamespace(dag_id=dag_id, run_id=NIGHT, dag_version_id=version)
    return {"ti": ti, "task_state_store": Store() if store is None else store}


def test_nights_of_one_minute_are_different_runs_on_the_host() -> None:
    mine = host_run_id(context())
    assert mine != host_run_id(context(dag_id="hsx_extraction__llama"))  # another profile of the same host
    assert mine != host_run_id(context(version=VERSIONS[1]))  # another Airflow
    assert mine == host_run_id(context())
    assert f"hsx_extraction__kimi/{NIGHT}" in mine  # a person finds the run in Airflow by it


def test_another_base_url_is_another_airflow(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = host_run_id(context())
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "https://airflow.test")
    assert mine != host_run_id(context())  # a copy of the other one's database


def test_a_plan_that_is_done_again_keeps_the_run_s_name() -> None:
    store = Store()
    first = host_run_id(context(store=store))
    assert host_run_id(context(version=VERSIONS[1], store=store)) == first  # cleared after the DAG has changed


def planned(shards: int) -> c.PlanResult:
    made = [c.ShardPlan(i, f"shard {i:05d}", i * 500, 500, 500, 9000, 1 << 20) for i in range(shards)]
    known: dict[str, Any] = dict.fromkeys(
        ("valid", "rejected", "duplicates", "done", "todo", "todo_tokens", "todo_bytes", "bytes_per_token", "longest"),
        1,
    )
    return c.PlanResult(dataset_id="set", dataset_dir="/d", rows=shards * 500, shards=made, rejects=[], **known)


def test_more_shards_than_airflow_maps_over_are_refused_before_the_host_is_borrowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pushed: dict[str, Any] = {}
    ti = SimpleNamespace(xcom_push=lambda key, value: pushed.update({key: value}))
    tell_plan(planned(1024), ti, logging.getLogger("test"))
    assert len(pushed.pop("shards")) == 1024
    pushed.clear()
    with pytest.raises(ConfigError) as e:
        tell_plan(planned(1025), ti, logging.getLogger("test"))
    assert (e.value.field, e.value.value, pushed) == ("data.shard_size", "500", {})
    assert "1,025 shards" in str(e.value)
    assert "AIRFLOW__CORE__MAX_MAP_LENGTH to 1025" in e.value.fix
    assert "shard_size to 501 or more" in e.value.fix
    assert "such as 0-1023" in e.value.fix
    monkeypatch.setenv("AIRFLOW__CORE__MAX_MAP_LENGTH", "1025")
    tell_plan(planned(1025), ti, logging.getLogger("test"))
