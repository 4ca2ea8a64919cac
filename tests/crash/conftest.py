"""Crashes at seeded moments, on real SGLang: ``HSX_CRASH_MOMENTS`` a kind of crash (1; ``make test-crash``: 30).

The parts that start servers and build models are those of ``tests/system``.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "system"))

import crashes
import extraction_host
import models
from crashes import LENGTHS, Setting
from extraction_host import Host


def pytest_configure(config: pytest.Config) -> None:
    """End on SIGTERM as on Ctrl-C: fixtures are torn down, so no server outlives the tests."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was measured: how many crashes struck, and how many files were the same to the bit afterwards."""
    for line in crashes.table():
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama checkpoint: 8 blocks, hidden 96, bf16."""
    return models.build("llama", tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def setting(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Iterator[Setting]:
    """A host in extraction mode, and a data set that nothing interrupted."""
    root = tmp_path_factory.mktemp("crash")
    data = extraction_host.write_data(root / "whole.jsonl", LENGTHS, seed=11)
    spec = extraction_host.spec_of(root, tiny_llama, data, shard_size=len(LENGTHS), concurrency=4)
    host = Host(root, spec)
    host.verb("acquire")
    try:
        host.verb("serve", "extraction")
        host.verb("plan")
        host.verb("extract", "--shard", "0")
        yield Setting(host, host, data)
    finally:
        host.verb("serve", "stopped")
        host.verb("release", "--abandon")
