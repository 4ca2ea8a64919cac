"""``make test``, ``make test-crash``, ``make test-matrix``: suites of pytest, all to their end, and red where one is.

Stdlib only; started by any Python of the right version. ``HSX_TEST_ARGS`` is handed to each pytest.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hsx_demo.environments import OLDER_SGLANG, REPO, EnvironmentFailure, ensure

SLOWEST = ("--durations", "8", "--durations-min", "15")  # what the minutes are spent on
#: A suite of pytest: its name, the environment it runs in, folders, options.
Suite = tuple[str, str, tuple[str, ...], tuple[str, ...]]
#: Name, exit code and closing line of a suite that ran, and its failed tests.
Result = tuple[str, int, str, list[str]]
# Files in the order of their names, not those with most tests first: the DAG's stories are few and take minutes each.
_IN_ORDER = ("--no-loadscope-reorder",)
# Lanes run beside each other, a lane's suites one after the other: the integration mostly waits for servers to start,
# Airflow to look and leases to lapse. Workers share nothing; a server's tests, a file's tests, stay on one of them.
TEST: tuple[tuple[Suite, ...], ...] = (
    (
        ("host, unit", "host", ("tests/unit/host", "tests/unit/patches"), ("-n", "3")),  # half of it waits for leases
        ("host, system", "host", ("tests/system",), ("-n", "2", "--dist", "loadscope", *SLOWEST)),
    ),
    (
        ("airflow, unit", "airflow", ("tests/unit/airflow", "tests/unit/demo"), ("-n", "2")),
        ("host, some faults", "host", ("tests/faults/host",), ("-n", "2", "-m", "quick")),
        (
            "airflow, integration",
            "airflow",
            ("tests/integration",),
            ("-n", "3", "--dist", "loadfile", *_IN_ORDER, *SLOWEST),
        ),
    ),
)

_CAPTURE = tuple(f"tests/system/test_{name}.py" for name in ("capture", "capture_inert", "capture_ranks", "extract"))
SUITES: dict[str, tuple[tuple[Suite, ...], ...]] = {
    "test": TEST,
    "crash": ((("crashes", "host", ("tests/crash",), ()),),),
    "matrix": (
        tuple(
            (f"SGLang of {environment}", environment, (*_CAPTURE, "tests/matrix"), ("-n", "2", "--dist", "loadscope"))
            for environment in (*(f"host-{version}" for version in OLDER_SGLANG), "host")
        ),
    ),
}
_children: list[subprocess.Popen[str]] = []
_told_to_end = threading.Event()
_NAMED = {"airflow": "AIRFLOW_PYTHON", "host": "HSX_HOST_PYTHON"}


def main(argv: list[str]) -> int:
    """Run the suites of one kind; 0 only where each one's pytest ended with 0."""
    lanes = SUITES[argv[0] if argv else "test"]
    try:
        wanted = {environment for lane in lanes for _, environment, _, _ in lane} | {"host"}
        pythons = {e: os.environ.get(_NAMED.get(e, "")) or str(ensure(e)) for e in sorted(wanted)}
    except EnvironmentFailure as e:
        print(f"hsx: {e}", file=sys.stderr)
        return 1
    rooms = os.pathsep.join((str(REPO / "plugins"), str(REPO / "include")))
    env = {**os.environ, "PYTHONPATH": rooms} | {_NAMED[e]: p for e, p in pythons.items() if e in _NAMED}
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs ignore it, and so would a pytest
    signal.signal(signal.SIGTERM, lambda *_: _end())
    with ThreadPoolExecutor(len(lanes)) as pool:
        results = [line for lane in pool.map(lambda lane: _lane(lane, pythons, env), lanes) for line in lane]
    print("== closing lines")
    for name, code, closing, failures in results:
        print(f"{'ok  ' if code == 0 else 'FAIL'} {name}: {closing}", *failures, sep="\n     ")
    return 0 if all(code == 0 for _, code, _, _ in results) else 1


def _end() -> None:
    """What a terminal's Ctrl-C does: no suite is begun any more, each pytest ends its tests (and its workers)."""
    _told_to_end.set()
    for child in _children:
        child.send_signal(signal.SIGINT)


def _lane(suites: Sequence[Suite], pythons: dict[str, str], env: dict[str, str]) -> list[Result]:
    """The results of a lane's suites, run one after the other."""
    results: list[Result] = []
    for name, environment, folders, options in suites:
        if _told_to_end.is_set():
            results.append((name, 1, "not run: told to end", []))
            continue
        present = [f for f in folders if (REPO / f).exists()]
        print(f"== {name}: {' '.join(present)}", flush=True)
        began = time.monotonic()
        extra = shlex.split(os.environ.get("HSX_TEST_ARGS", ""))
        code, closing, failures = _pytest(name, [pythons[environment], "-m", "pytest", *present, *options, *extra], env)
        results.append((name, code, f"{closing} ({time.monotonic() - began:.0f} s)", failures))
    return results


def _pytest(name: str, command: list[str], env: dict[str, str]) -> tuple[int, str, list[str]]:
    """Run one pytest, showing its output; its exit code, closing line, and the lines that name a failed test."""
    closing, failures = "no closing line", []
    with subprocess.Popen(command, cwd=REPO, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as p:
        _children.append(p)
        assert p.stdout is not None
        for line in p.stdout:
            print(f"{name} | {line}", end="", flush=True)
            if re.search(r"\b(passed|failed|error|errors|no tests ran)\b.* in [\d.]+s", line):
                closing = line.strip("= \n")
            elif line.startswith(("FAILED ", "ERROR ")):  # again at the end: a log of CI may show its end alone
                failures.append(line.rstrip("\n"))
    return p.returncode, closing, failures


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
