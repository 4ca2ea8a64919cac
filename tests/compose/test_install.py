"""docs/install.md's commands for an Airflow that is there already, and for Astro's layout, as they stand. No Docker."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from install_doc import REPO, bash_blocks

#: The environment that the tests run in was made from the same file.
DONE = "pip install -r requirements.txt\n"
DAGS = {"hsx_extraction", "hsx_training"}


def bash(script: str, cwd: Path, **env: str) -> str:
    """Run a script with this Python's commands; its output."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AIRFLOW", "HSX_", "PYTHONPATH"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=cwd,
        env={**kept, "PATH": path, "AIRFLOW__CORE__LOAD_EXAMPLES": "False", **env},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The checkout as it stands."""
    ignored = shutil.ignore_patterns(".git", "build", "__pycache__", ".*_cache", ".env", "secrets")
    return shutil.copytree(REPO, tmp_path / "hsx", ignore=ignored)


def test_an_airflow_that_is_there(checkout: Path, tmp_path: Path) -> None:
    home = tmp_path / "airflow"
    here = {"AIRFLOW_HOME": str(home)}
    folders, once = bash_blocks("### An Airflow that you have")
    assert folders.startswith(DONE)
    bash("airflow db migrate", tmp_path, **here)
    bash(folders.removeprefix(DONE), checkout, **here)
    said = bash(once, checkout, **here)
    assert "No data found" in said  # of import errors
    assert set(said.split()) >= DAGS

    assert "hsx_plugin" in said  # of `airflow plugins`: the page

    with contextlib.closing(sqlite3.connect(home / "airflow.db")) as db:
        pools = db.execute("SELECT slots, include_deferred FROM slot_pool WHERE pool = 'hsx_gpu_host'").fetchall()
        login = "SELECT conn_type, host, login FROM connection WHERE conn_id = 'hsx_kimi_host'"
        connections = db.execute(login).fetchall()
    assert pools == [(1, 1)]
    assert connections == [("ssh", "gpu1", "sglang")]


def test_astros_layout(tmp_path: Path) -> None:
    project, home = tmp_path / "project", tmp_path / "home"
    project.mkdir()
    (project / "requirements.txt").write_text("# the project's own\n")
    bash(*bash_blocks("### Astro"), project, HSX=str(REPO))
    wanted = (project / "requirements.txt").read_text()
    assert wanted.startswith("# the project's own\n")
    assert "apache-airflow-providers-ssh==" in wanted
    assert "\napache-airflow==" not in wanted
    # as Astro's image lays it: the three folders side by side, and nothing on PYTHONPATH
    folders = {"DAGS_FOLDER": project / "dags", "PLUGINS_FOLDER": project / "plugins"}
    env = {f"AIRFLOW__CORE__{k}": str(v) for k, v in folders.items()}
    script = "airflow db migrate > /dev/null; airflow dags list-import-errors --local; airflow dags list --local"
    said = bash(script, project, AIRFLOW_HOME=str(home), **env)
    assert "No data found" in said
    assert set(said.split()) >= DAGS
