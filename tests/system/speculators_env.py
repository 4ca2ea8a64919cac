"""An environment with speculators, made once for each content of its requirements and kept in the cache.

It is a layer over the Python that runs the tests: that one's packages are seen behind its own, so that torch
(gigabytes) is not installed a second time, and transformers, of which the two need different versions, lies in both.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements-speculators.txt")


def python() -> Path:
    """The environment's interpreter; makes the environment where it is missing."""
    base = sysconfig.get_paths()["purelib"]
    key = hashlib.sha256(REQUIREMENTS.read_bytes() + base.encode() + sys.version.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("HSX_CACHE") or Path.home() / ".cache" / "hsx")
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"speculators-{key}"
    with (cache / f"speculators-{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            (own,) = folder.glob("lib/python*/site-packages")
            (own / "base.pth").write_text(base + "\n")
            pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(REQUIREMENTS)]
            subprocess.run(pip, check=True)
            (folder / "complete").touch()
    return folder / "bin/python"
