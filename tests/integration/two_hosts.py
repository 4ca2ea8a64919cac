"""Two borrowed hosts on one machine: an SSH server, a home, a port and a production of its own each, one Airflow."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from stands import NOTIFIER_PATH, write_samples

from hsx_demo.components import REPO
from hsx_demo.stack import Stack

DAG = "hsx_extraction__two"
PROFILES = Path(__file__).parent / "profiles"


class TwoHosts:
    """Host ``a`` comes with Airflow; ``b`` is a host alone, with the same settings on another port."""

    def __init__(self, work: Path, python_host: str, model: Path, profiles: Path = PROFILES) -> None:
        data = write_samples(work / "chats.jsonl", seed=11, samples=120, longest=199)
        common = {"python_host": python_host, "model": model, "dataset": data}
        own = {"HSX_PROFILES": str(PROFILES)}
        self.b = Stack(work / "b", output=work / "out", profile="tiny", extra_env=own, **common)  # type: ignore[arg-type]
        self.alerts = work / "alerts.jsonl"
        seen = {"PYTHONPATH": NOTIFIER_PATH, "HSX_TEST_ALERTS": str(self.alerts)}
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

    def published(self, shards: Collection[int] = range(100)) -> list[str]:
        """Manifest lines of the shared data set."""
        files = (self.a.work.parent / "out").glob("two-*/shards/*/manifest.jsonl")
        return [line for f in files if int(f.parent.name) in shards for line in f.read_text().splitlines()]
