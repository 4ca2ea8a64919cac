"""convert: any format into any, by what each file holds; parts, restarts, and what is refused."""

from __future__ import annotations

import itertools
import os
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import host_data as h
import pytest
import torch
from safetensors.torch import load_file

from hsx_host import contract as c
from hsx_host import convert, converted, fingerprint, formats, handoff, plan, proof, verify
from hsx_host.errors import BadInput, Refused

NAMES = ["modelopt", "specforge", "speculators", "speculators_v1"]


def arguments(**changes: Any) -> Namespace:
    return Namespace(
        **{
            "format": "specforge", "out": "", "source": "", "shards": "", "limit": 0, "min_tokens": 0, "max_tokens": 0,
            "approximate": False, **changes,
        }
    )  # fmt: skip


def made_in(root: Path, *names: str, count: int = 10) -> tuple[c.RunSpec, Path]:
    """Published samples of 5, 6, ... tokens in shards of four."""
    spec = h.make_spec(root, h.write_lines(root / "d.jsonl", h.samples(count)), formats=names, proof_samples=10)
    plan.run(spec, Namespace(dry_run=False, failed=False))
    return spec, h.publish(spec)


@pytest.fixture
def made(tmp_path: Path) -> tuple[c.RunSpec, Path]:
    return made_in(tmp_path, "speculators_v1")


def samples_of(folder: Path) -> dict[int, dict[str, Any]]:
    """What a converted folder holds, read by its format's own code."""
    one = converted.opened(folder)
    return {row: one.form.load(one.base / line.file, one.shape) for row, line in one.lines.items()}


def of_data_set(spec: c.RunSpec) -> dict[int, dict[str, Any]]:
    one = convert.of_dataset(spec)
    return {row: one.form.load(one.base / line.file, one.shape) for row, line in one.lines.items()}


def test_specforge_by_hand(made: tuple[c.RunSpec, Path], tmp_path: Path) -> None:
    spec, dataset = made
    (result,) = convert.run(spec, arguments(out=str(tmp_path / "sf"))).formats
    assert (result.samples, result.written, result.final, result.approximate) == (10, 10, "after_norm", False)
    ours = proof.NextToken(spec.model.path, dataset / proof.NORM_FILE)
    for row in range(10):
        body = torch.load(tmp_path / f"sf/rows_0-2000/data_{row}.ckpt", weights_only=True)
        source = torch.load(dataset / f"v1/data_{row}.pt", weights_only=True)
        assert torch.equal(body["hidden_state"][0], ours.normed(source["hidden_states"][-1]))
        assert torch.equal(body["aux_hidden_state"][0], torch.cat(source["hidden_states"][:-1], -1))
        assert torch.equal(body["input_ids"], source["input_ids"])
        assert torch.equal(body["loss_mask"], source["loss_mask"])


def test_speculators_by_hand(made: tuple[c.RunSpec, Path], tmp_path: Path) -> None:
    spec, dataset = made
    convert.run(spec, arguments(format="speculators", out=str(tmp_path / "hs")))
    for row in range(10):
        body = load_file(tmp_path / f"hs/hidden_states/hs_{row}.safetensors")
        source = torch.load(dataset / f"v1/data_{row}.pt", weights_only=True)
        assert torch.equal(body["hidden_states"], torch.stack(source["hidden_states"], 1))
        assert torch.equal(body["token_ids"], source["input_ids"])


@pytest.mark.parametrize("first", NAMES)
def test_every_format_is_filled_in_place_and_verified(tmp_path: Path, first: str) -> None:
    spec, dataset = made_in(tmp_path, first)
    report = verify.run(spec, Namespace(deep=True, shard=None, window_ended=False))
    assert (report.ok, report.proved) == (True, 10)
    result = handoff.run(spec, Namespace(window_ended=False))
    assert result.formats == {first: str(dataset / formats.get(first).FOLDER)}
    assert verify.run(spec, Namespace(deep=True, shard=None, window_ended=False)).ok, (
        "side files of the format are taken for strays"
    )


