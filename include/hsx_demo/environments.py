"""The Python environments of this repository: Airflow, SGLang on the CPU, and older SGLangs for the test matrix.

    python include/hsx_demo/environments.py NAME...     makes each where missing, prints its python

They lie under ``${HSX_CACHE:-~/.cache/hsx}/envs/<name>-<12 hex digits>``, keyed by their lock files and the Python that
makes them, so that clones share them and a change of a lock makes a new one. Stdlib only: this runs before
anything is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

REPO = Path(__file__).resolve().parents[2]
PYTHON = (3, 11)  # the lock files are closures for this one
PIP = "pip==26.2"
COMPLETE = "hsx-complete"


class EnvironmentFailure(Exception):
    """An environment could not be made; the message says why and what to do."""


@dataclass(frozen=True)
class Environment:
    """One environment: its requirement files (whole closures, installed with --no-deps), and what must import."""

    name: str
    locks: tuple[str, ...]
    imports: tuple[str, ...]
    disk_gb: float


ENVIRONMENTS = {
    "airflow": Environment(
        "airflow", ("requirements.lock", "requirements-dev.txt"), ("airflow.version", "asyncssh", "pytest"), 1.0
    ),
    "host": Environment(
        "host",
        ("requirements-host-cpu.txt", "requirements-dev.txt"),
        ("torch", "transformers", "sglang.srt.plugins", "pytest"),
        9.0,
    ),
}
# For `make test-ui`: Airflow, and what drives a browser.
ENVIRONMENTS["ui"] = Environment(
    "ui",
    (*ENVIRONMENTS["airflow"].locks, "requirements-ui.txt"),
    (*ENVIRONMENTS["airflow"].imports, "playwright.sync_api"),
    1.5,
)
# Older SGLang versions, for `make test-matrix`; "host" has the newest.
OLDER_SGLANG = ("0.5.14", "0.5.17")
ENVIRONMENTS |= {
    f"host-{version}": Environment(
        f"host-{version}",
        (f"tests/matrix/requirements-sglang-{version}.txt", "requirements-dev.txt"),
        ENVIRONMENTS["host"].imports,
        9.0,
    )
    for version in OLDER_SGLANG
}


def cache_root() -> Path:
    """Where environments, model and data sets are kept between runs and clones."""
    return Path(os.environ.get("HSX_CACHE") or "~/.cache/hsx").expanduser().resolve()


def ensure(name: str, *, say: bool = True) -> Path:
    """The python of environment ``name``, made where it is missing; two at once make it once.

    :raises EnvironmentFailure: another Python version, no room, or pip failed, with the end of its log.
    """
    environment = ENVIRONMENTS[name]
    _check_python()
    folder = cache_root() / "envs" / f"{name}-{key(environment)}"
    python = folder / "bin" / "python"
    if (folder / COMPLETE).exists():
        return python
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_name(f"{folder.name}.lock"), say=say):
        if not (folder / COMPLETE).exists():
            # a folder without its mark is what a killed run left: a venv can't be renamed, so the mark comes last
            shutil.rmtree(folder, ignore_errors=True)
            _check_room(folder.parent, environment)
            _make(environment, folder, say=say)
    return python


def key(environment: Environment) -> str:
    """12 hex digits of all that makes an environment what it is: its lines (comments apart), Python, machine, pip."""
    total = hashlib.sha256(f"{platform.python_version()} {platform.machine()} {PIP}\n".encode())
    for lock in environment.locks:
        for line in (REPO / lock).read_text().splitlines():
            if requirement := line.split("#")[0].strip():
                total.update(f"{requirement}\n".encode())
    return total.hexdigest()[:12]


def _make(environment: Environment, folder: Path, *, say: bool) -> None:
    began, log = time.monotonic(), folder.with_name(f"{folder.name}.log")
    if say:
        print(f"hsx: making the {environment.name} environment in {folder} (log: {log})", file=sys.stderr, flush=True)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    install = [*pip, "install", "--no-deps", "--progress-bar", "off"]
    with log.open("w") as out:
        _call([sys.executable, "-m", "venv", str(folder)], out, environment.name)
        _call([*install, PIP], out, environment.name)
        files = [a for lock in environment.locks for a in ("-r", str(REPO / lock))]
        _call([*install, *files], out, environment.name)
        # the first import compiles thousands of files: done here, it is not part of a server's start
        _call([python, "-c", "import " + ", ".join(environment.imports)], out, environment.name)
    mark = folder / f".{COMPLETE}"
    mark.write_text(f"{environment.name} {key(environment)}\n")
    mark.rename(folder / COMPLETE)
    if say:
        print(
            f"hsx: {environment.name} environment made in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True
        )


def _call(command: Sequence[str], out: IO[str], name: str) -> None:
    log = Path(out.name)
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    try:
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=env, check=False)
    except OSError as e:
        raise EnvironmentFailure(f"{command[0]} could not be run: {e}") from None
    if done.returncode != 0:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        hint = ""
        if "ensurepip" in end or "venv" in command[1:3]:
            hint = "\nThis Python makes no environments: on Debian, install the package python3-venv."
        raise EnvironmentFailure(f"the {name} environment could not be made; the end of {log}:\n{end}{hint}")


def _check_python() -> None:
    if sys.version_info[:2] != PYTHON:
        have, want = platform.python_version(), ".".join(map(str, PYTHON))
        raise EnvironmentFailure(
            f"this is Python {have}, and the lock files are for {want}: make PYTHON=/path/to/python{want} ..."
        )


def _check_room(folder: Path, environment: Environment) -> None:
    free = shutil.disk_usage(folder).free / 1e9
    if free < environment.disk_gb:
        raise EnvironmentFailure(
            f"the {environment.name} environment takes {environment.disk_gb:.0f} GB, {folder} has {free:.1f} GB free: "
            "set HSX_CACHE to a folder with room"
        )


@contextlib.contextmanager
def _lock(path: Path, *, say: bool) -> Iterator[None]:
    with path.open("w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if say:
                print(f"hsx: another process makes {path.stem}; waiting for it", file=sys.stderr, flush=True)
            fcntl.flock(f, fcntl.LOCK_EX)
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """Make the named environments; print each one's python on stdout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="+", choices=sorted(ENVIRONMENTS))
    try:
        for name in parser.parse_args(argv).names:
            print(ensure(name))
    except EnvironmentFailure as e:
        print(f"hsx: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
