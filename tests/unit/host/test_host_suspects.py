"""A sample that kills the server at each try."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import host_data as h
from host_stand_in import Change, StandIn, extracted, files_of

from hsx_host import contract as c
from hsx_host import plan
from hsx_host.errors import TryAgain
from hsx_host.manifest import Failed, Published, failures, read_lines
from hsx_host.spool import CaptureRecord


def killing(server: StandIn, *rows: int) -> Change:
    """The server dies whenever one of these rows (of 5 + row tokens) is asked for."""

    def dies(answer: dict[str, Any], record: CaptureRecord) -> tuple[dict[str, Any], CaptureRecord | None]:
        if record.rows - 5 in rows:
            server.alive = False
        return answer, record if server.alive else None

    return dies


def again(spec: c.RunSpec, server: StandIn) -> Exception | c.ShardSummary:
    """One more call, on a server that was started anew."""
    server.alive = True
    try:
        return extracted(spec)
    except TryAgain as e:
        return e


def test_a_sample_that_kills_the_server_never_ends_a_shard(shard: c.RunSpec, server: StandIn) -> None:
    """Death in company, death alone, then the rest: and the sample stands in the ledger with the reason."""
    server.change = killing(server, 2)
    spec = replace(shard, data=replace(shard.data, concurrency=6))
    files = files_of(spec)
    assert "server is gone" in str(again(spec, server))
    assert read_lines(files.failures, Failed)[0] == []
    before = {line.index for line in read_lines(files.manifest, Published)[0]}
    assert "server is gone" in str(again(spec, server))
    last = again(spec, server)
    assert "1 of 6 samples" in str(last)
    assert "row 2 after 2 tries: the server died 2 times while this sample was in flight, the last" in str(last)
    assert {line.index for line in read_lines(files.manifest, Published)[0]} == {0, 1, 3, 4, 5} >= before
    (line,) = failures(files.failures).values()
    assert (line.index, line.tries) == (2, 2)
    asked = len(server.rids)
    assert "1 of 6 samples" in str(again(spec, server)), "the shard still says what it lacks"
    assert len(server.rids) == asked, "the sample was sent to the server again"


def test_each_of_several_killers_is_found(shard: c.RunSpec, server: StandIn) -> None:
    server.change = killing(server, 1, 4)
    spec = replace(shard, data=replace(shard.data, concurrency=6))
    for _ in range(5):
        last = again(spec, server)
        if "of 6 samples" in str(last):
            break
    assert "2 of 6 samples" in str(last)
    assert {line.index for line in read_lines(files_of(spec).failures, Failed)[0]} == {1, 4}


def test_a_suspect_that_did_nothing_is_published_and_forgotten(shard: c.RunSpec, server: StandIn) -> None:
    server.change = killing(server, 0, 1, 2, 3, 4, 5)  # the server is killed by somebody else
    spec = replace(shard, data=replace(shard.data, concurrency=6))
    assert "server is gone" in str(again(spec, server))
    assert files_of(spec).suspects.exists()
    server.change = None
    last = again(spec, server)
    assert isinstance(last, c.ShardSummary)
    assert last.published == 6
    assert not files_of(spec).suspects.exists()


def test_another_run_asks_a_killer_once_more(shard: c.RunSpec, server: StandIn) -> None:
    server.change = killing(server, 3)
    spec = replace(shard, data=replace(shard.data, concurrency=6))
    for _ in range(3):
        last = again(spec, server)
    assert "1 of 6 samples" in str(last)
    server.change, asked = None, len(server.rids)
    last = again(replace(spec, run_id="the next night"), server)
    assert isinstance(last, c.ShardSummary)
    assert (last.published, last.failed, len(server.rids)) == (6, 0, asked + 1)


def test_another_sample_in_the_row_is_no_suspect(shard: c.RunSpec, server: StandIn) -> None:
    server.change = killing(server, 3)
    spec = replace(shard, data=replace(shard.data, concurrency=6))
    for _ in range(3):
        again(spec, server)
    lines = h.samples(6)
    lines[3] = h.line([9] * 40)
    h.write_lines(Path(spec.data.path), lines)
    plan.run(spec, Namespace(dry_run=False, failed=False))
    last = again(spec, server)
    assert isinstance(last, c.ShardSummary)
    assert last.published == 6
