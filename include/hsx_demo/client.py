"""Airflow's REST API as a person's browser uses it: log in, trigger a run with Params, watch it, read its results."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import requests

from hsx_demo.errors import DemoError

ENDED = frozenset({"success", "failed"})


@dataclass(frozen=True)
class Task:
    """One task instance. ``label`` names a mapped one as the UI does; times are ISO 8601, empty where not reached."""

    task_id: str
    map_index: int
    label: str
    state: str
    try_number: int
    start: str
    end: str
    seconds: float

    @property
    def name(self) -> str:
        """``extract [shard-00001]``; a task that is not mapped is its id."""
        return f"{self.task_id} [{self.label}]" if self.map_index >= 0 else self.task_id


class AirflowClient:
    """One login to one Airflow.

    :param url: the api-server, without a path.
    :param timeout_s: for one request.
    """

    def __init__(self, url: str, user: str, password: str, *, timeout_s: float = 60.0) -> None:
        self.url, self._login, self._timeout_s = url.rstrip("/"), (user, password), timeout_s
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy of this machine has no business with the loopback

    def login(self) -> None:
        """Get a token; needed once, and again after a day."""
        user, password = self._login
        body = {"username": user, "password": password}
        answer = self._session.post(f"{self.url}/auth/token", json=body, timeout=self._timeout_s)
        _check(answer, "the login")
        self._session.headers["Authorization"] = f"Bearer {answer.json()['access_token']}"

    def get(self, path: str, **query: Any) -> Any:
        """GET ``/api/v2/<path>``; a busy api-server is asked again."""
        return self._get(f"api/v2/{path}", query)

    def page(self, **query: Any) -> Any:
        """What the page "Hidden states" shows, ``dag`` and ``run`` chosen by ``query``."""
        return self._get("hsx/api/overview", query)

    def _get(self, path: str, query: Mapping[str, Any]) -> Any:
        for again in (True, True, False):
            try:
                answer = self._session.get(f"{self.url}/{path}", params=query, timeout=self._timeout_s)
            except (requests.ConnectionError, requests.Timeout):
                if not again:
                    raise
            else:
                if answer.status_code < 500 or not again:
                    _check(answer, f"GET {path}")
                    return answer.json()
            time.sleep(1.0)
        raise AssertionError

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """POST ``/api/v2/<path>``."""
        answer = self._session.post(f"{self.url}/api/v2/{path}", json=dict(body), timeout=self._timeout_s)
        _check(answer, f"POST {path}")
        return answer.json()

    def patch(self, path: str, body: Mapping[str, Any]) -> Any:
        """PATCH ``/api/v2/<path>``."""
        answer = self._session.patch(f"{self.url}/api/v2/{path}", json=dict(body), timeout=self._timeout_s)
        _check(answer, f"PATCH {path}")
        return answer.json()

    # ------------------------------------------------------------------ health, DAGs, runs

    def unhealthy(self) -> list[str]:
        """Components that don't report health, all of them while the api-server is silent."""
        parts = ["metadatabase", "scheduler", "triggerer", "dag_processor"]
        try:
            answer = self._session.get(f"{self.url}/api/v2/monitor/health", timeout=10)
            body = answer.json() if answer.ok else {}
        except (requests.RequestException, ValueError):
            return ["api-server"]
        return [p for p in parts if (body.get(p) or {}).get("status") != "healthy"]

    def import_errors(self) -> list[str]:
        """Why DAG files don't load, if any doesn't."""
        return [e["stack_trace"] for e in self.get("importErrors")["import_errors"]]

    def has_dag(self, dag_id: str) -> bool:
        """Whether the dag-processor has read it."""
        return any(d["dag_id"] == dag_id for d in self.get("dags", limit=100)["dags"])

    def unpause(self, dag_id: str) -> None:
        """Let runs of the DAG be scheduled."""
        self.patch(f"dags/{dag_id}?update_mask=is_paused", {"is_paused": False})

    def trigger(self, dag_id: str, conf: Mapping[str, Any] | None = None, run_id: str | None = None) -> str:
        """Start a run, as the trigger form does; its run id."""
        body: dict[str, Any] = {"logical_date": None, "conf": dict(conf or {})}
        if run_id:
            body["dag_run_id"] = run_id
        return str(self.post(f"dags/{dag_id}/dagRuns", body)["dag_run_id"])

    def wait_for_run(self, dag_id: str, timeout_s: float = 300.0) -> str:
        """The newest run of a DAG that something else starts; DemoError where none comes in time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            runs = self.get(f"dags/{quote(dag_id)}/dagRuns", order_by="-run_after", limit=1)["dag_runs"]
            if runs:
                return str(runs[0]["dag_run_id"])
            time.sleep(1.0)
        raise DemoError(f"no run of {dag_id} was started within {timeout_s:.0f} s")

    def run_state(self, dag_id: str, run_id: str) -> str:
        """queued, running, success or failed."""
        return str(self.get(_run(dag_id, run_id))["state"])

    def tasks(self, dag_id: str, run_id: str) -> list[Task]:
        """All task instances of a run."""
        body = self.get(f"{_run(dag_id, run_id)}/taskInstances", limit=500)
        return [_task(t) for t in body["task_instances"]]

    def watch(
        self,
        dag_id: str,
        run_id: str,
        *,
        turned: Callable[[Task], None] | None = None,
        timeout_s: float,
        poll_s: float = 2.0,
    ) -> str:
        """Wait for a run's end; ``turned`` is told of each task that got another state. The run's state."""
        seen: dict[tuple[str, int], str] = {}
        deadline = time.monotonic() + timeout_s
        while True:
            state = self.run_state(dag_id, run_id)
            for task in self.tasks(dag_id, run_id):
                key = (task.task_id, task.map_index)
                if task.state and seen.get(key) != task.state:
                    seen[key] = task.state
                    if turned:
                        turned(task)
            if state in ENDED:
                return state
            if time.monotonic() > deadline:
                raise DemoError(f"run {run_id} has not ended after {timeout_s:.0f} s (it is {state})")
            time.sleep(poll_s)

    def clear(
        self, dag_id: str, run_id: str, tasks: list[str | tuple[str, int]], *, only_failed: bool = True, **options: Any
    ) -> list[str]:
        """Clear tasks (a mapped one as ``(id, index)``); the ids of what was cleared.

        :param options: ``include_downstream`` and the like, as the API names them.
        """
        body = {
            "dag_run_id": run_id,
            "task_ids": [list(t) if isinstance(t, tuple) else t for t in tasks],
            "dry_run": False,
            "only_failed": only_failed,
            "reset_dag_runs": True,
            **options,
        }
        return [t["task_id"] for t in self.post(f"dags/{dag_id}/clearTaskInstances", body)["task_instances"]]

    def answer(self, dag_id: str, run_id: str, task_id: str, choice: str) -> None:
        """Answer an approval, as the UI's "Required actions" does."""
        path = f"{_run(dag_id, run_id)}/taskInstances/{task_id}/-1/hitlDetails"
        self.patch(path, {"chosen_options": [choice], "params_input": {}})

    def set_run_state(self, dag_id: str, run_id: str, state: str) -> None:
        """Mark a run, as the UI's button does."""
        self.patch(_run(dag_id, run_id), {"state": state})

    # ------------------------------------------------------------------ results

    def xcom(self, dag_id: str, run_id: str, task_id: str, key: str = "return_value", map_index: int = -1) -> Any:
        """One result of a task, None where it left none."""
        path = f"{_run(dag_id, run_id)}/taskInstances/{task_id}/xcomEntries/{key}"
        query: dict[str, str | int] = {"map_index": map_index, "deserialize": "false", "stringify": "false"}
        answer = self._session.get(f"{self.url}/api/v2/{path}", params=query, timeout=self._timeout_s)
        if answer.status_code == 404:
            return None
        _check(answer, f"GET {path}")
        value = answer.json()["value"]
        if isinstance(value, str):
            try:
                return json.loads(value)
            except ValueError:
                return value
        return value

    def log_lines(self, dag_id: str, run_id: str, task: Task) -> Iterator[str]:
        """A task's log of its last try, one text a line."""
        path = f"{_run(dag_id, run_id)}/taskInstances/{task.task_id}/logs/{max(1, task.try_number)}"
        body = self.get(path, map_index=task.map_index, full_content="true")
        for event in body["content"]:
            if isinstance(event, str):
                yield event
                continue
            yield f"{event.get('level', ''):>8} {event.get('event', '')}"
            for error in event.get("error_detail") or []:
                yield f"         {error.get('exc_type', '')}: {error.get('exc_value', '')}"


def _run(dag_id: str, run_id: str) -> str:
    return f"dags/{quote(dag_id, safe='')}/dagRuns/{quote(run_id, safe='')}"


def _task(body: Mapping[str, Any]) -> Task:
    return Task(
        task_id=body["task_id"],
        map_index=int(body["map_index"]),
        label=str(body.get("rendered_map_index") or body["map_index"]),
        state=body["state"] or "",
        try_number=int(body["try_number"]),
        start=body["start_date"] or "",
        end=body["end_date"] or "",
        seconds=float(body["duration"] or 0.0),
    )


def _check(answer: requests.Response, what: str) -> None:
    if not answer.ok:
        raise DemoError(f"Airflow refuses {what}: HTTP {answer.status_code} {answer.text[:500]}")
