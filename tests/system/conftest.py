"""Session fixtures of the system tests: tiny checkpoints, and real SGLang servers on them.

A server start takes 15 s and more, so servers are shared by session; tests must not leave state in them.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import sglang_server
from capture_client import Client

LAYERS = {"llama": [2, 4, 7], "qwen3": [1, 3, 5]}


def pytest_configure(config: pytest.Config) -> None:
    """End on SIGTERM as on Ctrl-C: fixtures are torn down, so no server outlives the tests."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama checkpoint: 8 blocks, hidden 96, bf16."""
    return models.build("llama", tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random qwen3 checkpoint: 6 blocks, hidden 64, bf16."""
    return models.build("qwen3", tmp_path_factory.mktemp("tiny") / "qwen3")


@pytest.fixture(scope="session")
def start_sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., sglang_server.Server]]:
    """``sglang_server.start`` with a log of its own; whatever was started is stopped when the session ends."""
    started: list[sglang_server.Server] = []

    def start(model: Path, **options: Any) -> sglang_server.Server:
        log = tmp_path_factory.mktemp("sglang") / "server.log"
        server = sglang_server.start(model, log, **options)
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()


def _capturing(
    kind: str, model: Path, start: Callable[..., sglang_server.Server], tmp_path_factory: pytest.TempPathFactory
) -> Client:
    client = Client(tmp_path_factory.mktemp("spool"), LAYERS[kind], models.HIDDEN[kind], models.BLOCKS[kind])
    client.server = start(model, spec=client.write_spec())
    return client


@pytest.fixture(scope="session")
def capturing_llama(
    tiny_llama: Path, start_sglang: Callable[..., sglang_server.Server], tmp_path_factory: pytest.TempPathFactory
) -> Client:
    """A server of the tiny llama with the capture plugin (chunk 256, layers 2, 4, 7), and a client of its spool."""
    return _capturing("llama", tiny_llama, start_sglang, tmp_path_factory)


@pytest.fixture(scope="session")
def capturing_qwen3(
    tiny_qwen3: Path, start_sglang: Callable[..., sglang_server.Server], tmp_path_factory: pytest.TempPathFactory
) -> Client:
    """The same of the tiny qwen3 (layers 1, 3, 5)."""
    return _capturing("qwen3", tiny_qwen3, start_sglang, tmp_path_factory)
