"""One stand for the whole suite: its tests are one after the other, and each leaves the host as it found it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from fault_dag import Stand


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Stand]:
    """Production as its owner started it, and Airflow beside it."""
    python = os.environ.get("HSX_HOST_PYTHON", "")
    if not python:
        pytest.fail("HSX_HOST_PYTHON is not set: the Python that runs SGLang (make test-faults sets it)")
    lease_s = getattr(request.module, "LEASE_S", 90)
    made = Stand(tmp_path_factory.mktemp("stand"), python, lease_s)
    try:
        made.start()
        yield made
    finally:
        made.stop()
