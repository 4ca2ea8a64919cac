"""The table of the fault suite: each test tells one row, printed at the end, and written to $HSX_FAULTS_OUT if set."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Row = Callable[..., None]


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Row:
    """Name what this test shows: ``row(fault, stage)`` at its start, ``row(end=..., log=...)`` when it is known."""

    def tell(fault: str = "", stage: str = "", *, end: str = "", log: str = "") -> None:
        said: dict[str, str] = dict(request.node.user_properties)
        new = {"fault": fault, "stage": stage, "end": end, "log": log}
        said |= {key: value for key, value in new.items() if value}
        request.node.user_properties[:] = list(said.items())

    return tell


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The rows of every test that ran here or in a worker."""
    rows = []
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            said = dict(getattr(report, "user_properties", []))
            if "fault" in said and (report.when == "call" or outcome in ("error", "skipped")):
                rows.append({"result": "held" if outcome == "passed" else outcome, "test": report.nodeid, **said})
    rows.sort(key=lambda r: (r["test"].split("::")[0], r["fault"], r["test"]))
    if not rows:
        return
    terminalreporter.section(f"faults: {sum(r['result'] == 'held' for r in rows)} of {len(rows)} held")
    for r in rows:
        line = f"{r['result']:<7} {r['fault']} | {r.get('stage', '')} | {r.get('end', '')} | log: {r.get('log', '')}"
        terminalreporter.write_line(line)
    if out := os.environ.get("HSX_FAULTS_OUT"):
        file = Path(out)  # rows of other tests stay: the suite has two halves
        known = {r["test"]: r for r in (json.loads(file.read_text()) if file.exists() else [])}
        known |= {r["test"]: r for r in rows}
        file.write_text(json.dumps(list(known.values()), indent=1))
