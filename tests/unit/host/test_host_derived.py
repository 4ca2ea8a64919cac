"""Formats that convert made: verify names what is wrong there, and the next convert makes it anew."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import host_data as h
import pytest

from hsx_host import contract as c
from hsx_host import convert, converted, formats, handoff, norm, plan, state, training_check, verify
from hsx_host.errors import BadInput, Refused
from hsx_host.manifest import published_lines, rewrite
from hsx_host.shards import ShardFiles

CONVERT = {"out": "", "source": "", "shards": "", "limit": 0, "min_tokens": 0, "max_tokens": 0, "approximate": False}
DERIVED = ["modelopt", "specforge", "speculators"]


def made_in(root: Path, *names: str) -> tuple[c.RunSpec, Path]:
    spec = h.make_spec(root, h.write_lines(root / "d.jsonl", h.samples(6)), formats=["speculators_v1", *names])
    plan.run(spec, Namespace(dry_run=False, failed=False))
    return spec, h.publish(spec)


def verified(spec: c.RunSpec, *, deep: bool = False, shard: list[int] | None = None) -> c.VerifyReport:
    report: c.VerifyReport = verify.run(spec, Namespace(deep=deep, shard=shard, window_ended=False))
    return report


def converts(spec: c.RunSpec, name: str = "") -> int:
    return sum(f.written for f in convert.run(spec, Namespace(format=name, **CONVERT)).formats)


def hand_off(spec: c.RunSpec) -> c.HandoffResult:
    return handoff.run(spec, Namespace(window_ended=False))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def inside(folder: Path, row: int = 3) -> tuple[Path, int]:
    """A sample's file, and the middle of its largest record."""
    one = converted.opened(folder)
    line = one.lines[row]
    places = one.form.check(folder / line.file, line.tokens, one.shape)[1].values()
    offset, size = max(places, key=lambda place: place[1])
    return folder / line.file, offset + size // 2


def file_of(folder: Path) -> Path:
    return inside(folder)[0]


def other_line(folder: Path, change: Callable[[bytes], bytes]) -> None:
    path = folder / converted.SAMPLES
    path.write_bytes(change(path.read_bytes()))


def no_lines(folder: Path) -> None:
    (folder / converted.SAMPLES).unlink()
    (folder / converted.SAMPLES / "x").mkdir(parents=True)


HEADERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped header": (lambda f: flip(file_of(f), 20), "row 3: "),
    "a cut file": (lambda f: file_of(f).write_bytes(b"x"), "has 1 bytes instead of"),
    "no file": (lambda f: file_of(f).unlink(), "No such file"),
    "a stray": (lambda f: (f / "data_99.ckpt").touch(), "data_99.ckpt is in no manifest"),
    "a dangling link": (lambda f: (f / "data_99.ckpt").symlink_to("nowhere"), "data_99.ckpt is in no manifest"),
    "a checksum's name": (
        lambda f: other_line(f, lambda d: d.replace(b'"loss_mask"', b'"loss_masj"', 1)), "does not fit the format"
    ),
    "a field's name": (lambda f: other_line(f, lambda d: d.replace(b'"tokens"', b'"tokenr"', 1)), "can't be read"),
    "a folder in the manifest's place": (no_lines, "is no file"),
}  # fmt: skip


@pytest.mark.parametrize("name", DERIVED)
@pytest.mark.parametrize("fault", HEADERS)
def test_verify_names_what_headers_tell_and_convert_mends_it(tmp_path: Path, name: str, fault: str) -> None:
    spec, dataset = made_in(tmp_path, name)
    assert verified(spec, deep=True).ok, "nothing is converted yet"
    converts(spec)
    hand_off(spec)
    spoil, words = HEADERS[fault]
    spoil(dataset / name)
    for _ in range(2):
        with h.refuses(Refused, "manifest.jsonl", f"{name}", words, "convert"):
            verified(spec)
    with pytest.raises(Refused):
        hand_off(spec)
    converts(spec)
    assert verified(spec, deep=True).ok
    assert hand_off(spec).samples == 6