@pytest.mark.parametrize(("first", "second"), list(itertools.product(NAMES, NAMES)))
def test_round_trips(tmp_path: Path, first: str, second: str) -> None:
    """There and back: exact where no norm is undone, else within bf16's rounding, and said so."""
    spec, dataset = made_in(tmp_path, first, count=5)
    there, back = tmp_path / "there", tmp_path / "back"
    rough = formats.get(first).NORM == "after" and formats.get(second).NORM == "before"
    convert.run(spec, arguments(format=second, out=str(there), approximate=rough))
    lossy = formats.get(first).NORM != formats.get(second).NORM
    (result,) = convert.run(
        spec, arguments(format=first, out=str(back), source=str(there), approximate=lossy and not rough)
    ).formats
    assert result.approximate == lossy
    before, after = of_data_set(spec), samples_of(back)
    norm = proof.FinalNorm(dataset / proof.NORM_FILE)
    assert sorted(after) == sorted(before) == list(range(5))
    for row, sample in before.items():
        for name in ("input_ids", "loss_mask"):
            assert torch.equal(after[row][name], sample[name])
        assert all(torch.equal(a, b) for a, b in zip(after[row]["planes"][:-1], sample["planes"][:-1], strict=True))
        ours, theirs = sample["planes"][-1], after[row]["planes"][-1]
        if not lossy:
            assert torch.equal(theirs, ours)
        elif formats.get(first).NORM == "before":
            a, b = norm.apply(ours).float(), norm.apply(theirs).float()
            assert float(((a - b) / a).abs().nan_to_num(0).max()) < 0.012
        else:
            assert float(((ours.float() - theirs.float()) / ours.float()).abs().nan_to_num(0).max()) < 0.012
    assert not list(converted.problems(back, deep=True))


def test_after_norm_to_before_norm_is_refused_without_a_word(tmp_path: Path) -> None:
    spec, _ = made_in(tmp_path, "specforge")
    with h.refuses(BadInput, "--format", "before the norm", "--approximate"):
        convert.run(spec, arguments(format="speculators_v1", out=str(tmp_path / "x")))
    assert not (tmp_path / "x").exists()


def test_a_run_of_several_formats(tmp_path: Path) -> None:
    spec, dataset = made_in(tmp_path, "speculators_v1", "specforge", "speculators", "modelopt")
    assert fingerprint.opened(spec)[1].formats == ["speculators_v1"], "a derived format makes no other data set"
    with h.refuses(Refused, "capture.formats", "specforge is not whole: 10 samples are missing", "run convert"):
        handoff.run(spec, Namespace(window_ended=False))
    done = convert.run(spec, arguments(format="")).formats
    assert [(f.format, f.written) for f in done] == [("specforge", 10), ("speculators", 10), ("modelopt", 10)]
    assert sorted(handoff.run(spec, Namespace(window_ended=False)).formats) == NAMES
    assert [f.written for f in convert.run(spec, arguments(format="")).formats] == [0, 0, 0]
    assert verify.run(spec, Namespace(deep=True, shard=None, window_ended=False)).ok
    path = dataset / "modelopt/data_3.pt"
    os.truncate(path, 100)
    with h.refuses(Refused, "capture.formats", "modelopt/data_3.pt", "100 bytes"):
        handoff.run(spec, Namespace(window_ended=False))
    assert [f.written for f in convert.run(spec, arguments(format="")).formats] == [0, 0, 1]


def test_plan_counts_what_derived_formats_take(tmp_path: Path) -> None:
    spec, _ = made_in(tmp_path, "speculators_v1")
    more = replace(spec, capture=replace(spec.capture, formats=["speculators_v1", "specforge"]))
    result = plan.run(more, Namespace(dry_run=False, failed=False))
    sizes = [formats.get("specforge").file_bytes(5 + i, h.SHAPE) for i in range(10)]
    assert (result.todo, result.derive, result.derive_bytes) == (0, 10, sum(sizes))
    convert.run(more, arguments(format=""))
    assert plan.run(more, Namespace(dry_run=False, failed=False)).derive == 0


