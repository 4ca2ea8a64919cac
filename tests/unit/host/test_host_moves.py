"""A plan that moves published samples, beside another plan, an extraction and the faults of before."""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import host_data as h
import pytest
from host_stand_in import StandIn
from test_host_reuse import UNTOUCHED, interrupted, killed, struck
from test_host_reuse import run as planned

from hsx_host import contract as c
from hsx_host import converted, extract, fingerprint, formats, plan, reuse, verify
from hsx_host.errors import BadInput, Refused, TryAgain
from hsx_host.manifest import judged
from hsx_host.shards import ShardFiles, read_input, shard_ids

FORM = formats.get("speculators_v1")


def made(folder: Path, lines: list[str], **settings: Any) -> tuple[c.RunSpec, Path]:
    """A data set of these lines, all published."""
    spec = h.make_spec(folder, h.write_lines(folder / "d.jsonl", lines), **settings)
    planned(spec)
    return spec, h.publish(spec)


def same_length(count: int) -> list[str]:
    """Samples whose files can't be told apart by their size."""
    return [h.line([(7 * i + j) % h.VOCAB for j in range(6)]) for i in range(count)]


def verified(spec: c.RunSpec) -> c.VerifyReport:
    return verify.run(spec, Namespace(deep=True, shard=None, window_ended=False))


def counted(dataset: Path) -> tuple[list[int], list[int]]:
    """Rows that the next extraction keeps, and those of them whose files are wrong."""
    good = {}
    for shard in shard_ids(dataset):
        files = ShardFiles(dataset, shard)
        good |= judged(dataset, files.manifest, read_input(files).hashes())[0]
    return sorted(good), [row for row, x in good.items() if converted.file_wrong(dataset, x, FORM, h.SHAPE, True)]


def test_a_dry_run_of_another_host_leaves_a_plan_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, dataset = made(tmp_path, same_length(6))
    h.write_lines(Path(spec.data.path), [h.line([9] * 6), *same_length(6)])
    other = replace(spec, host=replace(spec.host, home=str(tmp_path / "home2")))
    real = reuse.sync_folder

    def sync(path: Path) -> None:  # the draft is whole, its record comes next
        real(path)
        monkeypatch.setattr(reuse, "sync_folder", real)
        plan.run(other, Namespace(dry_run=True, failed=False))

    monkeypatch.setattr(reuse, "sync_folder", sync)
    assert planned(spec).moved == 6
    assert counted(dataset) == ([1, 2, 3, 4, 5, 6], [])


def test_plans_of_two_hosts_at_once_take_effect_one_after_the_other(tmp_path: Path) -> None:
    spec, dataset = made(tmp_path, same_length(40), shard_size=100)
    h.write_lines(Path(spec.data.path), [h.line([9] * 6), *same_length(40)])
    other = replace(spec, host=replace(spec.host, home=str(tmp_path / "home2")))
    shutil.copytree(dataset, tmp_path / "before")
    for n in range(20):
        shutil.rmtree(dataset)
        shutil.copytree(tmp_path / "before", dataset)
        pid = os.fork()
        if not pid:
            try:
                planned(other)
                os._exit(0)
            finally:
                os._exit(1)
        planned(spec)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert counted(dataset) == (list(range(1, 41)), []), n


def test_a_refused_plan_of_a_new_data_set_leaves_nothing(tmp_path: Path) -> None:
    spec = h.make_spec(tmp_path, h.write_lines(tmp_path / "d.jsonl", ["{}"]))
    with h.refuses(BadInput, "data.max_rejects"):
        planned(spec)
    assert list(Path(spec.host.output_root).glob("*")) == []


def test_what_moves_out_of_the_shards_in_scope_is_kept(tmp_path: Path) -> None:
    spec, dataset = made(tmp_path, h.samples(8))
    h.write_lines(Path(spec.data.path), [h.line([9, 9]), *h.samples(8)])
    result = planned(replace(spec, data=replace(spec.data, shards=[0])))
    assert (result.todo, result.done, [s.id for s in result.shards]) == (1, 3, [0])
    assert planned(spec).todo == 1
    assert counted(dataset) == (list(range(1, 9)), [])


