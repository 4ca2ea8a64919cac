"""Puts the two patches on sys.path, as PYTHONPATH does for a server."""

from __future__ import annotations

import sys
from pathlib import Path

PATCHES = Path(__file__).resolve().parents[3] / "include" / "patches"
sys.path[:0] = [str(PATCHES / "hsx_capture"), str(PATCHES / "hsx_cpu")]
