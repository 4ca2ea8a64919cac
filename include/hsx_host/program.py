"""How this program is run again, and what of that no other program gets.

Only what was shipped is imported: never a module of the folder that somebody stands in, nor byte code that lies beside
the sources. Byte code is kept below the home instead, apart from what is checked against the bundle's hash.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = "pycache"  # below the home
_OWN = {"PYTHONPATH", "PYTHONSAFEPATH", "PYTHONPYCACHEPREFIX"}


def variables(home: Path) -> dict[str, str]:
    """What a shell sets to run this program from any folder."""
    return {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", "PYTHONPYCACHEPREFIX": str(home / CACHE)}


def environment() -> dict[str, str]:
    """This environment, in which this program is found from any folder (PYTHONPATH may have been relative)."""
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def of_others() -> dict[str, str]:
    """This environment for programs of the host's owner: without what is hsx's own."""
    return {k: v for k, v in os.environ.items() if k not in _OWN and not k.startswith("HSX_")}
