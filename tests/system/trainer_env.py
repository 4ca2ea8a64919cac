"""Environments with the trainers' own packages, each made once for its requirements and kept in the cache.

Each is a layer over the Python that runs the tests: that one's packages are seen behind its own, so that torch
(gigabytes) is not installed a second time, and packages of which two need different versions lie in both.
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

FOLDER = Path(__file__).with_name("trainers")
TRAINERS = sorted(p.stem for p in FOLDER.glob("*.txt"))


def python(trainer: str) -> Path:
    """The interpreter of ``trainer`` (a file of ``trainers/`` without its ending); made where it is missing."""
    requirements = FOLDER / f"{trainer}.txt"
    base = sysconfig.get_paths()["purelib"]
    key = hashlib.sha256(requirements.read_bytes() + base.encode() + sys.version.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("HSX_CACHE") or Path.home() / ".cache" / "hsx")
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


def run(trainer: str, script: Path | str, *args: str, cwd: Path) -> str:
    """Run a script under a trainer's Python, with nothing of hsx on its path; its stdout, or AssertionError."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "offline"}
    done = subprocess.run(
        [str(python(trainer)), str(script), *args], capture_output=True, text=True, env=env, cwd=cwd, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
