"""Two borrowed hosts on one machine: an SSH server, a home, a port and a production of its own each, one Airflow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dag_story import write_chats

from hsx_demo.client import AirflowClient, Task
from hsx_demo.components import REPO
from hsx_demo.stack import Stack

DAG = "hsx_extraction__two"
PROFILES = Path(__file__).parent / "profiles"
PATIENCE_S = 1500.0


class TwoHosts:
    """Host ``a`` comes with Airflow; ``b`` is a host alone, with the same settings on another port."""

    def __init__(self, work: Path, python_host: str, model: Path, profiles: Path = PROFILES) -> None:
        data = write_chats(work / "chats.jsonl", seed=11, longest=199)
        common = {"python_host": python_host, "model": model, "dataset": data}
        own = {"HSX_PROFILES": str(PROFILES)}
        self.b = Stack(work / "b", output=work / "out", profile="tiny", extra_env=own, **common)  # type: ignore[arg-type]
        self.alerts = work / "alerts.jsonl"
        path = os.pathsep.join([*self.b.env["PYTHONPATH"].split(os.pathsep), str(Path(__file__).parent)])
        seen = {"PYTHONPATH": path, "HSX_TEST_ALERTS": str(self.alerts)}  # for the notifier of the tests
        seen |= {"HSX_PROFILES": str(profiles), "HSX_B_HOME": str(self.b.host_dir), "HSX_B_PORT": str(self.b.port)}
        self.a = Stack(work / "a", output=work / "out", profile="two", extra_env=seen, **common)  # type: ignore[arg-type]

    def start(self) -> TwoHosts:
        """Both productions, then Airflow with a connection and a pool a host."""
        for stack in (self.a, self.b):
            stack.start_host()
            stack.launch_production()
        assert self.b.ssh is not None
        self.a.extra_env = {**self.a.extra_env, "AIRFLOW_CONN_HSX_B_HOST": self.b.ssh.connection()}
        airflow = self.a.start_airflow()
        shapes = [sys.executable, "-m", "hsx_operators.shapes"]
        pools = subprocess.run(shapes, env=airflow.env, cwd=REPO, check=True, capture_output=True, text=True).stdout
        (self.a.work / "pools.json").write_text(pools)
        airflow.command("pools", "import", str(self.a.work / "pools.json"))
        airflow.client().unpause(DAG)
        for stack in (self.a, self.b):
            stack.wait_production()
        return self

    def stop(self) -> None:
        """Airflow first, then both hosts."""
        self.a.stop()
        self.b.stop()

    def journal(self, stack: Stack) -> list[str]:
        """What happened on one host."""
        file = stack.host_dir / "hsx" / "state" / "journal.jsonl"
        return [json.loads(line)["event"] for line in file.read_text().splitlines()] if file.exists() else []

    def told(self) -> list[tuple[str, str]]:
        """Subject and text of each alert so far."""
        lines = self.alerts.read_text().splitlines() if self.alerts.exists() else []
        return [(subject, text) for subject, text in map(json.loads, lines)]

    def published(self) -> list[str]:
        """Manifest lines of the shared data set."""
        files = (self.a.work.parent / "out").glob("two-*/shards/*/manifest.jsonl")
        return [line for f in files for line in f.read_text().splitlines()]


class Run:
    """One run of a DAG and what is asked of it."""

    def __init__(
        self, client: AirflowClient, dag_id: str, conf: dict[str, Any] | None = None, run_id: str = ""
    ) -> None:
        self.client, self.dag_id = client, dag_id
        self.id = run_id or client.trigger(dag_id, conf or {})

    def end(self) -> str:
        return self.client.watch(self.dag_id, self.id, timeout_s=PATIENCE_S, poll_s=1.0)

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
        """Until a task of the run is in one of these states."""
        deadline = time.monotonic() + PATIENCE_S
        while self.states().get(name) not in states:
            assert time.monotonic() < deadline, self.story()
            assert self.client.run_state(self.dag_id, self.id) in ("queued", "running"), self.story()
            time.sleep(0.5)

    def story(self) -> str:
        """For an assertion that fails: every state, and the log of what failed."""
        failed = [n for n, t in self.tasks().items() if t.state == "failed"]
        return "\n".join([str(self.states()), *(f"--- {n}\n{self.log(n)[-3000:]}" for n in failed)])
