"""The Airflow plane of hsx: how a step is submitted to the GPU host, watched, retried and killed.

``include/`` holds the contract (``hsx_host.contract``) that both planes share. Where nobody put it on
PYTHONPATH, it is found beside ``plugins/``.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

__version__ = "0.1.0"

INCLUDE = Path(__file__).resolve().parents[2] / "include"

if find_spec("hsx_host") is None and (INCLUDE / "hsx_host").is_dir():
    sys.path.append(str(INCLUDE))
