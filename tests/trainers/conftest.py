"""One data set that real SGLang made, in every format, with every kind of sample that a reader may stumble over."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "system"))

import extraction_host
import models
from extraction_host import Host
from trainer_data import REJECT, write_data


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama checkpoint: 8 blocks, hidden 96, bf16, whose layers differ by more than rounding."""
    return models.build("llama", tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Host:
    """The data set, extracted, derived in all other formats, and handed off."""
    from dataclasses import replace

    root = tmp_path_factory.mktemp("trainers")
    spec = extraction_host.spec_of(root, tiny_llama, write_data(root / "chat.jsonl"), max_rejects=1)
    formats = ["speculators_v1", "speculators", "specforge", "modelopt"]
    host = Host(root, replace(spec, capture=replace(spec.capture, formats=formats)))
    host.verb("plan")
    host.verb("acquire")
    try:
        host.verb("serve", "extraction")
        host.verb("extract", "--shard", "0")
    finally:
        host.verb("serve", "stopped")
        host.verb("release", "--abandon")
    host.verb("convert")
    host.verb("verify", "--deep")
    host.verb("vocab", "--size", "64")
    host.verb("handoff")
    return host


@pytest.fixture(scope="session")
def samples(made: Host) -> dict[int, dict[str, Any]]:
    """The data file's samples by row."""
    lines = Path(made.spec.data.path).read_text().splitlines()
    return {row: json.loads(line) for row, line in enumerate(lines) if row != REJECT}
