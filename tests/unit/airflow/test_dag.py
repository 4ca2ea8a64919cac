"""The DAG as Airflow reads it: no import error, the pool, the retries, setup and teardown, and its Params."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, TriggerRule
from airflow.sdk.definitions.mappedoperator import MappedOperator
from airflow.sdk.exceptions import ParamValidationError

from hsx_operators.base import HostVerbOperator
from hsx_operators.hosts import POOL
from hsx_operators.profile_files import list_profiles
from hsx_operators.retry import HostRetryPolicy
from hsx_operators.sensors import ServerHealthSensor
from hsx_operators.spec import PARAMS

REPO = Path(__file__).resolve().parents[3]
BORROWS = ["acquire", "stop_production", "apply_patch", "start_extraction"]


@pytest.fixture(scope="module")
def dag() -> DAG:
    from airflow.dag_processing.dagbag import DagBag

    bag = DagBag(dag_folder=str(REPO / "dags"))
    assert bag.import_errors == {}
    found: DAG = bag.dags["hsx_extraction"]
    return found


def test_it_serializes(dag: DAG) -> None:
    """The scheduler sees only what serializes: trigger rules, mapped tasks, Params."""
    from airflow.serialization.serialized_objects import DagSerialization

    data = DagSerialization.to_dict(dag)
    assert len(data["dag"]["tasks"]) == len(dag.tasks)


def test_reads_like_the_runbook(dag: DAG) -> None:
    order = [
        "plan", "top_up", "disk_check", "gate", "approve_cleanup", "benchmark_before", *BORROWS, "extraction_healthy",
        "probe", "cleanup_old_states", "extract", "verify", "restore", "production_healthy", "benchmark_after",
        "convert", "handoff", "verdict",
    ]  # fmt: skip
    assert sorted(dag.task_ids) == sorted(order)
    for first, second in itertools.pairwise(order):
        assert second in {t.task_id for t in dag.get_task(first).get_flat_relatives(upstream=False)}, (first, second)
    assert dag.doc_md
    assert dag.max_active_runs == 1
    assert dag.schedule is None
    assert all(t.owner == "hsx" for t in dag.tasks)


def test_every_host_task_shares_the_one_slot_and_retries_by_our_policy(dag: DAG) -> None:
    others = {"gate", "approve_cleanup", "verdict"}
    for task in dag.tasks:
        if task.task_id in others:
            continue
        assert task.pool == POOL, task.task_id
        assert task.pool_slots == 1
        assert task.retries, task.task_id
        assert isinstance(task.retry_policy, HostRetryPolicy), task.task_id
    assert dag.get_task("extract").retries == 5
    assert {t.task_id for t in dag.tasks if isinstance(t, HostVerbOperator | ServerHealthSensor)} | others | {
        "extract"
    } == set(dag.task_ids)


def test_the_host_is_given_back_whatever_happens(dag: DAG) -> None:
    restore, verdict = dag.get_task("restore"), dag.get_task("verdict")
    assert [t.task_id for t in dag.topological_sort() if t.is_setup] == BORROWS
    assert restore.is_teardown
    assert restore.upstream_task_ids == {*BORROWS, "extract", "verify"}
    assert restore.trigger_rule == TriggerRule.ALL_DONE_SETUP_SUCCESS
    assert verdict.is_teardown
    assert verdict.on_failure_fail_dagrun
    assert not verdict.downstream_task_ids
    # all that may still run after the restore is waited for, so that the verdict is the last word
    assert verdict.upstream_task_ids == {"restore", "production_healthy", "benchmark_after", "convert", "handoff"}


def test_nothing_is_deleted_before_the_probe_and_approval_never_holds_the_host(dag: DAG) -> None:
    cleanup, approve = dag.get_task("cleanup_old_states"), dag.get_task("approve_cleanup")
    assert "probe" in cleanup.upstream_task_ids
    assert "acquire" in {t.task_id for t in approve.get_flat_relatives(upstream=False)}


def test_shards_are_mapped_and_named(dag: DAG) -> None:
    extract = dag.get_task("extract")
    assert extract.is_mapped
    assert isinstance(extract, MappedOperator)
    assert extract.partial_kwargs["map_index_template"] == "{{ task.shard['name'] }}"


def test_only_the_gated_last_task_updates_the_asset(dag: DAG) -> None:
    assert {t.task_id: [o.name for o in t.outlets] for t in dag.tasks if t.outlets} == {
        "handoff": ["hsx_hidden_states"]
    }


def test_every_param_is_typed_and_told(dag: DAG) -> None:
    assert set(dag.params) == set(PARAMS)
    for name in dag.params:
        param = dag.params.get_param(name)
        assert param.description, name
        assert {"type", "title", "section"} <= set(param.schema), name
        assert param.has_value, name  # a scheduled DAG needs a default
    assert dag.params.get_param("profile").schema["enum"] == list_profiles()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("profile", "nothing"),
        ("shards", "a-b"),
        ("shards", 3),
        ("formats", ["npz"]),
        ("cleanup_policy", "always"),
        ("benchmark", True),
        ("dry_run", "yes"),
    ],
)
def test_bad_params_are_refused_by_the_form(dag: DAG, name: str, value: Any) -> None:
    with pytest.raises(ParamValidationError):
        dag.params.get_param(name).resolve(value=value)
