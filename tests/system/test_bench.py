"""The data plane's benchmark, whose figures stand in docs/performance.md, runs to its end. No figure is judged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench" / "host_plane.py"


def test_the_data_planes_bench_runs_and_every_case_has_its_rows(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH), "--small", "--work", str(tmp_path)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [
        line.split("|")[1].split(",")[0].split(" ")[1] for line in done.stdout.splitlines() if line.startswith("| ")
    ]
    assert set(rows) == {"what", "writers", "peers:", "CRC-32", "verify", "resume", "plan", "client"}
