"""Puts the project's rooms on sys.path, and on PYTHONPATH for the processes that tests start.

Tests run in two environments: ``tests/unit/host``, ``tests/unit/patches`` and ``tests/system`` under the Python that
has SGLang; ``tests/unit/airflow`` and ``tests/integration`` under the one that has Airflow. A folder whose
environment isn't this one is left out when pytest is given the whole of ``tests``; named on the command line it is
collected, and fails to import.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
ROOMS = [REPO / "plugins", REPO / "include"]

for room in reversed(ROOMS):
    if str(room) not in sys.path:
        sys.path.insert(0, str(room))

_known = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
os.environ["PYTHONPATH"] = os.pathsep.join([*(str(r) for r in ROOMS if str(r) not in _known), *_known])

collect_ignore = []
if importlib.util.find_spec("airflow") is None:
    collect_ignore += ["unit/airflow", "integration", "faults/dag"]
if "HSX_COMPOSE" not in os.environ:  # `make test-compose` sets it
    collect_ignore += ["compose"]
if importlib.util.find_spec("sglang") is None:
    collect_ignore += ["unit/host", "unit/patches", "system", "crash", "faults/host", "matrix"]
