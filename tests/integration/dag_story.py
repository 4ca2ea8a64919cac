"""Runs of the whole DAG, and what is asked of them and of the host that they borrow."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hsx_demo import processes
from hsx_demo.client import AirflowClient, Task
from hsx_demo.stack import DAG_ID, Stack

PROFILES = Path(__file__).parent / "profiles"
RUN_TIMEOUT_S = 1500.0


class Run:
    """One run of a DAG and what is asked of it. A task is named by its id, a mapped one ``id.map_index``."""

    def __init__(
        self, client: AirflowClient, conf: dict[str, Any] | None = None, dag_id: str = DAG_ID, run_id: str = ""
    ) -> None:
        self.client, self.dag_id = client, dag_id
        self.id = run_id or client.trigger(dag_id, conf or {})

    def end(self) -> str:
        return self.client.watch(self.dag_id, self.id, timeout_s=RUN_TIMEOUT_S, poll_s=1.0)

    def tasks(self) -> dict[str, Task]:
        found = self.client.tasks(self.dag_id, self.id)
        return {t.task_id if t.map_index < 0 else f"{t.task_id}.{t.map_index}": t for t in found}

    def states(self) -> dict[str, str]:
        return {name: t.state for name, t in self.tasks().items()}

    def log(self, name: str) -> str:
        return "\n".join(self.client.log_lines(self.dag_id, self.id, self.tasks()[name]))

    def xcom(self, task_id: str, key: str = "return_value", map_index: int = -1) -> Any:
        return self.client.xcom(self.dag_id, self.id, task_id, key, map_index)

    def wait(self, name: str, *states: str) -> None:
        """Until a task is in one of these states and the run still goes on."""
        self.until(lambda: self.states().get(name) in states, 0.5)

    def until(self, holds: Callable[[], bool], poll_s: float = 0.02) -> None:
        """Until something holds and the run still goes on."""
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while not holds():
            assert self.client.run_state(self.dag_id, self.id) in ("queued", "running"), self.story()
            assert time.monotonic() < deadline, self.story()
            time.sleep(poll_s)

    def answer(self, task_id: str, choice: str) -> None:
        """Answer as a person: not within the seconds in which the scheduler still learns that the task's worker ended.

        It takes a task for lost that is scheduled again before (as with a trigger: hsx_operators.triggers.SETTLE_S).
        """
        time.sleep(8.0)
        self.client.answer(self.dag_id, self.id, task_id, choice)

    def story(self) -> str:
        """For an assertion that fails: every state, and the log of what failed."""
        failed = [n for n, t in self.tasks().items() if t.state == "failed"]
        return "\n".join([str(self.states()), *(f"--- {n}\n{self.log(n)[-3000:]}" for n in failed)])


def journal(stand: Stack) -> list[str]:
    file = stand.host_dir / "hsx" / "state" / "journal.jsonl"
    return [json.loads(line)["event"] for line in file.read_text().splitlines()] if file.exists() else []


def production_untouched(stand: Stack) -> bool:
    """The very process that the owner started still serves, and hsx never tried to end it."""
    assert stand.production is not None
    return processes.alive(stand.production) and stand.production_healthy() and "stopping server" not in journal(stand)


def manifest(stand: Stack, dataset: str = "chats") -> list[str]:
    assert stand.output is not None
    files = stand.output.glob(f"tiny-{dataset}-*/shards/*/manifest.jsonl")
    return [line for f in files for line in f.read_text().splitlines()]
