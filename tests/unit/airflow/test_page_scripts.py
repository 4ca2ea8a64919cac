"""The page's scripts parse. What they draw is for ``make test-ui``, in a browser."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

STATIC = Path(__file__).resolve().parents[3] / "plugins" / "hsx_page" / "static"
NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="no node on PATH")
@pytest.mark.parametrize("script", sorted(p.name for p in STATIC.glob("*.js")))
def test_a_script_of_the_page_parses(tmp_path: Path, script: str) -> None:
    module = shutil.copy(STATIC / script, tmp_path / "script.mjs")  # as a module, which they are
    done = subprocess.run([str(NODE), "--check", str(module)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
