"""A whole shard: what is published, what stands in the ledger, a full disk, the end of the window."""

from __future__ import annotations

import errno
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import host_data as h
import pytest
from host_stand_in import FAULTS, Change, StandIn, extracted, files_of, meta, planes

from hsx_host import borrow, crew, extract, plan, state
from hsx_host import contract as c
from hsx_host.errors import TryAgain
from hsx_host.formats import speculators_v1 as v1
from hsx_host.manifest import Failed, Ledger, Published, read_lines
from hsx_host.shards import ShardFiles
from hsx_host.spool import CaptureRecord


def test_shard_is_published(shard: c.RunSpec) -> None:
    summary = extracted(shard)
    assert (summary.published, summary.extracted, summary.failed) == (6, 6, 0)
    assert summary.name == "shard 00000 rows 0-5"
    assert summary.proof.startswith("6 of 6 next tokens")
    assert not files_of(shard).tmp.exists()


def test_a_fault_that_passes_costs_a_try_and_nothing_else(shard: c.RunSpec, server: StandIn) -> None:
    seen: set[int] = set()

    def once(answer: dict[str, Any], record: CaptureRecord) -> tuple[dict[str, Any], CaptureRecord]:
        first = record.rows not in seen
        seen.add(record.rows)
        return answer, planes(record, finite=False) if first else record

    server.change = once
    assert extracted(shard).published == 6
    assert len(server.rids) == 12


def test_a_fault_that_stays_is_in_the_ledger_with_its_tries(shard: c.RunSpec, server: StandIn) -> None:
    def bad(answer: dict[str, Any], record: CaptureRecord) -> tuple[dict[str, Any], CaptureRecord]:
        return answer, planes(record, finite=False) if record.rows == 7 else record  # row 2

    server.change = bad
    with h.refuses(TryAgain, "failures.jsonl", "1 of 6 samples", "row 2 after 3 tries", "layer_1 is not finite"):
        extracted(shard)
    (line,) = read_lines(files_of(shard).failures, Failed)[0]
    assert (line.index, line.tokens, line.tries) == (2, 7, 3)
    assert len(read_lines(files_of(shard).manifest, Published)[0]) == 5
    server.change, asked = None, len(server.rids)
    assert extracted(shard).extracted == 1
    assert len(server.rids) == asked + 1, "only the failed sample was asked for again"
    assert files_of(shard).failures.read_bytes() == b""


def changed(change: Change) -> Callable[[StandIn], None]:
    return lambda server: setattr(server, "change", change)


def answers(status: Callable[[list[int]], int]) -> Callable[[StandIn], None]:
    return lambda server: setattr(server, "status", status)


FULL = "OSError: [Errno 28] No space left on device"


OF_FIVE: dict[str, tuple[Change, str]] = {  # as in FAULTS, of a sample of 5 tokens instead of 9
    "rows missing": (lambda a, r: (a, replace(r, rows=4)), "5 sent, 4 dumped, 0 cached: 4 rows for 5 tokens"),
    "prompt cut": (lambda a, r: (meta(a, prompt_tokens=3), r), "the server counted 3 prompt tokens"),
}


LEDGER: dict[str, tuple[Callable[[StandIn], None], str, int]] = {
    **{kind: (changed(change), words, 2) for kind, (change, words) in (FAULTS | OF_FIVE).items()},
    "refused": (answers(lambda ids: 400), "the server answered 400: ", 1),
    "server error": (answers(lambda ids: 500), "the server answered 500: ", 2),
    "no record": (changed(lambda a, r: (a, None)), "wrote no record in 1 s", 2),
    "no answer": (answers(lambda ids: time.sleep(1.5) or 200), "no answer from the server in 1 s", 2),
    "full disk": (changed(lambda a, r: (a, replace(r, error=FULL))), f"no space: {FULL}", 1),
}


@pytest.mark.parametrize("kind", LEDGER)
def test_whatever_a_sample_failed_of_stands_in_the_ledger(
    tmp_path: Path, shard: c.RunSpec, server: StandIn, kind: str
) -> None:
    """And goes from there when the sample is published: here a shard's smallest sample, alone."""
    one = h.write_lines(tmp_path / "one.jsonl", h.samples(1))
    spec = replace(
        shard, data=replace(shard.data, path=str(one), name="one", shard_size=1, tries=2, request_timeout_s=1.0)
    )
    plan.run(spec, Namespace(dry_run=False, failed=False))
    spoil, words, tries = LEDGER[kind]
    spoil(server)
    with pytest.raises(TryAgain):
        extracted(spec)
    (line,) = read_lines(files_of(spec).failures, Failed)[0]
    assert words in line.reason
    assert (line.index, line.tokens, line.tries) == (0, 5, tries)
    assert not list(files_of(spec).dataset.rglob("*.part"))
    server.change, server.status = None, lambda ids: 200
    assert extracted(spec).extracted == 1
    assert files_of(spec).failures.read_bytes() == b""


