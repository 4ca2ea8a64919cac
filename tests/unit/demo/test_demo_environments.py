"""Environments are keyed by what makes them, made once, and never taken for whole when they are not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from hsx_demo import environments
from hsx_demo.environments import ENVIRONMENTS, REPO, Environment, EnvironmentFailure, ensure, key


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """An environment of no package at all, in a cache of the test's own."""
    lock = tmp_path / "tiny.txt"
    lock.write_text("# nothing\n")
    made = Environment("tiny", (os.path.relpath(lock, REPO),), ("json",), 0.1)
    monkeypatch.setitem(ENVIRONMENTS, "tiny", made)
    monkeypatch.setattr(environments, "PIP", "")
    monkeypatch.setenv("HSX_CACHE", str(tmp_path / "cache"))
    calls: list[list[str]] = []

    def record(command: list[str], out: IO[str], name: str) -> None:
        # pip has nothing to do here: only the venv itself and the import are real
        calls.append(list(command))
        if "pip" not in command:
            real(command, out, name)

    real = environments._call
    monkeypatch.setattr(environments, "_call", record)
    monkeypatch.setattr(environments, "calls", calls, raising=False)
    return made


def test_made_once_and_found_afterwards(tiny: Environment) -> None:
    first = ensure("tiny", say=False)
    done = len(environments.calls)  # type: ignore[attr-defined]
    assert subprocess.run([first, "-c", "print(1)"], check=True, capture_output=True, text=True).stdout == "1\n"
    assert ensure("tiny", say=False) == first
    assert len(environments.calls) == done  # type: ignore[attr-defined]


def test_a_folder_without_its_mark_is_made_again(tiny: Environment) -> None:
    python = ensure("tiny", say=False)
    folder = python.parents[1]
    (folder / environments.COMPLETE).unlink()
    (folder / "half").touch()
    ensure("tiny", say=False)
    assert not (folder / "half").exists()
    assert (folder / environments.COMPLETE).exists()


def test_another_requirement_is_another_environment_and_a_comment_is_not(tiny: Environment) -> None:
    lock = REPO / tiny.locks[0]
    before = key(tiny)
    lock.write_text("# other words\n\n")
    assert key(tiny) == before
    lock.write_text("six==1.17.0  # why\n")
    assert key(tiny) != before


def test_a_failing_step_ends_with_the_end_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Environment("broken", (), ("no_such_module_at_all",), 0.1)
    monkeypatch.setitem(ENVIRONMENTS, "broken", made)
    monkeypatch.setenv("HSX_CACHE", str(tmp_path / "cache"))
    real = environments._call
    monkeypatch.setattr(environments, "_call", lambda c, o, n: None if "install" in c else real(c, o, n))
    with pytest.raises(EnvironmentFailure, match=r"broken environment could not be made(?s:.*)no_such_module_at_all"):
        ensure("broken", say=False)
    folder = next(p for p in (tmp_path / "cache" / "envs").iterdir() if p.is_dir())
    assert not (folder / environments.COMPLETE).exists()


def test_another_python_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "PYTHON", (3, 99))
    with pytest.raises(EnvironmentFailure, match=r"for 3\.99: make PYTHON="):
        ensure("host", say=False)


def test_no_room_is_refused_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENTS, "huge", Environment("huge", (), ("json",), 1e9))
    monkeypatch.setenv("HSX_CACHE", str(tmp_path))
    with pytest.raises(EnvironmentFailure, match="set HSX_CACHE"):
        ensure("huge", say=False)


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-host-cpu.txt", "requirements-dev.txt"])
def test_closures_pin_each_package_once(name: str) -> None:
    lines = [line.split("#")[0].strip() for line in (REPO / name).read_text().splitlines()]
    pins = [line for line in lines if line]
    assert all(line.count("==") == 1 for line in pins)
    names = [line.split("==")[0].lower().replace("_", "-") for line in pins]
    assert sorted(set(names)) == sorted(names)


def test_direct_pins_stand_in_the_lock() -> None:
    def pins(name: str) -> set[str]:
        lines = (line.split("#")[0].strip() for line in (REPO / name).read_text().splitlines())
        return {line.lower() for line in lines if line}

    assert pins("requirements.txt") <= pins("requirements.lock")
    shared = {p.split("==")[0]: p for p in pins("requirements-dev.txt")}
    for lock in ("requirements.lock", "requirements-host-cpu.txt"):
        for pin in pins(lock):
            assert shared.get(pin.split("==")[0], pin) == pin, f"{lock} and requirements-dev.txt differ"


def test_it_needs_nothing_but_the_standard_library() -> None:
    command = [sys.executable, "-S", str(REPO / "include" / "hsx_demo" / "environments.py"), "--help"]
    assert subprocess.run(command, capture_output=True, check=True).returncode == 0
