"""A host of its own for each fault."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_host import FaultHost, MakeHost


@pytest.fixture
def make_host(tmp_path: Path) -> Iterator[MakeHost]:
    """Makes the host, with production as its owner started it; everything is ended afterwards."""
    made: list[FaultHost] = []

    def make(**settings: Any) -> FaultHost:
        host = FaultHost(tmp_path, **settings)
        made.append(host)
        host.start_production()
        return host

    yield make
    for host in made:
        host.clean_up()
