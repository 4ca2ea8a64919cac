"""The manifest as the only truth: crashes in the middle, missing, cut and foreign files."""

from __future__ import annotations

import errno
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import host_data as h
import pytest

from hsx_host import contract as c
from hsx_host import plan, verify
from hsx_host.errors import Refused, TryAgain
from hsx_host.manifest import Failed, Ledger, Published, failures, newest, read_lines, remove_leftovers, resume
from hsx_host.shards import ShardFiles, read_input


@pytest.fixture
def made(tmp_path: Path) -> tuple[c.RunSpec, Path, ShardFiles]:
    """Four published samples of one shard."""
    spec = h.make_spec(tmp_path, h.write_lines(tmp_path / "d.jsonl", h.samples(4)))
    plan.run(spec, Namespace(dry_run=False, failed=False))
    dataset = h.publish(spec)
    return spec, dataset, ShardFiles(dataset, 0)


def resumed(dataset: Path, files: ShardFiles) -> tuple[list[int], list[str]]:
    said: list[str] = []
    found = resume(dataset, files.manifest, read_input(files).hashes(), said.append)
    return sorted(found), said


def test_all_is_well(made: tuple[c.RunSpec, Path, ShardFiles]) -> None:
    _, dataset, files = made
    before = files.manifest.read_bytes()
    assert resumed(dataset, files) == ([0, 1, 2, 3], [])
    assert files.manifest.read_bytes() == before


@pytest.mark.parametrize("left", [1, 20])
def test_half_last_line_is_dropped(made: tuple[c.RunSpec, Path, ShardFiles], left: int) -> None:
    _, dataset, files = made
    lines = files.manifest.read_bytes().splitlines(keepends=True)
    files.manifest.write_bytes(b"".join(lines[:3]) + lines[3][:left])
    rows, said = resumed(dataset, files)
    assert rows == [0, 1, 2]
    assert "half written" in said[0]
    assert files.manifest.read_bytes() == b"".join(lines[:3])


@pytest.mark.parametrize("broken", [b"", b"{}", b"[]", b"1", b"[" * 100_000, b'{"type":"Published","version":1}'])
def test_a_broken_line_in_the_middle_is_refused_to_those_who_read_and_dropped_by_a_resume(
    made: tuple[c.RunSpec, Path, ShardFiles], broken: bytes
) -> None:
    _, dataset, files = made
    lines = files.manifest.read_bytes().splitlines(keepends=True)
    files.manifest.write_bytes(lines[0] + broken + b"\n" + lines[2])
    with h.refuses(Refused, "manifest.jsonl", "line 2", "extract the shard again"):
        read_lines(files.manifest, Published)
    assert resumed(dataset, files)[0] == [0, 2]
    assert files.manifest.read_bytes() == lines[0] + lines[2]


@pytest.mark.parametrize("other", [b'{"version":2}', b'{"type":"Published","version":"1.5"}'])
def test_a_line_of_another_version_is_refused_to_all(made: tuple[c.RunSpec, Path, ShardFiles], other: bytes) -> None:
    _, dataset, files = made
    files.manifest.write_bytes(files.manifest.read_bytes() + other + b"\n")
    before = files.manifest.read_bytes()
    with h.refuses(Refused, "manifest.jsonl", "line 5", "remove this line"):
        resumed(dataset, files)
    assert files.manifest.read_bytes() == before


@pytest.mark.parametrize(
    ("number", "gone"),
    [
        *((n, True) for n in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)),
        *((n, False) for n in (errno.EACCES, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENOMEM)),
    ],
)
def test_only_an_error_that_says_that_there_is_no_file_drops_a_line(
    made: tuple[c.RunSpec, Path, ShardFiles], monkeypatch: pytest.MonkeyPatch, number: int, gone: bool
) -> None:
    _, dataset, files = made
    before, real = files.manifest.read_bytes(), os.stat

    def stat(path: Any, *args: Any, **how: Any) -> os.stat_result:
        if str(path).endswith("data_2.pt"):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *args, **how)

    monkeypatch.setattr(os, "stat", stat)
    if gone:
        assert resumed(dataset, files)[0] == [0, 1, 3]
        return
    fix = {
        errno.EACCES: "make it readable", errno.EIO: "look at the disk", errno.ESTALE: "mount",
        errno.EMFILE: "ulimit -n", errno.ENOMEM: "free memory",
    }[number]  # fmt: skip
    with h.refuses(TryAgain, "file", "v1/data_2.pt", os.strerror(number), fix, "then start it again"):
        resumed(dataset, files)
    assert files.manifest.read_bytes() == before


