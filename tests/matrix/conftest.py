"""Servers of one setting each, of ``tests/system``'s parts; run in every environment of ``make test-matrix``."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "system"))

import models
import sglang_server
from capture_client import Client

LAYERS = {"llama": [2, 4, 7], "qwen3_moe": [1, 3, 5]}


def pytest_configure(config: pytest.Config) -> None:
    """End on SIGTERM as on Ctrl-C: fixtures are torn down, so no server outlives the tests."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.build("llama", tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture
def capturing(tmp_path: Path) -> Iterator[Callable[..., Client]]:
    """A server with the plugin and a client of its spool; options go to ``sglang_server.start``. Stopped at the end."""
    started: list[sglang_server.Server] = []

    def start(model: Path, kind: str = "llama", **options: Any) -> Client:
        spool = tmp_path / f"spool{len(started)}"
        spool.mkdir()
        client = Client(spool, LAYERS[kind], models.HIDDEN[kind], models.BLOCKS[kind])
        log = tmp_path / f"server{len(started)}.log"
        client.server = sglang_server.start(model, log, spec=client.write_spec(), **options)
        started.append(client.server)
        return client

    yield start
    for server in started:
        server.stop()