@pytest.mark.parametrize("name", DERIVED)
@pytest.mark.parametrize("handed", [False, True])
def test_a_byte_that_deep_finds_is_written_again(tmp_path: Path, name: str, handed: bool) -> None:
    spec, dataset = made_in(tmp_path, name)
    converts(spec)
    if handed:
        hand_off(spec)
    path, at = inside(dataset / name)
    good = path.read_bytes()
    flip(path, at)
    assert verified(spec).ok
    for deep in (True, False, True):  # what was found stays known
        with pytest.raises(Refused, match="does not match its checksum: convert writes it again") as e:
            verified(spec, deep=deep)
        assert "extract" not in str(e.value), "that would change nothing"
        assert str(e.value).count("row 3") == 1
    assert not handoff.is_current(dataset), "else no run would convert"
    with h.refuses(Refused, "capture.formats", "does not match its checksum", "run convert"):
        hand_off(spec)
    if handed:
        trained = replace(spec, training=c.TrainingSettings("t", ["true"], name, str(tmp_path / "t"), "python"))
        with h.refuses(Refused, "handoff", "does not match its checksum"):
            training_check.run(trained, Namespace(handoff="", manifest=""))
    assert converts(spec) == 1
    assert path.read_bytes() == good
    assert verified(spec, deep=True).ok
    hand_off(spec)
    assert converts(spec) == 0


def test_what_is_still_to_be_converted_is_no_fault(tmp_path: Path) -> None:
    spec, dataset = made_in(tmp_path, "specforge")
    converts(spec)
    files = ShardFiles(dataset, 0)
    lines = published_lines(files.manifest)
    lines[2] = replace(lines[2], rid="hsx-again")  # extracted again; its old file may be gone or half replaced
    rewrite(files.manifest, lines.values())
    (dataset / "specforge" / converted.opened(dataset / "specforge").lines[2].file).unlink()
    assert verified(spec, deep=True).ok
    samples = dataset / "specforge" / converted.SAMPLES
    samples.write_bytes(b"".join(samples.read_bytes().splitlines(keepends=True)[:-1]))  # killed before its line
    assert verified(spec, deep=True).ok
    assert converts(spec) == 2


def test_a_folder_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    spec, dataset = made_in(tmp_path, "specforge")
    converts(spec)
    file_of(dataset / "specforge").unlink()
    with state.locked(dataset / "specforge" / converted.LOCK, wait_s=0, what="a conversion"):
        assert verified(spec).ok
    with h.refuses(Refused, "manifest.jsonl", "No such file"):
        verified(spec)


def test_only_rows_in_scope_are_looked_at(tmp_path: Path) -> None:
    spec, dataset = made_in(tmp_path, "specforge")
    converts(spec)
    file_of(dataset / "specforge").unlink()
    assert verified(spec, shard=[1]).ok
    with h.refuses(Refused, "manifest.jsonl", "row 3"):
        verified(spec, shard=[0])


def test_a_format_that_the_run_does_not_name_is_mended_by_the_verb_that_is_named(tmp_path: Path) -> None:
    spec, dataset = made_in(tmp_path)
    converts(spec, "modelopt")
    file_of(dataset / "modelopt").unlink()
    with h.refuses(Refused, "manifest.jsonl", "convert --format modelopt writes it again"):
        verified(spec)
    converts(spec, "modelopt")
    assert verified(spec, deep=True).ok


def test_so_is_one_whose_norm_was_undone(tmp_path: Path) -> None:
    spec = h.make_spec(tmp_path, h.write_lines(tmp_path / "d.jsonl", h.samples(6)), formats=["specforge"])
    plan.run(spec, Namespace(dry_run=False, failed=False))
    dataset, asked = h.publish(spec), Namespace(format="speculators_v1", **CONVERT | {"approximate": True})
    convert.run(spec, asked)
    file_of(dataset / "v1").unlink()
    with h.refuses(Refused, "manifest.jsonl", "convert --format speculators_v1 --approximate writes it again"):
        verified(spec)
    convert.run(spec, asked)
    assert verified(spec, deep=True).ok


