"""One sample asked of a server: what is whole, and each fault by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import host_data as h
import numpy as np
import pytest
import torch
from host_stand_in import FAULTS, StandIn

from hsx_host.client import Client, NoSpace, SampleFault, ServerGone
from hsx_host.dataset import Sample, identity
from hsx_host.formats import speculators_v1 as v1


def sample(tokens: int = 9, row: int = 0) -> Sample:
    ids, mask = np.arange(tokens, dtype=np.int32), np.ones(tokens, np.uint8)
    return Sample(row, ids, mask, identity(ids, mask))


def asker(server: StandIn, tmp_path: Path, timeout_s: float = 20.0) -> Client:
    return Client(server.engine(), v1, h.SHAPE, tmp_path / "tmp", timeout_s)  # type: ignore[arg-type]


def nothing_left(tmp_path: Path) -> None:
    assert list((tmp_path / "tmp").iterdir()) == []
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_good_sample_is_whole(server: StandIn, tmp_path: Path) -> None:
    got = asker(server, tmp_path).capture(sample())
    assert got.text == "9 sent, 9 dumped, 0 cached"
    assert v1.check(got.path, 9, h.SHAPE)[0] == got.crc32
    body = torch.load(got.path, weights_only=True)
    assert all(torch.equal(a, b) for a, b in zip(body["hidden_states"], h.states(9, seed=36), strict=True))
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_server_that_asks_for_a_key_gets_it(server: StandIn, tmp_path: Path) -> None:
    server.key = "k-1"
    assert asker(server, tmp_path).capture(sample()).text == "9 sent, 9 dumped, 0 cached"
    assert "k-1" not in repr(server.engine())


@pytest.mark.parametrize("kind", FAULTS)
def test_each_fault_is_named_and_leaves_nothing(server: StandIn, tmp_path: Path, kind: str) -> None:
    server.change, words = FAULTS[kind]
    with pytest.raises(SampleFault) as info:
        asker(server, tmp_path).capture(sample())
    assert words in info.value.reason
    assert not info.value.final
    nothing_left(tmp_path)


def test_no_record(server: StandIn, tmp_path: Path) -> None:
    server.change = lambda a, r: (a, None)
    with pytest.raises(SampleFault, match="wrote no record in 1 s"):
        asker(server, tmp_path, timeout_s=1.0).capture(sample())
    nothing_left(tmp_path)


@pytest.mark.parametrize(("status", "final"), [(400, True), (500, False), (503, False)])
def test_refused_requests(server: StandIn, tmp_path: Path, status: int, final: bool) -> None:
    server.status = lambda ids: status
    with pytest.raises(SampleFault, match=f"answered {status}.*stand-in refuses") as info:
        asker(server, tmp_path).capture(sample())
    assert info.value.final is final
    nothing_left(tmp_path)


def test_a_dead_server_is_no_samples_fault(server: StandIn, tmp_path: Path) -> None:
    asked = asker(server, tmp_path)
    server.close()
    with pytest.raises(ServerGone, match="takes no connection"):
        asked.capture(sample())
    server.alive = False
    with pytest.raises(ServerGone, match="a process of it has ended"):
        asked.capture(sample())
    nothing_left(tmp_path)


def test_a_full_disk_is_no_samples_fault(server: StandIn, tmp_path: Path) -> None:
    server.change = lambda a, r: (a, replace(r, error="OSError: [Errno 28] No space left on device"))
    with pytest.raises(NoSpace, match="No space left"):
        asker(server, tmp_path).capture(sample())
    nothing_left(tmp_path)


def test_every_try_has_a_rid_of_its_own(server: StandIn, tmp_path: Path) -> None:
    asked = asker(server, tmp_path)
    for _ in range(3):
        asked.capture(sample()).path.unlink()
    assert len(set(server.rids)) == 3
    assert all(rid.startswith("hsx-") for rid in server.rids)


def test_what_a_killed_client_left_in_the_spool_is_withdrawn(server: StandIn, tmp_path: Path) -> None:
    first = asker(server, tmp_path)
    for name in (f"{first._prefix}1.json", f"{first._prefix}1.done.json", f"{first._prefix}2.json"):
        (server.spool / name).write_text("{}")
    (server.spool / "hsx-of-another-shard.json").write_text("{}")
    asker(server, tmp_path)
    assert [p.name for p in server.spool.iterdir()] == ["hsx-of-another-shard.json"]
    assert sorted(server.aborted) == [f"{first._prefix}1", f"{first._prefix}2"]
