"""The norm beside a data set is proved itself before any sample is judged by it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

import host_data as h
import pytest

from hsx_host import contract as c
from hsx_host import convert, extract, fingerprint, verify
from hsx_host.errors import Refused
from hsx_host.formats import speculators_v1 as v1
from hsx_host.norm import NORM_FILE


def low_bit(path: Path) -> None:
    """Of the last byte: of a weight, or of eps."""
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


FAULTS: dict[str, Callable[[Path], object]] = {
    "zeros at its end": lambda p: p.write_bytes(p.read_bytes()[:-20] + bytes(20)),
    "a low bit": low_bit,
    "cut": lambda p: p.write_bytes(p.read_bytes()[:50]),
    "empty": lambda p: p.write_bytes(b""),
    "gone": lambda p: p.unlink(),
    "its hash damaged": lambda p: p.with_suffix(".sha256").write_text("0" * 63),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_no_sample_is_blamed_for_a_damaged_norm_and_a_whole_shard_gets_it_anew(shard: c.RunSpec, fault: str) -> None:
    extract.run(shard, Namespace(shard=0, stop_after=0.0))
    dataset, _ = fingerprint.opened(shard)
    kept = dataset / NORM_FILE
    norm, before = kept.read_bytes(), {p.name: p.stat().st_ino for p in (dataset / "v1").iterdir()}
    FAULTS[fault](kept)
    for deep in (False, True):
        with h.refuses(Refused, NORM_FILE, "the final norm is", "extract any shard"):
            verify.run(shard, Namespace(deep=deep, shard=None, window_ended=False))
    assert not (dataset / "shards/00000/damaged.jsonl").exists()
    done = extract.run(shard, Namespace(shard=0, stop_after=0.0))
    assert (done.extracted, done.published) == (0, 6)
    assert kept.read_bytes() == norm
    assert {p.name: p.stat().st_ino for p in (dataset / "v1").iterdir()} == before
    assert verify.run(shard, Namespace(deep=True, shard=None, window_ended=False)).ok


def test_a_data_set_without_a_hash_gets_one(shard: c.RunSpec) -> None:
    extract.run(shard, Namespace(shard=0, stop_after=0.0))
    dataset, _ = fingerprint.opened(shard)
    known = dataset / "final_norm.sha256"
    text = known.read_text()
    known.unlink()
    assert verify.run(shard, Namespace(deep=True, shard=None, window_ended=False)).ok
    (dataset / "v1/data_1.pt").unlink()
    extract.run(shard, Namespace(shard=0, stop_after=0.0))
    assert known.read_text() == text


def test_no_damaged_norm_is_converted_by(shard: c.RunSpec, tmp_path: Path) -> None:
    extract.run(shard, Namespace(shard=0, stop_after=0.0))
    dataset, _ = fingerprint.opened(shard)
    low_bit(dataset / NORM_FILE)
    parser, out = ArgumentParser(), tmp_path / "converted"
    convert.add_arguments(parser)
    with h.refuses(Refused, NORM_FILE, "is damaged"):
        convert.run(shard, parser.parse_args(["--format", "specforge", "--out", str(out)]))
    assert not list(out.glob("**/*.ckpt"))


def test_a_damaged_norm_without_a_hash_is_taken_anew(shard: c.RunSpec) -> None:
    extract.run(shard, Namespace(shard=0, stop_after=0.0))
    dataset, _ = fingerprint.opened(shard)
    (dataset / "final_norm.sha256").unlink()  # a data set of an earlier version
    right = (dataset / NORM_FILE).read_bytes()
    (dataset / NORM_FILE).write_bytes(b"")
    with h.refuses(Refused, NORM_FILE, "is damaged", "extract any shard"):
        verify.run(shard, Namespace(deep=False, shard=None, window_ended=False))
    extract.run(shard, Namespace(shard=0, stop_after=0.0))
    assert (dataset / NORM_FILE).read_bytes() == right


def test_what_deep_found_beside_a_damaged_norm_is_noted(shard: c.RunSpec) -> None:
    extract.run(shard, Namespace(shard=0, stop_after=0.0))
    dataset, _ = fingerprint.opened(shard)
    low_bit(dataset / NORM_FILE)
    file = dataset / "v1/data_3.pt"
    data = bytearray(file.read_bytes())
    data[v1.check(file, 8, h.SHAPE)[1]["layer_1"][0]] ^= 1
    file.write_bytes(data)
    with h.refuses(Refused, NORM_FILE):
        verify.run(shard, Namespace(deep=True, shard=None, window_ended=False))
    assert extract.run(shard, Namespace(shard=0, stop_after=0.0)).extracted == 1
    assert verify.run(shard, Namespace(deep=True, shard=None, window_ended=False)).ok
