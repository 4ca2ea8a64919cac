"""The runner of the suites: red where one of them is, in whichever lane, and ended with everything below it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

INCLUDE = Path(__file__).resolve().parents[3] / "include"
RUNNER = """
import sys
from pathlib import Path
from hsx_demo import run_tests
run_tests.REPO = Path(sys.argv[1])
run_tests.SUITES = {"test": (
    (("one", "host", ("one",), ()), ("three", "host", ("three",), ())),
    (("two", "airflow", ("two",), ()),),
)}
sys.exit(run_tests.main([]))
"""
SLEEPER = """
import time, pytest
from pathlib import Path
@pytest.fixture
def server():
    Path("up").touch()
    yield
    Path("up").rename("down")
def test_sleeps(server):
    time.sleep(600)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, body in {"one": "assert True", "two": "assert True", "three": "assert True"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"test_{name}.py").write_text(f"def test_{name}():\n    {body}\n")
    return tmp_path


def started(checkout: Path) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(INCLUDE), "HSX_HOST_PYTHON": sys.executable, "AIRFLOW_PYTHON": sys.executable}
    return subprocess.Popen(
        [sys.executable, "-c", RUNNER, str(checkout)], env=env, cwd=checkout, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("red", ["one", "two", None])
def test_all_suites_run_to_their_end_and_one_red_one_makes_all_red(checkout: Path, red: str | None) -> None:
    if red:
        (checkout / red / f"test_{red}.py").write_text("def test_it():\n    assert False\n")
    runner = started(checkout)
    told, _ = runner.communicate(timeout=120)
    assert runner.returncode == (1 if red else 0), told
    closing = told[told.index("== closing lines") :].splitlines()[1:]
    suites = [line for line in closing if not line.startswith(" ")]
    assert [line.split()[:2] for line in suites] == [
        ["FAIL" if name == red else "ok", f"{name}:"] for name in ("one", "three", "two")
    ]
    assert all("1 passed" in line or "1 failed" in line for line in suites)
    failed = [line.split()[:2] for line in closing if line.startswith(" ")]
    assert failed == ([["FAILED", f"{red}/test_{red}.py::test_it"]] if red else [])


def test_told_to_end_it_ends_each_pytest_which_stops_what_it_started(checkout: Path) -> None:
    (checkout / "one" / "test_one.py").write_text(SLEEPER)
    runner = started(checkout)
    deadline = time.monotonic() + 60
    while not (checkout / "up").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    runner.send_signal(signal.SIGTERM)
    told, _ = runner.communicate(timeout=60)
    assert runner.returncode == 1
    assert (checkout / "down").exists()
    assert "FAIL three: not run: told to end" in told
