"""README's commands, run in a copy of the checkout: what a person types works, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from hsx_demo.client import AirflowClient
from hsx_demo.processes import with_variable
from hsx_demo.stack import DAG_ID, TOKEN

REPO = Path(__file__).resolve().parents[2]
TIMEOUT_S = 1500

#: The one command that no test runs: it is the one that runs the tests.
RUNS_THIS = {"make test"}


def commands(text: str) -> list[str]:
    """The lines of all fenced bash blocks, in order."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, flags=re.S | re.M)
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout as it stands, without what was made in it."""
    copy = tmp_path_factory.mktemp("clone") / "hsx"
    shutil.copytree(REPO, copy, ignore=shutil.ignore_patterns(".git", "build", "__pycache__", ".*_cache"))
    return copy


def make(checkout: Path, command: str, **env: str) -> str:
    """Run a README line with the environments that the tests run in; its output."""
    words = command.split()
    assert words[0] == "make", f"README tells {command!r}, and this test knows how to run make only"
    # As from a person's shell, also where these tests run below a make themselves.
    rooms = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("AIRFLOW_", "HSX_DEMO_", "PYTHONPATH", "MAKE", "MFLAGS"))
    }
    kept = {k: os.environ[k] for k in ("AIRFLOW_PYTHON", "HSX_DEMO_MODEL") if k in os.environ}
    done = subprocess.run(
        words,
        cwd=checkout,
        env={**rooms, **kept, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout[-6000:]}"
    return done.stdout


def test_every_command_of_the_readme_is_run_here() -> None:
    told = set(commands((REPO / "README.md").read_text()))
    tested = {"make demo", "make up", "make down", "make help"} | RUNS_THIS
    assert told == tested


def test_help_names_every_target(checkout: Path) -> None:
    told = make(checkout, "make help")
    documented = re.findall(r"^([a-z-]+):.*##", (checkout / "Makefile").read_text(), flags=re.M)
    assert {line.split()[0] for line in told.splitlines()} == set(documented)
    assert {"demo", "up", "down", "test", "lint"} <= set(documented)


def test_demo_is_green_and_leaves_the_data_set_and_nothing_running(checkout: Path, tmp_path: Path) -> None:
    told = make(checkout, "make demo", HSX_DEMO_OUTPUT=str(tmp_path / "out"))
    assert re.search(r"^run \S+: success$", told, flags=re.M), told[-3000:]
    [handoff_file] = (tmp_path / "out").glob("*/handoff.json")
    handoff = json.loads(handoff_file.read_text())
    rows = len(Path(dataset_of(told)).read_text().splitlines())
    assert rows >= 32
    assert handoff["samples"] == rows, "every sample is in the data set"
    states = "success|failed|skipped|upstream_failed"
    stages = dict(re.findall(rf"^  (\S+)(?: \[[^\]]+\])?\s+({states})\s", told, flags=re.M))
    assert {"plan", "probe", "extract", "verify", "restore", "handoff", "verdict"} <= stages.keys()
    assert set(stages.values()) == {"success"}
    assert "proved by their next token" in told
    assert not (checkout / "build" / "demo" / "stack.json").exists()
    assert_closed(int(re.findall(r"starting on port (\d+)", told)[0]))


def test_up_serves_airflow_and_production_until_down(checkout: Path) -> None:
    told = make(checkout, "make up")
    try:
        [(url, password)] = re.findall(r"^Airflow\s+(\S+)\s+\(login admin, password (\S+)\)", told, flags=re.M)
        client = AirflowClient(url, "admin", password)
        client.login()
        assert client.has_dag(DAG_ID)
        assert client.unhealthy() == []
        state = json.loads((checkout / "build" / "demo" / "stack.json").read_text())
        port = int(re.findall(r"^production\s+http://127\.0\.0\.1:(\d+)", told, flags=re.M)[0])
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
    finally:
        told = make(checkout, "make down")
    assert "api-server" in told
    assert with_variable(TOKEN, state["token"]) == []
    assert_closed(port)
    assert make(checkout, "make down").strip().endswith("nothing was up")


def dataset_of(told: str) -> str:
    """The file that the demo said it uses."""
    return str(re.findall(r"data set: (\S+)$", told, flags=re.M)[0])


def assert_closed(port: int) -> None:
    """Nobody listens any more."""
    with socket.socket() as s:
        assert s.connect_ex(("127.0.0.1", port)) != 0, f"somebody still listens on port {port}"