def test_missing_and_cut_files_leave_the_manifest(made: tuple[c.RunSpec, Path, ShardFiles]) -> None:
    _, dataset, files = made
    (dataset / "v1/data_1.pt").unlink()
    os.truncate(dataset / "v1/data_3.pt", 100)
    rows, said = resumed(dataset, files)
    assert rows == [0, 2]
    assert ["row 1" in said[0], "row 3" in said[1]] == [True, True]
    assert sorted(newest(read_lines(files.manifest, Published)[0])) == [0, 2]


def test_other_sample_under_the_same_row_leaves_the_manifest(made: tuple[c.RunSpec, Path, ShardFiles]) -> None:
    spec, dataset, files = made
    lines = h.samples(4)
    lines[2] = h.line([8, 8, 8])
    h.write_lines(Path(spec.data.path), lines)
    plan.run(spec, Namespace(dry_run=False, failed=False))
    assert resumed(dataset, files) == ([0, 1, 3], ["row 2 was another sample: it leaves the manifest"])


def test_the_last_line_of_a_row_counts(made: tuple[c.RunSpec, Path, ShardFiles]) -> None:
    _, dataset, files = made
    first = read_lines(files.manifest, Published)[0][1]
    ledger: Ledger[Published] = Ledger(files.manifest)
    ledger.append(Published(**{**first.__dict__, "bytes": first.bytes + 1}))
    ledger.close()
    assert resumed(dataset, files)[0] == [0, 2, 3]


def test_leftovers_are_removed_and_other_shards_files_stay(made: tuple[c.RunSpec, Path, ShardFiles]) -> None:
    _, dataset, files = made
    for name in ("data_2.pt", "data_9.pt"):
        (dataset / "v1" / name).write_bytes(b"left by a crash, or of another shard")
    (found, _), names = resumed(dataset, files), {r: f"data_{r}.pt" for r in range(4)}
    assert found == [0, 1, 3]
    published = newest(read_lines(files.manifest, Published)[0])
    assert remove_leftovers(dataset / "v1", dataset, names, published) == ["data_2.pt"]
    assert sorted(p.name for p in (dataset / "v1").iterdir()) == [f"data_{r}.pt" for r in (0, 1, 3, 9)]


def test_a_line_that_did_not_fit_is_cut_off_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "failures.jsonl"
    ledger: Ledger[Failed] = Ledger(path)
    ledger.append(Failed(1, 2, "aa", "why", 3, 1.0))
    real = os.write  # of this one append; nothing else writes meanwhile
    calls = iter([7, None])

    def full(fd: int, data: bytes) -> int:
        room = next(calls)
        if room is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data[:room])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        ledger.append(Failed(2, 2, "bb", "why", 3, 1.0))
    monkeypatch.undo()
    ledger.append(Failed(3, 2, "cc", "why", 3, 1.0))
    assert [line.index for line in read_lines(path, Failed)[0]] == [1, 3]


@pytest.mark.parametrize("size", [1, 30, 9000])
def test_a_line_behind_a_half_written_one_is_a_line_of_its_own(tmp_path: Path, size: int) -> None:
    """Whatever the ledger: a killed writer's half line is no part of the next one's first."""
    path = tmp_path / "any.jsonl"
    for i in (1, 2):
        ledger: Ledger[Failed] = Ledger(path)
        ledger.append(Failed(i, 2, "aa", "why", 3, 1.0))
        ledger.close()
        with path.open("ab") as f:
            f.write(b"{" * size)
    Ledger(path).append(Failed(3, 2, "aa", "why", 3, 1.0))
    assert [line.index for line in read_lines(path, Failed)[0]] == [1, 2, 3]
    only = tmp_path / "only.jsonl"
    only.write_bytes(b"{" * size)
    Ledger(only).append(Failed(4, 2, "aa", "why", 3, 1.0))
    assert [line.index for line in read_lines(only, Failed)[0]] == [4]


def test_a_cut_failure_stops_neither_plan_nor_verify(made: tuple[c.RunSpec, Path, ShardFiles]) -> None:
    spec, _, files = made
    files.failures.write_bytes(b'{"index": 1, "tok\n{"index": 2,')
    assert failures(files.failures) == {}
    assert plan.run(spec, Namespace(dry_run=False, failed=True)).valid == 4
    assert verify.run(spec, Namespace(deep=False, shard=None, window_ended=False)).ok