def test_nothing_published_is_a_failure(shard: c.RunSpec, server: StandIn) -> None:
    server.status = lambda ids: 400
    with h.refuses(TryAgain, "failures.jsonl", "6 of 6 samples"):
        extracted(shard)
    assert len(server.rids) == 6, "a refused request was tried again"


def test_a_full_disk_names_the_bytes_that_are_left(shard: c.RunSpec, server: StandIn) -> None:
    count = iter(range(100))

    def full(answer: dict[str, Any], record: CaptureRecord) -> tuple[dict[str, Any], CaptureRecord]:
        return answer, replace(record, error="OSError: [Errno 28] No space left on device") if next(
            count
        ) == 2 else record

    server.change = full
    spec = replace(shard, data=replace(shard.data, concurrency=1))
    left = sum(v1.file_bytes(n, h.SHAPE) for n in (5, 6, 7, 8))  # longest first: 10 and 9 tokens were published
    with h.refuses(TryAgain, "host.output_root", "No space left", f"which need {left} bytes"):
        extracted(spec)
    (line,) = read_lines(files_of(spec).failures, Failed)[0]
    assert (line.index, line.reason[:9]) == (3, "no space:"), "of four that are left, one was tried"
    server.change = None
    assert extracted(spec).extracted == 4


def test_a_dead_server_costs_no_tries(shard: c.RunSpec, server: StandIn) -> None:
    """The third request gets no record, and the server's process is gone: no sample is to blame."""
    count = iter(range(100))

    def dies(answer: dict[str, Any], record: CaptureRecord) -> tuple[dict[str, Any], CaptureRecord | None]:
        server.alive = server.alive and next(count) < 2
        return answer, record if server.alive else None

    server.change = dies
    spec = replace(shard, data=replace(shard.data, tries=1, concurrency=1))
    with h.refuses(TryAgain, "extraction", "server is gone", "4 samples of shard 00000 are left"):
        extracted(spec)
    assert read_lines(files_of(spec).failures, Failed)[0] == []
    assert len(read_lines(files_of(spec).manifest, Published)[0]) == 2


def test_leftovers_of_a_crash_are_removed(shard: c.RunSpec) -> None:
    files = files_of(shard)
    files.tmp.mkdir(parents=True)
    (files.tmp / "hsx-old.part").write_bytes(b"x")
    folder = files.dataset / "v1"
    folder.mkdir()
    ShardFiles(files.dataset, 1).folder.mkdir()
    (folder / "data_3.pt").write_bytes(b"renamed, but not in the manifest")
    (folder / "data_8.pt").write_bytes(b"another shard's")
    (folder / "data_99.pt").write_bytes(b"of a run whose data file had more rows")
    assert extracted(shard).extracted == 6
    assert not files.tmp.exists()
    assert (folder / "data_8.pt").read_bytes() == b"another shard's"
    assert not (folder / "data_99.pt").exists()


