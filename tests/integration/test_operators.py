"""The base operator on a real host: one job a try, found again after a lost worker, ended when the task is."""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import TaskDeferred

from hsx_host import contract as c
from hsx_operators import errors as e
from hsx_operators.base import HostVerbOperator, job_name
from hsx_operators.extraction import ExtractShardOperator
from hsx_operators.hook import GpuHostHook
from hsx_operators.published import TRIES


class Waits(HostVerbOperator):
    """A verb that waits for the transition lock, which the test holds."""

    result_type = c.PatchReport
    patience_s = 0.0

    def verb(self, context: Any) -> list[str]:
        return ["patch", "revert"]


class Store(dict[str, Any]):
    """The task state store's methods that are used, over a dict."""

    def set(self, key: str, value: Any) -> None:
        self[key] = value

    def delete(self, key: str) -> None:
        self.pop(key, None)


def context_of(
    host: dict[str, Any], store: Store, try_number: int = 1, map_index: int = -1, *, max_tries: int = 4
) -> Any:
    """:param max_tries: 4, the task's retries, and more after each clear."""
    ti = SimpleNamespace(
        dag_id="d", run_id="r", task_id="waits", map_index=map_index, try_number=try_number, max_tries=max_tries,
        xcom_pull=lambda task_ids, key: host, xcom_push=lambda key, value: None,
    )  # fmt: skip
    return {"ti": ti, "task_state_store": store, "task": SimpleNamespace(retries=4)}


@contextmanager
def transition_held(home: Path) -> Iterator[None]:
    lock = home / "state" / "lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def submit(operator: HostVerbOperator, context: Any) -> TaskDeferred:
    with pytest.raises(TaskDeferred) as deferred:
        operator.run_verb(context)
    return deferred.value


def wait_for(deferred: TaskDeferred) -> dict[str, Any]:
    async def first() -> dict[str, Any]:
        async for event in deferred.trigger.run():
            payload: dict[str, Any] = event.payload
            return payload
        raise AssertionError

    return asyncio.run(asyncio.wait_for(first(), 60))


def test_a_lost_worker_s_job_is_found_again_and_an_ended_one_is_not(
    hook: GpuHostHook, host: dict[str, Any], home: Path
) -> None:
    store, operator = Store(), Waits(task_id="waits")
    with transition_held(home):
        first = submit(operator, context_of(host, store))
        pid = hook.job_poll(first.trigger.job_id, spec_path=host["spec_path"]).pid
        # the worker is lost here; the next try meets the same job
        second = submit(operator, context_of(host, store, try_number=2))
        assert second.trigger.job_id == first.trigger.job_id
        assert hook.job_poll(second.trigger.job_id, spec_path=host["spec_path"]).pid == pid
    event = wait_for(second)
    context = context_of(host, store, try_number=2)
    report = operator.execute_complete(context, event, **(second.kwargs or {}))
    assert report["pristine"] is True
    assert store == {}
    # cleared in the UI: the verb runs again, as a job of its own; one that takes seconds ends without a trigger
    operator.patience_s = 30.0  # type: ignore[misc]
    report = operator.run_verb(context_of(host, store, try_number=3))
    assert report["pristine"] is True
    assert store == {}
    assert len(list((home / "jobs").iterdir())) == 2


def test_a_job_that_was_ended_with_its_task_is_not_the_next_try_s(
    hook: GpuHostHook, host: dict[str, Any], home: Path
) -> None:
    """Marked by a person while it waited, then cleared: the trigger has ended the job, and nobody could say so in the
    task state store."""
    store, operator = Store(), Waits(task_id="waits")
    with transition_held(home):
        first = submit(operator, context_of(host, store))
        hook.job_kill(first.trigger.job_id, spec_path=host["spec_path"], grace_s=2.0)
        second = submit(operator, context_of(host, store, try_number=2, max_tries=5))
        assert second.trigger.job_id != first.trigger.job_id
        assert store["job_id"] == second.trigger.job_id
    assert wait_for(second)["rc"] == 0


@pytest.mark.parametrize(("max_tries", "again"), [(4, False), (5, True)], ids=["retried", "cleared"])
def test_a_job_that_ended_unseen_counts_for_a_retry_and_not_for_a_clear(
    hook: GpuHostHook, host: dict[str, Any], home: Path, max_tries: int, again: bool
) -> None:
    """An outage hid its end. The host may have been given back since, when a person clears the task days later."""
    store, operator = Store(), Waits(task_id="waits")
    with transition_held(home):
        first = submit(operator, context_of(host, store))
    assert wait_for(first)["rc"] == 0
    operator.patience_s = 30.0  # type: ignore[misc]
    assert operator.run_verb(context_of(host, store, try_number=2, max_tries=max_tries))["pristine"] is True
    assert len(list((home / "jobs").iterdir())) == (2 if again else 1)
    assert store == {}


def test_an_outage_leaves_the_job_to_the_next_try(host: dict[str, Any]) -> None:
    store, operator = Store(job_id="waits-x-1"), Waits(task_id="waits")
    event = {"end": "error", "error": "HostUnreachable", "message": "gone", "log_tail": ""}
    with pytest.raises(e.HostUnreachable, match="gone"):
        operator.execute_complete(context_of(host, store), event, host=host, job_id="waits-x-1", verb=["patch"])
    assert store["job_id"] == "waits-x-1"
    assert [(t["try"], t["error"], t["message"]) for t in store[TRIES]] == [(1, "HostUnreachable", "gone")]


def test_ending_the_task_ends_the_job(hook: GpuHostHook, host: dict[str, Any], home: Path) -> None:
    operator = Waits(task_id="waits")
    with transition_held(home):
        deferred = submit(operator, context_of(host, Store()))
        operator.on_kill()
        status = hook.job_poll(deferred.trigger.job_id, spec_path=host["spec_path"])
    assert status.state == "done"
    assert status.rc != 0


@pytest.mark.parametrize(
    ("end", "cls", "allowed"),
    [
        ({"end": "died", "log_tail": "last words"}, e.RemoteJobDied, 0),
        ({"end": "deadline", "log_tail": ""}, e.RemoteJobDied, 0),
        ({"end": "done", "rc": 137, "document": "", "log_tail": ""}, e.RemoteJobDied, 0),
        ({"end": "done", "rc": 75, "document": "server died", "log_tail": ""}, e.HostTryAgain, 0),
        ({"end": "error", "error": "HostUnreachable", "message": "m", "log_tail": ""}, e.HostUnreachable, None),
    ],
)
def test_a_shard_carries_the_retries_that_its_profile_allows(
    end: dict[str, Any], cls: type[e.HostError], allowed: int | None
) -> None:
    if end.get("document"):
        end = {**end, "document": c.encode(c.ErrorDoc(kind="again", message=end["document"]))}
    operator = ExtractShardOperator(task_id="extract", shard={"id": 3, "name": "shard-00003"})
    host = {"python": "/p", "shard_retries": 0, "ssh_conn_id": "h"}
    with pytest.raises(cls) as said:
        operator.execute_complete(context_of(host, Store()), end, host=host, job_id="j", verb=["extract"])
    assert type(said.value) is cls
    assert said.value.allowed_retries == allowed


def test_job_names_are_readable_and_differ_where_they_must() -> None:
    def name(map_index: int = -1, try_number: int = 1, spec: str = "/s") -> str:
        return job_name(context_of({}, Store(), try_number, map_index), spec)

    assert name(map_index=3).startswith("waits-3-")
    assert name() == name()
    assert len({name(), name(map_index=0), name(map_index=1), name(try_number=2), name(spec="/t")}) == 5
