"""A host of a test's own, with a stand-in server; and no test leaves a process.

Guards, and the servers that they bring back, outlive what started them, as they should.
"""

from __future__ import annotations

import os
import signal
import subprocess
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import host_data as h
import pytest
from host_lifecycle import clean_up, make_spec
from host_stand_in import StandIn, serve_extraction

from hsx_host import borrow, extract, plan, serve
from hsx_host import contract as c


@pytest.fixture
def spec(tmp_path: Path) -> Iterator[c.RunSpec]:
    """A run against a home of its own; what it leaves is stopped by its records."""
    spec = make_spec(tmp_path)
    yield spec
    clean_up(spec)


@pytest.fixture
def by_hand() -> Iterator[list[subprocess.Popen[bytes]]]:
    found: list[subprocess.Popen[bytes]] = []
    yield found
    for p in found:
        p.kill()
        p.wait()


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_PAUSES_S", (0.01, 0.01))


@pytest.fixture
def borrowed(spec: c.RunSpec) -> c.RunSpec:
    """Extraction under the run's lease, as its setups leave it."""
    spec = replace(spec, lease_ttl_s=300.0)
    serve.ensure(spec, "production")
    borrow.acquire(spec, by_step=False)
    serve.ensure(spec, "extraction")
    return spec


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StandIn]:
    (tmp_path / "spool").mkdir()
    made = StandIn(tmp_path / "spool")
    yield made
    made.close()


@pytest.fixture
def shard(server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> c.RunSpec:
    """A planned shard of six samples, with the stand-in as its extraction server."""
    spec = h.make_spec(
        tmp_path, h.write_lines(tmp_path / "d.jsonl", h.samples(6)), shard_size=8, tries=3, request_timeout_s=20.0
    )
    plan.run(spec, Namespace(dry_run=False, failed=False))
    serve_extraction(server, spec, monkeypatch)
    return spec


@pytest.fixture
def whole(server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[c.RunSpec, StandIn]:
    """Two extracted shards of four samples, from the stand-in."""
    spec = h.make_spec(tmp_path, h.write_lines(tmp_path / "d.jsonl", h.samples(8)), shard_size=4)
    plan.run(spec, Namespace(dry_run=False, failed=False))
    serve_extraction(server, spec, monkeypatch)
    for shard in (0, 1):
        extract.run(spec, Namespace(shard=shard, stop_after=0.0))
    return spec, server


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ends what still has the test's own folder on its command line, until nothing does: guards start each other."""
    if "tmp_path" not in request.fixturenames:
        yield
        return
    folder = os.fsencode(request.getfixturevalue("tmp_path"))
    yield
    while left := _with_argument(folder):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _with_argument(folder: bytes) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if folder + b"/" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found
