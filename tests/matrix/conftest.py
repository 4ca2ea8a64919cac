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


@pytest.fixture(scope="session")
def capturing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Client]]:
    """A server with the plugin and a client of its spool; options go to ``sglang_server.start``.

    The same options give the same server, as long as the next test wants it too: another one takes its place.
    """
    now: list[tuple[str, Client]] = []

    def stop() -> None:
        for _, client in now:
            assert client.server is not None
            client.server.stop()
        now.clear()

    def start(model: Path, kind: str = "llama", **options: Any) -> Client:
        wanted = repr((model, kind, options))
        if now and now[0][0] == wanted:
            return now[0][1]
        stop()
        folder = tmp_path_factory.mktemp("capturing")
        client = Client(folder, LAYERS[kind], models.HIDDEN[kind], models.BLOCKS[kind])
        client.server = sglang_server.start(model, folder / "server.log", spec=client.write_spec(), **options)
        now.append((wanted, client))
        return client

    yield start
    stop()
