"""One stand for the whole suite: its tests are one after the other, and each leaves the host as it found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fault_dag import Stand
from stands import sglang_python


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Stand]:
    """Production as its owner started it, and Airflow beside it."""
    lease_s = getattr(request.module, "LEASE_S", 90)
    made = Stand(tmp_path_factory.mktemp("stand"), sglang_python(), lease_s)
    try:
        made.start()
        yield made
    finally:
        made.stop()
