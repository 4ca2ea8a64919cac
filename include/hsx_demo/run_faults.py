"""``make test-faults``: the whole fault suite in both environments, its table printed and kept in docs/reliability.md.

Stdlib only; started by any Python of the right version. ``HSX_TEST_ARGS`` is handed to each pytest; ``--table`` only
writes the document anew, from the last results.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hsx_demo.environments import REPO, EnvironmentFailure, ensure

# One after the other: both levels start servers and watch leases by the clock.
LEVELS = (
    ("host", "host", "tests/faults/host", ("-n", "2")),
    ("dag", "airflow", "tests/faults/dag", ()),
)
RESULTS = REPO / "build" / "faults.json"
DOCUMENT = REPO / "docs" / "reliability.md"
BEGIN, END = "<!-- table: make test-faults -->", "<!-- end of table -->"
TITLES = {
    "tests/faults/host": "The host program alone",
    "tests/faults/dag": "The whole DAG on Airflow's own components",
}


def main() -> int:
    """Run both levels; 0 only where every pair held. The document is written where none failed."""
    if sys.argv[1:] != ["--table"]:
        try:
            pythons = {
                "airflow": os.environ.get("AIRFLOW_PYTHON") or str(ensure("airflow")),
                "host": os.environ.get("HSX_HOST_PYTHON") or str(ensure("host")),
            }
        except EnvironmentFailure as e:
            print(f"hsx: {e}", file=sys.stderr)
            return 1
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.unlink(missing_ok=True)
        codes = [_pytest(pythons[env], folder, options, pythons["host"]) for _, env, folder, options in LEVELS]
    else:
        codes = []
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    table = render(rows)
    print(table)
    bad = [r for r in rows if r["result"] not in ("held", "skipped")]
    if bad or any(codes) or not rows:
        print(f"{len(bad)} of {len(rows)} pairs did not hold: {DOCUMENT.name} is left as it was", file=sys.stderr)
        return 1
    text = DOCUMENT.read_text()
    head, tail = text[: text.index(BEGIN)], text[text.index(END) :]
    DOCUMENT.write_text(f"{head}{BEGIN}\n{table}\n{tail}")
    return 0


def render(rows: list[dict[str, str]]) -> str:
    """The table as Markdown: one line for each fault and its end, with all stages at which it struck."""
    lines = []
    for folder, title in TITLES.items():
        mine = [r for r in rows if r["test"].startswith(folder)]
        if not mine:
            continue
        skipped = sum(r["result"] == "skipped" for r in mine)
        note = f", {skipped} not run here" if skipped else ""
        lines += [f"### {title}: {len(mine) - skipped} fault x stage pairs{note}", ""]
        lines += ["| fault | stages | end | to read |", "|---|---|---|---|"]
        groups: dict[tuple[str, str, str], list[str]] = {}
        for r in mine:
            end = "not run here" if r["result"] == "skipped" else r.get("end") or r["result"]
            groups.setdefault((r["fault"], end, r.get("log", "")), []).append(r.get("stage", ""))
        for (fault, end, log), stages in groups.items():
            cells = (fault, "; ".join(stages), end, log)
            lines.append("| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _pytest(python: str, folder: str, options: tuple[str, ...], host_python: str) -> int:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(REPO / "plugins"), str(REPO / "include"))),
        "HSX_HOST_PYTHON": host_python,
        "HSX_FAULTS_OUT": str(RESULTS),
    }
    extra = shlex.split(os.environ.get("HSX_TEST_ARGS", ""))
    print(f"== {folder}", flush=True)
    return subprocess.run([python, "-m", "pytest", folder, *options, *extra], cwd=REPO, env=env, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
