"""Airflow reads its folder when it is imported: give it one of this session's own."""

from __future__ import annotations

import os
import shutil
import tempfile

os.environ["AIRFLOW_HOME"] = tempfile.mkdtemp(prefix="hsx-airflow-")
os.environ["AIRFLOW__CORE__LOAD_EXAMPLES"] = "False"


def pytest_unconfigure() -> None:
    """That folder goes with the session."""
    shutil.rmtree(os.environ["AIRFLOW_HOME"], ignore_errors=True)