def test_what_a_damaged_source_can_not_mend_stays_known(tmp_path: Path) -> None:
    spec, dataset = made_in(tmp_path, "specforge")
    converts(spec)
    flip(*inside(dataset / "specforge"))
    with pytest.raises(Refused):
        verified(spec, deep=True)
    shutil.copy(dataset / "v1/data_3.pt", tmp_path / "kept")
    form = formats.get("speculators_v1")
    flip(dataset / "v1/data_3.pt", form.check(dataset / "v1/data_3.pt", 8, h.SHAPE)[1]["layer_1"][0])
    with h.refuses(Refused, "--source", "row 3"):
        converts(spec)
    with h.refuses(Refused, "capture.formats", "row 3"):
        hand_off(spec)
    shutil.copy(tmp_path / "kept", dataset / "v1/data_3.pt")
    assert converts(spec) == 1


def test_before_a_conversion_only_what_was_captured_is_looked_at(tmp_path: Path) -> None:
    """The DAG's order: verify, then convert, which finds and mends by headers what verify was not to look at."""
    spec, dataset = made_in(tmp_path, "specforge")
    converts(spec)
    file_of(dataset / "specforge").unlink()
    assert verify.run(spec, Namespace(deep=False, shard=None, window_ended=False, captured=True)).ok
    assert converts(spec) == 1
    assert verified(spec, deep=True).ok


@pytest.mark.parametrize("spoil", [lambda p: flip(p, -9), lambda p: p.unlink()])
def test_a_norm_that_went_with_a_format_is_looked_at_and_written_again(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    spec, dataset = made_in(tmp_path, "speculators", "specforge")
    converts(spec)
    kept = dataset / "speculators" / norm.NORM_FILE
    spoil(kept)
    with h.refuses(Refused, "manifest.jsonl", "speculators/final_norm.safetensors: the final norm", "writes it again"):
        verified(spec)
    elsewhere = {"source": str(dataset / "speculators"), "out": str(tmp_path / "x")}
    with h.refuses(Refused, norm.NORM_FILE, "convert to it again"):
        convert.run(spec, Namespace(**(CONVERT | elsewhere), format="specforge"))
    converts(spec)
    assert kept.read_bytes() == (dataset / norm.NORM_FILE).read_bytes()
    assert verified(spec, deep=True).ok


OTHER_MEANING: dict[str, Callable[[Path], object]] = {
    "broken": lambda p: p.write_bytes(b"{"),
    "gone": lambda p: p.unlink(),
    "another format": lambda p: p.write_bytes(p.read_bytes().replace(b'"specforge"', b'"specforgf"', 1)),
}


@pytest.mark.parametrize("fault", OTHER_MEANING)
def test_a_folder_that_no_longer_says_what_it_is_is_made_anew(tmp_path: Path, fault: str) -> None:
    spec, dataset = made_in(tmp_path, "specforge")
    converts(spec)
    meaning = dataset / "specforge" / converted.MEANING
    before = meaning.read_bytes()
    OTHER_MEANING[fault](meaning)
    with h.refuses(Refused, "manifest.jsonl", "convert writes it again"):
        verified(spec)
    assert converts(spec) == 6
    assert meaning.read_bytes() == before
    assert verified(spec, deep=True).ok


def test_a_folder_with_others_files_is_refused(tmp_path: Path) -> None:
    spec, dataset = made_in(tmp_path, "specforge")
    (dataset / "specforge").mkdir()
    (dataset / "specforge/notes.txt").write_text("mine")
    with h.refuses(BadInput, "--out", "other files"):
        converts(spec)
    assert (dataset / "specforge/notes.txt").exists()


def test_a_folder_in_a_samples_place_is_mended(tmp_path: Path) -> None:
    spec, dataset = made_in(tmp_path, "specforge")
    converts(spec)
    file = file_of(dataset / "specforge")
    file.unlink()
    file.mkdir()
    with pytest.raises(Refused):
        verified(spec)
    converts(spec)
    assert verified(spec, deep=True).ok
