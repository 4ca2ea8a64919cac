"""Whatever happens to a data set's files: ``verify`` names it, and the next ``extract`` of the shard repairs it."""

from __future__ import annotations

import json
import os
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import host_data as h
import pytest
from host_stand_in import StandIn

from hsx_host import contract as c
from hsx_host import convert, extract, fingerprint, handoff, plan, verify
from hsx_host.errors import HsxError, Refused
from hsx_host.formats import speculators_v1 as v1
from hsx_host.shards import ShardFiles


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as f:
        f.seek(at)
        byte = f.read(1)
        f.seek(at)
        f.write(bytes([byte[0] ^ 1]))


def inside(dataset: Path, plane: str) -> int:
    return v1.check(dataset / "v1/data_2.pt", 7, h.SHAPE)[1][plane][0] + 11


def second_manifest(dataset: Path) -> None:
    source = ShardFiles(dataset, 0).manifest
    source.with_name("manifest copy.jsonl").write_bytes(source.read_bytes())


def other_shards_lines(dataset: Path) -> None:
    first, second = ShardFiles(dataset, 0).manifest, ShardFiles(dataset, 1).manifest
    with first.open("ab") as f:
        f.write(second.read_bytes())


def cut_line(dataset: Path, number: int) -> None:
    path = ShardFiles(dataset, 0).manifest
    lines = path.read_bytes().splitlines(keepends=True)
    cut = lines[number][: len(lines[number]) // 2]
    lines[number] = cut + (b"\n" if number < len(lines) - 1 else b"")
    path.write_bytes(b"".join(lines))


def header_of_another(dataset: Path) -> None:
    path = dataset / "v1/data_2.pt"
    path.unlink()
    h.sample_file(path, [1] * 7, [1] * 7, h.states(7, seed=5))


def other_line(dataset: Path, old: bytes, new: bytes) -> None:
    """Row 2's line of the manifest, with other bytes in it."""
    path = ShardFiles(dataset, 0).manifest
    lines = path.read_bytes().splitlines(keepends=True)
    (one,) = (line for line in lines if b'"index":2,' in line)
    assert old in one
    path.write_bytes(b"".join(lines).replace(one, one.replace(old, new, 1)))


def other_value(dataset: Path, name: str, value: object) -> None:
    """Row 2's line of the manifest, with another value."""
    path = ShardFiles(dataset, 0).manifest
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["index"] == 2:
            line[name] = value
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def folder_for_file(dataset: Path, *, full: bool) -> None:
    (dataset / "v1/data_2.pt").unlink()
    (dataset / "v1/data_2.pt").mkdir()
    if full:
        (dataset / "v1/data_2.pt/x").write_text("x")


FAULTS: dict[str, tuple[Callable[[Path], object], str, int]] = {
    "cut file": (lambda d: os.truncate(d / "v1/data_2.pt", 3000), "row 2 has a file of 3000 bytes", 1),
    "empty file": (lambda d: os.truncate(d / "v1/data_2.pt", 0), "row 2 has a file of 0 bytes", 1),
    "missing file": (lambda d: (d / "v1/data_2.pt").unlink(), "row 2 has no file v1/data_2.pt", 1),
    "flipped bit in a plane": (
        lambda d: flip(d / "v1/data_2.pt", inside(d, "layer_3")), "layer_3 does not match its checksum", 1
    ),
    "flipped bit in the ids": (
        lambda d: flip(d / "v1/data_2.pt", inside(d, "input_ids")), "input_ids does not match its checksum", 1
    ),
    "flipped bit in the mask": (
        lambda d: flip(d / "v1/data_2.pt", inside(d, "loss_mask")), "loss_mask does not match its checksum", 1
    ),
    "another sample's file": (header_of_another, "row 2: v1/data_2.pt: its header has other checksums", 1),
    "last line cut": (lambda d: cut_line(d, 3), "is in no manifest", 1),
    "a line in the middle cut": (lambda d: cut_line(d, 1), "line 2 can't be read", 1),
    "no manifest": (lambda d: ShardFiles(d, 0).manifest.unlink(), "is in no manifest", 4),
    "two manifests": (second_manifest, "shards/00000/manifest copy.jsonl stands beside the manifest", 0),
    "another shard's lines": (other_shards_lines, "row 4 is published, but is not in the plan", 0),
    "a killed writer's file": (
        lambda d: (ShardFiles(d, 0).folder / ".manifest.jsonl.77.tmp").write_text("x"),
        ".manifest.jsonl.77.tmp stands beside", 0,
    ),
    "another run's leftover": (lambda d: (d / "v1/data_99.pt").write_bytes(b"x"), "v1/data_99.pt is in no manifest", 0),
    "a folder under a sample's name": (lambda d: folder_for_file(d, full=False), "row 2 has no file v1/data_2.pt", 1),
    "a full one": (lambda d: folder_for_file(d, full=True), "row 2 has no file v1/data_2.pt", 1),
    "a blank line": (lambda d: other_line(d, b"{", b"\n{"), "can't be read", 0),
    "a blank line behind all": (lambda d: other_line(d, b"}\n", b"}\n\n"), "can't be read", 0),
    "noise": (lambda d: other_line(d, b"{", b"\xff\0\xfe{"), "can't be read", 1),
    **{
        f"{new!r} for {old!r}": (lambda d, old=old, new=new: other_line(d, old, new), "can't be read", 1)
        for old, new in (
            (b'"tokens"', b'"tokenr"'), (b'"crc32":', b'"crc33":'), (b'"type"', b'"typd"'),
            (b'"version"', b'"versiom"'), (b'"Published"', b'"Publisheb"'), (b'"index":2,', b'"index":{},'),
            (b'"index":2,', b'"index":"2",'),
        )
    },
    **{
        f"{name} = {value!r}"[:40]: (lambda d, name=name, value=value: other_value(d, name, value), words, 1)
        for name, value, words in (
            *(("tokens", n, "row 2 was found damaged: its line can't be") for n in (10**18, 10**40, 0, -7)),
            ("bytes", -1, "row 2 was found damaged: its line can't be"),
            ("next_token", -3, "row 2 was found damaged: its line can't be"),
            *(("crc32", {"input_ids": n}, "row 2 was found damaged: its line can't be") for n in (-1, 2**32)),
            *(
                ("file", name, "row 2 was found damaged: its line can't be")
                for name in ("v1/\0x", "v1/\ud800", "/etc/passwd", "../x", "v1/../../x")
            ),
            *(("file", name, "row 2 has no file") for name in ("", "v1", "x" * 5000, "v1/data_1.pt/x")),
            ("ids_hash", "no hexadecimal digits", "can't be read"),
            *(("time", n, "can't be read") for n in (float("nan"), float("inf"), 10**400)),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_and_repaired(whole: tuple[c.RunSpec, StandIn], fault: str) -> None:
    spec, server = whole
    dataset, _ = fingerprint.opened(spec)
    assert verify.run(spec, Namespace(deep=True, shard=None, window_ended=False)).ok
    before = {p.name: p.read_bytes() for p in (dataset / "v1").iterdir()}
    spoil, words, redone = FAULTS[fault]
    spoil(dataset)
    with pytest.raises(HsxError) as told:
        verify.run(spec, Namespace(deep=True, shard=None, window_ended=False))
    assert words in str(told.value)
    asked = len(server.rids)
    assert extract.run(spec, Namespace(shard=0, stop_after=0.0)).extracted == redone
    assert len(server.rids) == asked + redone, "more than the damaged samples was redone"
    report = verify.run(spec, Namespace(deep=True, shard=None, window_ended=False))
    assert (report.ok, report.samples) == (True, 8)
    assert {p.name: p.read_bytes() for p in (dataset / "v1").iterdir()} == before
    assert sorted(p.name for p in ShardFiles(dataset, 0).folder.iterdir()) == [
        "failures.jsonl", "input.safetensors", "lock", "manifest.jsonl",
    ]  # fmt: skip


def deep(spec: c.RunSpec, *, expect: str) -> None:
    with pytest.raises(HsxError) as told:
        verify.run(spec, Namespace(deep=True, shard=None, window_ended=False))
    assert expect in str(told.value)


def test_a_sample_known_to_be_damaged_counts_nowhere_until_it_is_redone(whole: tuple[c.RunSpec, StandIn]) -> None:
    """Header and size are right: without the note of ``verify --deep`` every quicker look would take it for whole."""
    spec, _ = whole
    dataset, _ = fingerprint.opened(spec)
    flip(dataset / "v1/data_2.pt", inside(dataset, "layer_3"))
    deep(spec, expect="row 2: v1/data_2.pt: layer_3 does not match its checksum")
    with pytest.raises(HsxError, match="row 2 was found damaged: layer_3 does not match its checksum"):
        verify.run(spec, Namespace(deep=False, shard=None, window_ended=False))
    with h.refuses(Refused, "data.name", "row 2 was found damaged"):
        handoff.run(spec, Namespace(window_ended=False))
    planned = plan.run(spec, Namespace(dry_run=False, failed=False))
    assert (planned.todo, planned.done, [s.id for s in planned.shards]) == (1, 7, [0])
    deep(spec, expect="row 2 was found damaged")  # told again as long as it stands
    assert extract.run(spec, Namespace(shard=0, stop_after=0.0)).extracted == 1
    assert verify.run(spec, Namespace(deep=True, shard=None, window_ended=False)).ok


def test_a_sample_known_to_be_damaged_gets_no_second_name(whole: tuple[c.RunSpec, StandIn]) -> None:
    """A line inserted into the data file moves every later sample, but not the damaged one: it is extracted anew."""
    spec, _ = whole
    dataset, _ = fingerprint.opened(spec)
    flip(dataset / "v1/data_2.pt", inside(dataset, "layer_3"))
    deep(spec, expect="layer_3 does not match its checksum")
    h.write_lines(Path(spec.data.path), [h.line([9, 9]), *h.samples(8)])
    planned = plan.run(spec, Namespace(dry_run=False, failed=False))
    assert (planned.todo, planned.moved, planned.done) == (2, 7, 7)
    for shard in (0, 1, 2):
        extract.run(spec, Namespace(shard=shard, stop_after=0.0))
    report = verify.run(spec, Namespace(deep=True, shard=None, window_ended=False))
    assert (report.ok, report.samples) == (True, 9)


def test_a_line_of_another_version_is_not_dropped(whole: tuple[c.RunSpec, StandIn]) -> None:
    """A newer hsx may have written it: a day's work is not thrown away without a word."""
    spec, _ = whole
    manifest = ShardFiles(fingerprint.opened(spec)[0], 0).manifest
    manifest.write_bytes(manifest.read_bytes().replace(b'"version":1', b'"version":2'))
    before = manifest.read_bytes()
    with h.refuses(Refused, "manifest.jsonl", "line 1 can't be read", "version 2"):
        extract.run(spec, Namespace(shard=0, stop_after=0.0))
    assert manifest.read_bytes() == before


def test_another_versions_line_names_a_fix_that_works(whole: tuple[c.RunSpec, StandIn]) -> None:
    spec, _ = whole
    manifest = ShardFiles(fingerprint.opened(spec)[0], 0).manifest
    before = manifest.read_bytes()
    other_line(fingerprint.opened(spec)[0], b'"version":1', b'"version":2')
    for verb in (
        lambda: extract.run(spec, Namespace(shard=0, stop_after=0.0)),
        lambda: plan.run(spec, Namespace(dry_run=False, failed=False)),
    ):
        with h.refuses(Refused, "manifest.jsonl", "version 2", "or remove this line"):
            verb()
    manifest.write_bytes(b"".join(x for x in manifest.read_bytes().splitlines(True) if b'"version":2' not in x))
    assert extract.run(spec, Namespace(shard=0, stop_after=0.0)).extracted == 1
    assert len(manifest.read_bytes().splitlines()) == len(before.splitlines())


NOTES = {
    "empty": b"", "a blank line": b"\n", "noise": b"\xff\0\xfe\n", "another document": b"{}\n", "a list": b"[]\n",
    "another field": b'{"type":"%s","version":1,"indey":2}\n', "cut": b'{"type":"%s","vers',
}  # fmt: skip


@pytest.mark.parametrize("noise", NOTES)
@pytest.mark.parametrize(
    ("name", "kind"), [("failures.jsonl", b"Failed"), ("damaged.jsonl", b"Damaged"), ("suspects.json", b"Suspects")]
)
def test_a_broken_note_stands_in_nobodys_way(
    whole: tuple[c.RunSpec, StandIn], name: str, kind: bytes, noise: str
) -> None:
    spec, _ = whole
    dataset, _ = fingerprint.opened(spec)
    ShardFiles(dataset, 0).folder.joinpath(name).write_bytes(NOTES[noise].replace(b"%s", kind))
    assert plan.run(spec, Namespace(dry_run=False, failed=True)).valid == 8
    assert plan.run(spec, Namespace(dry_run=False, failed=False)).done == 8
    assert verify.run(spec, Namespace(deep=False, shard=None, window_ended=False)).ok
    (dataset / "v1/data_2.pt").unlink()
    assert extract.run(spec, Namespace(shard=0, stop_after=0.0)).extracted == 1
    assert extract.run(spec, Namespace(shard=0, stop_after=0.0)).extracted == 0


def test_a_note_that_is_a_folder_goes(whole: tuple[c.RunSpec, StandIn]) -> None:
    spec, _ = whole
    dataset, _ = fingerprint.opened(spec)
    (ShardFiles(dataset, 0).folder / "damaged.jsonl").mkdir()
    (ShardFiles(dataset, 0).folder / "damaged.jsonl/x").write_text("x")
    flip(dataset / "v1/data_2.pt", inside(dataset, "layer_3"))
    deep(spec, expect="row 2: v1/data_2.pt: layer_3 does not match its checksum")
    assert extract.run(spec, Namespace(shard=0, stop_after=0.0)).extracted == 1
    assert verify.run(spec, Namespace(deep=True, shard=None, window_ended=False)).ok


@pytest.mark.parametrize("spoil", [b"\n", b"{}\n", b"cut\n"])
def test_a_broken_line_of_a_derived_format_is_mended_by_convert(tmp_path: Path, spoil: bytes) -> None:
    data = h.write_lines(tmp_path / "d.jsonl", h.samples(6))
    spec = h.make_spec(tmp_path, data, formats=["speculators_v1", "specforge"])
    plan.run(spec, Namespace(dry_run=False, failed=False))
    dataset = h.publish(spec)
    wanted = Namespace(format="", out="", source="", shards="", limit=0, min_tokens=0, max_tokens=0, approximate=False)
    convert.run(spec, wanted)
    lines = next(dataset.glob("specforge*/hsx-samples.jsonl"))
    lines.write_bytes(spoil + b"".join(lines.read_bytes().splitlines(True)[1:]))
    with h.refuses(Refused, "hsx-samples.jsonl", "line 1 can't be read", "convert to this folder again"):
        handoff.run(spec, Namespace(window_ended=False))
    assert plan.run(spec, Namespace(dry_run=False, failed=False)).derive == 1
    assert convert.run(spec, wanted).formats[0].samples == 6
    assert len(handoff.run(spec, Namespace(window_ended=False)).formats) == 2


class Killed(BaseException):
    """What stands for kill -9: from then on nothing is cleaned up."""


@contextmanager
def killed(monkeypatch: pytest.MonkeyPatch, call: str, word: str) -> Iterator[None]:
    """Die in the call (``os.replace``, ...) that has a path with ``word`` in it."""
    where, name = {"replace": os, "rename": os, "rmtree": shutil, "link": os}[call], call
    plain = getattr(where, name)
    with monkeypatch.context() as patch:

        def dying(*paths: object, **how: object) -> object:
            if not any(word in str(path) for path in paths) or not Path(str(paths[0])).exists():
                return plain(*paths, **how)
            patch.setattr(os, "unlink", lambda *a, **k: None)
            patch.setattr(shutil, "rmtree", lambda *a, **k: None)
            raise Killed

        patch.setattr(where, name, dying)
        with pytest.raises(Killed):
            yield


KILLS = [
    ("speculators_v1", "replace", "sample_lengths"), ("specforge", "replace", "data_config"),
    ("speculators", "rmtree", ".arrow.cache.tmp"), ("speculators", "link", "hs_3"),
    ("speculators", "rename", "hidden_states"), ("speculators", "replace", "data-"),
    ("speculators", "replace", "state"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "call", "word"), KILLS)
def test_a_handoff_that_was_killed_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, call: str, word: str
) -> None:
    spec = h.make_spec(tmp_path, h.write_lines(tmp_path / "d.jsonl", h.samples(6)), formats=[name], proof_samples=2)
    plan.run(spec, Namespace(dry_run=False, failed=False))
    dataset = h.publish(spec)
    with killed(monkeypatch, call, word):
        handoff.run(spec, Namespace(window_ended=False))
    assert list(dataset.rglob(".*.tmp")), "the kill came too late to leave anything"
    report = verify.run(spec, Namespace(deep=True, shard=None, window_ended=False))
    assert report.ok, "what is unfinished is no sample"
    result = handoff.run(spec, Namespace(window_ended=False))
    assert result.samples == 6
    assert not list(dataset.rglob(".*.tmp"))


@pytest.mark.parametrize(("name", "call", "word"), [*KILLS, ("specforge", "replace", "hsx.json")])
def test_a_conversion_that_was_killed_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, call: str, word: str
) -> None:
    data = h.write_lines(tmp_path / "d.jsonl", h.samples(6))
    spec = h.make_spec(tmp_path, data, formats=["modelopt" if name == "specforge" else "speculators_v1", name])
    if name == "speculators_v1":
        spec = replace(spec, capture=replace(spec.capture, formats=["speculators", name]))
    plan.run(spec, Namespace(dry_run=False, failed=False))
    dataset = h.publish(spec)
    wanted = Namespace(format="", out="", source="", shards="", limit=0, min_tokens=0, max_tokens=0, approximate=False)
    with killed(monkeypatch, call, word):
        convert.run(spec, wanted)
    assert list(dataset.rglob(".*.tmp")), "the kill came too late to leave anything"
    assert convert.run(spec, wanted).formats[0].samples == 6
    assert len(handoff.run(spec, Namespace(window_ended=False)).formats) == 2
    assert not list(dataset.rglob(".*.tmp"))