def test_an_extraction_takes_no_moved_file_for_a_strangers(
    whole: tuple[c.RunSpec, StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, _ = whole
    dataset, _ = fingerprint.opened(spec)
    (dataset / "v1/data_1.pt").unlink()
    lines = h.samples(8)
    h.write_lines(Path(spec.data.path), [*lines[:4], h.line([9, 9]), *lines[4:]])
    real = extract.row_numbers

    def rows(*args: Any) -> Iterator[int]:
        yield from list(real(*args))
        planned(spec)  # rows 4 to 7 become 5 to 8: shard 1, and a new one

    with monkeypatch.context() as patched:
        patched.setattr(extract, "row_numbers", rows)
        extract.run(spec, Namespace(shard=0, stop_after=0.0))
    assert planned(spec).todo == 1


def test_a_file_that_goes_before_it_is_moved_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, dataset = made(tmp_path, h.samples(6))
    h.write_lines(Path(spec.data.path), [h.line([9, 9]), *h.samples(6)])
    real = reuse.take_effect

    def late(*args: Any) -> None:
        (dataset / "v1/data_5.pt").unlink()
        real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(reuse, "take_effect", late)
        with h.refuses(TryAgain, "file", "data_5.pt", "start plan again"):
            planned(spec)
    assert planned(spec).todo == 2
    assert counted(dataset)[1] == []


def test_a_killed_plan_leaves_nothing_that_the_next_one_does_not_remove(tmp_path: Path) -> None:
    lines = h.samples(8)
    spec, dataset = made(tmp_path, lines)
    h.write_lines(Path(spec.data.path), [*lines[:4], lines[5], lines[4], lines[7], lines[6]])
    shutil.copytree(dataset, tmp_path / "before")
    for n in range(1, 300):
        shutil.rmtree(dataset)
        shutil.copytree(tmp_path / "before", dataset)
        code = struck(lambda: planned(spec), n, killed)
        assert planned(spec).shards == []
        assert not list(dataset.rglob("*.tmp")), n
        assert verified(spec).ok, n
        if code == UNTOUCHED:
            break
    assert n > 20


def test_a_note_of_damage_goes_with_the_file_that_was_looked_at(tmp_path: Path) -> None:
    lines = h.samples(4)
    spec, dataset = made(tmp_path, lines)
    h.write_lines(Path(spec.data.path), [*lines, lines[0]])
    assert planned(spec).moved == 1  # row 4 has the sample, and the line, of row 0
    file = dataset / "v1/data_4.pt"
    spoiled = bytearray(file.read_bytes())
    spoiled[FORM.check(file, 5, h.SHAPE)[1]["layer_1"][0]] ^= 1
    file.unlink()
    file.write_bytes(spoiled)  # by itself: a copy, or a file system without hard links
    with pytest.raises(Refused):
        verified(spec)
    assert (planned(spec).moved, planned(spec).moved) == (1, 0)
    assert verified(spec).ok


def test_a_damaged_record_of_moves_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, dataset = made(tmp_path, same_length(6))
    h.write_lines(Path(spec.data.path), [h.line([9, 9]), *same_length(6)])
    interrupted(spec, monkeypatch)
    record = dataset / "tmp/plan/moves.jsonl"
    record.write_bytes(record.read_bytes().replace(b'"tokens"', b'"tokenr"', 1))
    planned(spec)
    rows, wrong = counted(dataset)
    assert (len(rows), wrong) == (6, [])
    assert not record.exists()


@pytest.mark.parametrize("place", ["shards/00001", "v1/data_4.pt"])
def test_what_stands_in_the_way_of_a_move_goes(tmp_path: Path, place: str) -> None:
    spec, dataset = made(tmp_path, h.samples(4))
    if place.startswith("v1"):
        (dataset / place).mkdir()
    else:
        (dataset / place).write_text("x")
    h.write_lines(Path(spec.data.path), [h.line([9, 9]), *h.samples(4)])
    assert planned(spec).moved == 4
    assert counted(dataset) == ([1, 2, 3, 4], [])
