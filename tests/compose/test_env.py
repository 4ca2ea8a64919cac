"""docker-compose.yaml with a .env in which something is missing. Needs Compose, no engine."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from install_doc import REPO


@pytest.mark.parametrize("missing", re.findall(r"^([A-Z_]+)=$", (REPO / "env.example").read_text(), flags=re.M))
def test_what_is_missing_in_env_is_named(tmp_path: Path, missing: str) -> None:
    text = re.sub(rf"^(?!{missing}=)([A-Z_]+)=$", r"\1=x", (REPO / "env.example").read_text(), flags=re.M)
    (tmp_path / ".env").write_text(text)
    command = [*shlex.split(os.environ["HSX_COMPOSE"]), "--project-directory", str(tmp_path)]
    command += ["-f", str(REPO / "docker-compose.yaml"), "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert f"required variable {missing} is missing a value: set it in .env" in done.stderr
