"""What every stand of a test is made of: the Python that has SGLang, a tiny random model, samples."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
SYSTEM = TESTS / "system"
#: PYTHONPATH of a stand whose profile names the notifier of tests/integration: the rooms, and its folder.
NOTIFIER_PATH = os.pathsep.join(str(TESTS.parent / p) for p in ("plugins", "include", "tests/integration"))

#: PYTHONPATH of a stand's servers: SGLang's CPU platform, and children that are forked (tests/system/forked).
PLATFORM = os.pathsep.join((str(TESTS.parent / "include/patches/hsx_cpu"), str(SYSTEM / "forked")))


def sglang_python() -> str:
    """The Python that has SGLang; the test fails where none is named."""
    python = os.environ.get("HSX_HOST_PYTHON", "")
    if not python:
        pytest.fail("HSX_HOST_PYTHON is not set: the Python that runs SGLang (the Makefile's targets set it)")
    return python


def tiny_model(folder: Path) -> Path:
    """A random llama of 8 blocks in ``folder``, made by the Python that has torch."""
    code = "import pathlib, sys, models; models.build('llama', pathlib.Path(sys.argv[1]))"
    env = {**os.environ, "PYTHONPATH": str(SYSTEM)}
    subprocess.run([sglang_python(), "-c", code, str(folder)], env=env, check=True, capture_output=True, timeout=600)
    return folder


def write_samples(path: Path, *, samples: int, shortest: int = 20, longest: int = 399, seed: int = 7) -> Path:
    """Pre-tokenised samples of ``shortest`` to ``longest`` random tokens, all of them trained on."""
    rng = random.Random(seed)
    with path.open("w") as f:
        for _ in range(samples):
            n = rng.randint(shortest, longest)
            f.write(json.dumps({"input_ids": [rng.randrange(4, 512) for _ in range(n)], "loss_mask": [1] * n}) + "\n")
    return path