def test_an_extracted_again_sample_is_derived_again(tmp_path: Path) -> None:
    from hsx_host.manifest import Published, newest, read_lines, rewrite
    from hsx_host.shards import ShardFiles

    spec, dataset = made_in(tmp_path, "speculators_v1", "specforge")
    convert.run(spec, arguments(format=""))
    files = ShardFiles(dataset, 0)
    lines = newest(read_lines(files.manifest, Published)[0])
    rewrite(files.manifest, [replace(line, rid="hsx-again") if row == 2 else line for row, line in lines.items()])
    assert [f.written for f in convert.run(spec, arguments(format="")).formats] == [1]


def test_parts(made: tuple[c.RunSpec, Path], tmp_path: Path) -> None:
    spec, _ = made
    out = tmp_path / "sf"
    for change, rows in (
        ({"shards": "0,2"}, [0, 1, 2, 3, 8, 9]),
        ({"shards": "1", "limit": 2}, [4, 5]),
        ({"min_tokens": 7, "max_tokens": 9}, [2, 3, 4]),
    ):
        (result,) = convert.run(spec, arguments(out=str(out), **change)).formats
        assert (result.samples, sorted(samples_of(out))) == (len(rows), rows)
        assert sorted(int(p.stem.split("_")[1]) for p in out.rglob("*.ckpt")) == rows


def test_goes_on_where_it_was_stopped(made: tuple[c.RunSpec, Path], tmp_path: Path) -> None:
    spec, _ = made
    out = tmp_path / "sf"
    convert.run(spec, arguments(out=str(out), shards="2"))
    stamps = {p.name: p.stat().st_mtime_ns for p in out.rglob("*.ckpt")}
    (result,) = convert.run(spec, arguments(out=str(out))).formats
    assert (result.samples, result.written) == (10, 8)
    assert all(p.stat().st_mtime_ns == stamps[p.name] for p in out.rglob("*.ckpt") if p.name in stamps)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"format": "nope"}, "--format"),
        ({"shards": "x"}, "--shards"),
        ({"shards": "9"}, "--shards"),
        ({"out": "v1/x"}, "--out"),
        ({"out": "specforge/x"}, "--out"),
        ({"out": ""}, "--out"),
        ({"out": "", "limit": 3}, "--out"),
        ({"source": "nowhere"}, "--source"),
        ({"limit": -1, "out": "x"}, "--limit"),
        ({"min_tokens": -1}, "--min-tokens"),
        ({"max_tokens": -5}, "--max-tokens"),
    ],
)
def test_bad_arguments(made: tuple[c.RunSpec, Path], tmp_path: Path, change: dict[str, Any], field: str) -> None:
    spec, dataset = made
    values = {"out": str(tmp_path / "sf"), **change}
    if "out" in change and "limit" not in change:
        values["out"] = str(dataset / values["out"])
    if not values["out"] or "limit" in change:
        values["out"] = ""
    with h.refuses(BadInput, field):
        convert.run(spec, arguments(**values))


def test_others_files_are_not_mixed_with(made: tuple[c.RunSpec, Path], tmp_path: Path) -> None:
    spec, _ = made
    out = tmp_path / "theirs"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with h.refuses(BadInput, "--out", "other files"):
        convert.run(spec, arguments(out=str(out)))
    assert [p.name for p in out.iterdir() if p.name != ".lock"] == ["notes.txt"]
    convert.run(spec, arguments(out=str(tmp_path / "sf")))
    with h.refuses(BadInput, "--out", "the folder holds specforge"):
        convert.run(spec, arguments(format="modelopt", out=str(tmp_path / "sf")))


