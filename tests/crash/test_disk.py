"""A disk that is really full, a small tmpfs: a clean stop with 75 and the bytes that are needed, then a resume."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import crashes
import pytest
from crashes import Setting, Tally
from extraction_host import Host

from hsx_host.formats import Shape
from hsx_host.formats import speculators_v1 as v1
from hsx_host.manifest import Ledger, Published, read_lines

MEGABYTE = 1 << 20


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """16 MiB of tmpfs."""
    where = tmp_path / "small"
    where.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(where)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"this login may not mount a tmpfs: {done.stderr.strip()}")
    yield where
    subprocess.run(["umount", str(where)], check=True)


def fill(where: Path, free: int) -> Path:
    """A ballast file that leaves ``free`` bytes."""
    disk = os.statvfs(where)
    ballast = where / "ballast"
    with ballast.open("wb") as f:
        f.write(bytes(max(0, disk.f_bavail * disk.f_frsize - free)))
    return ballast


def test_full_in_the_middle_of_a_sample_then_of_the_handoff(setting: Setting, small: Path) -> None:
    """Four files of 190 kB are begun at once where 300 kB are free: every check beforehand passes, the writers fail."""
    data = setting.data.with_name("full.jsonl")
    shutil.copy(setting.data, data)
    host = setting.host.with_data(data)
    host = Host(setting.host.root, replace(host.spec, host=replace(host.spec.host, output_root=str(small))))
    host.verb("plan")
    ballast = fill(small, 300_000)
    said = host.verb("extract", "--shard", "0", code=75)
    left = [n for row, n in enumerate(crashes.LENGTHS) if row not in host.manifest()]
    shape = Shape([*(f"layer_{k}" for k in host.spec.capture.layers), "final"], 96, "bfloat16")
    needed = sum(v1.file_bytes(n, shape) for n in left)
    assert "no space" in said["message"]
    assert f"{len(left)} samples of shard 00000 are left, which need {needed} bytes" in said["message"]
    assert [p.name for p in host.dataset.rglob("*.part")] == []
    assert host.verb("verify", code=75)["kind"] == "again"
    ballast.unlink()
    host.verb("extract", "--shard", "0")
    assert host.verb("verify", "--deep")["ok"]
    crashes.compare(setting.whole, host, Tally())

    before = set(host.dataset.rglob("*"))
    ballast = fill(small, 0)
    said = host.verb("handoff", code=75)
    assert "no space" in said["message"]
    assert "bytes" in said["message"]
    made = {str(path.relative_to(host.dataset)) for path in set(host.dataset.rglob("*")) - before}
    assert made <= {"handoff.lock", "v1/sample_lengths.json"}
    assert not (host.dataset / "handoff.json").exists()
    ballast.unlink()
    assert host.verb("handoff")["samples"] == len(crashes.LENGTHS)
    crashes.nothing_left(host)


def test_full_in_the_middle_of_a_manifest_line(small: Path) -> None:
    """A line across the end of the last free page: its half fits, the rest does not, and the half goes again."""
    ledger: Ledger[Published] = Ledger(small / "manifest.jsonl")

    def line(i: int) -> Published:
        return Published(i, 7, f"v1/data_{i}.pt", 1000, "0" * 32, {"final": 1}, 5, "hsx-1", 1.0)

    ledger.append(line(0))
    ballast = fill(small, 0)
    written = 1

    def append_on() -> None:
        nonlocal written
        for i in range(1, 1000):
            ledger.append(line(i))
            written += 1

    with pytest.raises(OSError, match="No space left"):
        append_on()
    assert 1 < written < 1000
    lines, half = read_lines(small / "manifest.jsonl", Published)
    assert ([one.index for one in lines], half) == (list(range(written)), False)
    ballast.unlink()
    ledger.append(line(written))
    ledger.close()
    assert len(read_lines(small / "manifest.jsonl", Published)[0]) == written + 1


def test_requests_that_time_out_are_in_the_ledger_and_leave_nothing(setting: Setting) -> None:
    """The client gives up long before the server is done: the reason is told, no file stays, and a resume is whole."""
    data = setting.data.with_name("late.jsonl")
    shutil.copy(setting.data, data)
    late = setting.host.with_data(data, request_timeout_s=0.002)
    late.verb("plan")
    said = late.verb("extract", "--shard", "0", code=75)
    assert "are not published" in said["message"]
    failed = [json.loads(x) for x in (late.dataset / "shards/00000/failures.jsonl").read_text().splitlines()]
    assert len(failed) + len(late.manifest()) == len(crashes.LENGTHS)
    assert failed
    assert {f["tries"] for f in failed} == {2}
    assert all("no answer from the server" in f["reason"] or "no record" in f["reason"] for f in failed), failed[0]
    assert [p.name for p in late.dataset.rglob("*.part")] == []
    made = setting.host.with_data(data)
    made.verb("extract", "--shard", "0")
    assert made.verb("verify", "--deep")["ok"]
    crashes.nothing_left(made)
    crashes.compare(setting.whole, made, Tally())
