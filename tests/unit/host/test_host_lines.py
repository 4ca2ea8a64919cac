"""Damaged lines of a manifest that are still JSON: named as what they are, noted, and so redone by the next extract."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import host_data as h
import pytest

from hsx_host import contract as c
from hsx_host import converted, formats, plan, verify
from hsx_host.errors import Refused
from hsx_host.manifest import Published, published_lines, resume, rewrite
from hsx_host.shards import ShardFiles, read_input


def renamed(line: Published, name: str) -> Published:
    """A bit flipped in the name of a checksum."""
    crcs = {name[:-1] + chr(ord(name[-1]) ^ 1) if key == name else key: crc for key, crc in line.crc32.items()}
    return replace(line, crc32=crcs)


def every_name(line: Published) -> list[str]:
    return list(line.crc32)


DAMAGE: dict[str, Callable[[Published], Published]] = {
    **{f"checksum {i}": lambda line, i=i: renamed(line, every_name(line)[i % len(line.crc32)]) for i in range(6)},
    "no checksums": lambda line: replace(line, crc32={}),
    "a checksum too many": lambda line: replace(line, crc32={**line.crc32, "more": 1}),
    "1 token more": lambda line: replace(line, tokens=line.tokens + 1),
    "no tokens": lambda line: replace(line, tokens=0),
    "tokens below 0": lambda line: replace(line, tokens=-line.tokens),
    "2^31 tokens": lambda line: replace(line, tokens=1 << 31),
    "10^18 tokens": lambda line: replace(line, tokens=10**18),
    "10^30 tokens": lambda line: replace(line, tokens=10**30),
    "10^600 tokens": lambda line: replace(line, tokens=10**600),
}


@pytest.mark.parametrize("name", formats.names())
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_line_that_does_not_fit_the_format_is_named_and_redone(tmp_path: Path, name: str, damage: str) -> None:
    spec = h.make_spec(tmp_path, h.write_lines(tmp_path / "d.jsonl", h.samples(4)), formats=[name], proof_samples=4)
    plan.run(spec, Namespace(dry_run=False, failed=False))
    dataset = h.publish(spec)
    files = ShardFiles(dataset, 0)
    lines = published_lines(files.manifest)
    lines[2] = DAMAGE[damage](lines[2])
    rewrite(files.manifest, lines.values())
    with pytest.raises(Refused) as e:
        verified(spec)
    told = [f"row 2: {lines[2].file}: its line does not fit the format", "row 2 was found damaged: its line can't be"]
    assert any(text in str(e.value) for text in told)
    assert "swapped" not in str(e.value)
    assert sorted(resume(dataset, files.manifest, read_input(files).hashes(), lambda text: None)) == [0, 1, 3]


@pytest.mark.parametrize("file", ["v1/\0x", "v1/" + "x" * 300, "", "v1", "v1/data_0.pt/x", "\ud800"])
def test_a_name_that_no_file_can_have_is_damage(tmp_path: Path, file: str) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1/data_0.pt").touch()
    line = Published(0, 5, file, 0, "0" * 32, {}, 1, "r", 1.0)
    assert converted.file_wrong(tmp_path, line, formats.get("speculators_v1"), h.SHAPE, False)


def verified(spec: c.RunSpec) -> c.VerifyReport:
    report: c.VerifyReport = verify.run(spec, Namespace(deep=True, shard=None, window_ended=False))
    return report