def test_arrow_has_no_gaps_where_rows_do(tmp_path: Path) -> None:
    """Rejected rows keep their numbers; the Arrow data set counts on, and its names point at the right samples."""
    import datasets

    lines = h.samples(9)
    lines[0] = lines[5] = "broken"
    spec = h.make_spec(tmp_path, h.write_lines(tmp_path / "d.jsonl", lines), formats=["speculators"], max_rejects=2)
    plan.run(spec, Namespace(dry_run=False, failed=False))
    dataset = h.publish(spec)
    handoff.run(spec, Namespace(window_ended=False))
    table = datasets.load_from_disk(str(dataset / "speculators"))
    assert table.format["type"] == "torch"
    assert table["row"][:].tolist() == [1, 2, 3, 4, 6, 7, 8]
    for i, one in enumerate(table):
        body = load_file(dataset / f"speculators/hidden_states/hs_{i}.safetensors")
        assert torch.equal(body["token_ids"], one["input_ids"])
        assert len(one["input_ids"]) == one["seq_len"] == 5 + int(one["row"])
    assert not (dataset / "speculators/hidden_states/hs_7.safetensors").exists()
    assert verify.run(spec, Namespace(deep=True, shard=None, window_ended=False)).ok


@pytest.mark.parametrize("plane", ["layer_1", "final", "input_ids", "loss_mask"])
def test_a_damaged_sample_is_not_converted(made: tuple[c.RunSpec, Path], tmp_path: Path, plane: str) -> None:
    """Its copy would have right checksums of wrong data."""
    spec, dataset = made
    path = dataset / "v1/data_3.pt"
    at = formats.get("speculators_v1").check(path, 8, h.SHAPE)[1][plane][0] + 3
    with path.open("r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 1]))
    out = tmp_path / "sf"
    with h.refuses(Refused, "--source", "row 3", f"{plane} does not match its checksum", "extract its shard"):
        convert.run(spec, arguments(out=str(out)))
    assert not (out / "rows_0-2000/data_3.ckpt").exists()
    with path.open("r+b") as f:
        f.seek(at)
        f.write(bytes([byte]))
    assert convert.run(spec, arguments(out=str(out))).formats[0].samples == 10


@pytest.mark.parametrize("glued", [False, True])
def test_goes_on_behind_half_a_line(made: tuple[c.RunSpec, Path], tmp_path: Path, glued: bool) -> None:
    """Killed while a line was written, twice; ``glued``: lines that were written behind a half one."""
    spec, _ = made
    out = tmp_path / "sf"
    convert.run(spec, arguments(out=str(out)))
    samples = out / converted.SAMPLES
    for _ in range(2):
        lines = samples.read_bytes().splitlines(keepends=True)
        samples.write_bytes(b"".join(lines[:4]) + lines[5][:40] + (b"".join(lines[6:8]) if glued else b""))
        assert convert.run(spec, arguments(out=str(out))).formats[0].samples == 10
        assert len(samples.read_bytes().splitlines()) == 10


@pytest.mark.parametrize("name", NAMES)
def test_writes_that_take_a_part_only_go_on(
    made: tuple[c.RunSpec, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    spec, _ = made
    plain = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: plain(fd, bytes(data)[: max(1, len(data) // 2)], at))
    convert.run(spec, arguments(format=name, out=str(tmp_path / "other"), limit=3))
    monkeypatch.undo()
    assert not list(converted.problems(tmp_path / "other", deep=True))
    assert len(samples_of(tmp_path / "other")) == 3


@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_kept_norm_is_whole_and_the_sources(made: tuple[c.RunSpec, Path], tmp_path: Path, damage: str) -> None:
    """A copy that a kill cut short does not stay."""
    spec, dataset = made
    out = tmp_path / "sf"
    convert.run(spec, arguments(out=str(out)))
    data = (dataset / proof.NORM_FILE).read_bytes()
    (out / proof.NORM_FILE).write_bytes(data[:50] if damage == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
    convert.run(spec, arguments(out=str(out)))
    assert (out / proof.NORM_FILE).read_bytes() == data
