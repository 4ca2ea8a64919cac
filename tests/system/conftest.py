"""Session fixtures of the system tests: tiny checkpoints, and real SGLang servers on them.

A server start takes 15 s and more, so servers are shared by session; tests must not leave state in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import sglang_server


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