def test_a_full_disk_at_a_line_of_the_ledger_or_the_manifest(
    shard: c.RunSpec, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the disk is full, the answer is 75 and the bytes; nothing half written counts."""
    server.change = lambda a, r: (a, planes(r, finite=False) if r.rows == 7 else r)
    whole = Ledger.append
    for kind in (Failed, Published):

        def full(self: Any, *lines: Any, kind: type = kind) -> None:
            if isinstance(lines[0], kind):
                raise OSError(errno.ENOSPC, "No space left on device")
            whole(self, *lines)

        monkeypatch.setattr(Ledger, "append", full)
        with h.refuses(TryAgain, "host.output_root", "No space left", "which need"):
            extracted(shard)
        server.change = None
        counted = {line.file for line in read_lines(files_of(shard).manifest, Published)[0]}
        assert {f"v1/{p.name}" for p in (files_of(shard).dataset / "v1").iterdir()} == counted


def test_what_is_published_together_is_published_whole_or_not_at_all(
    shard: c.RunSpec, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six samples wait for one publisher, whose sync fails once: none keeps a name, the next call has all."""
    gathered = threading.Barrier(6)
    whole, failed = crew.Crew._publish, []

    def line(self: crew.Crew, *args: Any, made: Any = crew.Crew._line) -> Published:
        gathered.wait(20)
        return cast(Published, made(self, *args))

    def publish(self: crew.Crew, batch: list[crew.Whole]) -> None:
        while len(batch) < 6:
            batch.append(cast(crew.Whole, self._whole.get(timeout=20)))
        whole(self, batch)

    def sync(folder: Path) -> None:
        failed.append(len(list(folder.glob("*.pt"))))
        raise OSError(errno.ENOSPC, "No space left on device")

    spec = replace(shard, data=replace(shard.data, concurrency=6))
    with monkeypatch.context() as m:
        m.setattr(crew.Crew, "_line", line)
        m.setattr(crew.Crew, "_publish", publish)
        m.setattr(crew, "sync_folder", sync)
        with h.refuses(TryAgain, "host.output_root", "No space left", "6 samples", "which need"):
            extracted(spec)
    assert failed == [6]
    assert list((files_of(spec).dataset / "v1").iterdir()) == []
    assert files_of(spec).manifest.read_text() == ""
    assert extracted(spec).published == 6


def test_a_full_disk_at_a_document_names_the_bytes_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    state.write_text(tmp_path / "handoff.json", "old")
    monkeypatch.setattr(state.os, "fsync", full)
    with h.refuses(TryAgain, "disk", "No space left", "handoff.json needs 1000 bytes"):
        state.write_text(tmp_path / "handoff.json", "x" * 1000)
    assert [p.name for p in tmp_path.iterdir()] == ["handoff.json"]
    assert (tmp_path / "handoff.json").read_text() == "old"


def test_the_end_of_the_window_ends_a_shard_in_good_order(
    shard: c.RunSpec, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(shard, data=replace(shard.data, concurrency=1))
    with monkeypatch.context() as m:
        m.setattr(extract._Shard, "_window_ended", lambda self: len(server.rids) >= 2)
        summary = extracted(spec)
    assert (summary.published, summary.extracted, summary.left, summary.failed) == (2, 2, 4, 0)
    assert summary.proof.startswith("2 of 2 next tokens")
    asked = len(server.rids)
    late = extract.run(spec, Namespace(shard=0, stop_after=1.0))
    assert (late.published, late.extracted, late.left) == (2, 0, 4)
    assert len(server.rids) == asked, "nothing is asked for after the window"
    assert extracted(spec).extracted == 4, "the next night goes on"


def test_samples_that_failed_stay_failures_after_the_window(shard: c.RunSpec, server: StandIn) -> None:
    server.change = lambda answer, record: (answer, planes(record, finite=record.rows != 7))
    with h.refuses(TryAgain, "failures.jsonl", "1 of 6 samples"):
        extracted(shard)
    with h.refuses(TryAgain, "failures.jsonl", "row 2 after 3 tries"):
        extract.run(shard, Namespace(shard=0, stop_after=1.0))
    assert [line.index for line in read_lines(files_of(shard).failures, Failed)[0]] == [2]


def test_a_failure_stays_in_the_ledger_until_its_sample_gets_another_verdict(
    shard: c.RunSpec, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A try that does not come to a sample says nothing of it: no server, a server that dies, a window that ends."""
    server.change = lambda answer, record: (answer, planes(record, finite=record.rows not in (5, 7)))  # rows 0 and 2
    with h.refuses(TryAgain, "failures.jsonl", "2 of 6 samples"):
        extracted(shard)
    before = files_of(shard).failures.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(borrow, "extraction_server", lambda spec: (_ for _ in ()).throw(TryAgain("the host is held")))
        with h.refuses(TryAgain, "", "held"):
            extracted(shard)
    assert files_of(shard).failures.read_bytes() == before
    assert plan.run(shard, Namespace(dry_run=False, failed=True)).todo == 2
    server.change, one_at_a_time = None, replace(shard, data=replace(shard.data, concurrency=1))
    with monkeypatch.context() as patch:  # the window ends behind the first of the two, the longer one
        patch.setattr(extract._Shard, "_window_ended", lambda self: bool(server.rids[12:]))
        server.rids += ["asked before"] * (12 - len(server.rids))
        with h.refuses(TryAgain, "failures.jsonl", "1 of 6 samples", "row 0 after 3 tries"):
            extracted(one_at_a_time)
    assert [line.index for line in read_lines(files_of(shard).failures, Failed)[0]] == [0]
    assert extracted(shard).extracted == 1
    assert files_of(shard).failures.read_bytes() == b""
