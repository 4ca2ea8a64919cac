"""One run of the whole DAG on a stand of its own (fixtures ``stand`` and ``client``), and what is asked of it."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

from hsx_demo import processes
from hsx_demo.client import AirflowClient, Task
from hsx_demo.stack import DAG_ID, Stack

PROFILES = Path(__file__).parent / "profiles"
RUN_TIMEOUT_S = 900.0


def write_chats(path: Path, seed: int, samples: int = 120, longest: int = 399) -> Path:
    """Samples of 20 to ``longest`` random tokens."""
    rng = random.Random(seed)
    with path.open("w") as f:
        for _ in range(samples):
            n = rng.randint(20, longest)
            f.write(json.dumps({"input_ids": [rng.randrange(4, 512) for _ in range(n)], "loss_mask": [1] * n}) + "\n")
    return path


class Run:
    """One run of the DAG and what is asked of it."""

    def __init__(self, client: AirflowClient, conf: dict[str, Any]) -> None:
        self.client = client
        self.id = client.trigger(DAG_ID, conf)

    def end(self) -> str:
        return self.client.watch(DAG_ID, self.id, timeout_s=RUN_TIMEOUT_S, poll_s=1.0)

    def tasks(self) -> dict[str, Task]:
        return {
            t.task_id if t.map_index < 0 else f"{t.task_id}.{t.map_index}": t
            for t in self.client.tasks(DAG_ID, self.id)
        }

    def states(self) -> dict[str, str]:
        return {name: t.state for name, t in self.tasks().items()}

    def log(self, name: str) -> str:
        return "\n".join(self.client.log_lines(DAG_ID, self.id, self.tasks()[name]))

    def xcom(self, task_id: str, map_index: int = -1) -> Any:
        return self.client.xcom(DAG_ID, self.id, task_id, map_index=map_index)

    def wait_published(self, stand: Stack, count: int, dataset: str) -> None:
        """Until ``count`` samples of a data set are published and the run still goes on."""
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while len(manifest(stand, dataset)) < count:
            assert self.client.run_state(DAG_ID, self.id) in ("queued", "running"), self.story()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def wait_state(self, task_id: str, state: str) -> None:
        """Until a task stands in ``state`` and the run still goes on."""
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while self.states().get(task_id) != state:
            assert self.client.run_state(DAG_ID, self.id) in ("queued", "running"), self.story()
            assert time.monotonic() < deadline
            time.sleep(0.5)

    def answer(self, task_id: str, choice: str) -> None:
        """Answer as a person: not within the seconds in which the scheduler still learns that the task's worker ended.

        It takes a task for lost that is scheduled again before (as with a trigger: hsx_operators.triggers.SETTLE_S).
        """
        time.sleep(8.0)
        self.client.answer(DAG_ID, self.id, task_id, choice)

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
