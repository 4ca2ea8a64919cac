"""Environments with the trainers' own packages, each made once for its requirements and kept in the cache.

Each is a layer over the Python that runs this, the host's: that one's packages are seen behind its own, so that torch
(gigabytes) is not installed a second time, and packages of which two need different versions lie in both.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from hsx_demo.environments import cache_root

FOLDER = Path(__file__).with_name("trainer_requirements")


def python(trainer: str) -> Path:
    """The interpreter of ``trainer`` (a file of ``FOLDER`` without its ending); made where it is missing."""
    requirements = FOLDER / f"{trainer}.txt"
    base = sysconfig.get_paths()["purelib"]
    key = hashlib.sha256(requirements.read_bytes() + base.encode() + sys.version.encode()).hexdigest()[:16]
    cache = cache_root()
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"trainer-{trainer}-{key}"
    with (cache / f"trainer-{trainer}-{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            (own,) = folder.glob("lib/python*/site-packages")
            (own / "base.pth").write_text(base + "\n")
            pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(requirements)]
            subprocess.run(pip, check=True)
            (folder / "complete").touch()
    return folder / "bin/python"


if __name__ == "__main__":
    print(python(sys.argv[1]))
