"""Plan: shards, sizes, what is left to do, and every reason to refuse."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import host_data as h
import pytest
from safetensors.numpy import load_file, save_file

from hsx_host import contract as c
from hsx_host import fingerprint, plan, verify
from hsx_host.errors import BadInput, Refused, TryAgain
from hsx_host.formats import speculators_v1 as v1
from hsx_host.manifest import Failed, Ledger
from hsx_host.shards import ShardFiles, read_input, shard_ids


def run(spec: c.RunSpec, dry_run: bool = False, failed: bool = False) -> c.PlanResult:
    return plan.run(spec, Namespace(dry_run=dry_run, failed=failed))


def planned(root: Path, lines: list[str], **settings: Any) -> tuple[c.RunSpec, c.PlanResult]:
    spec = h.make_spec(root, h.write_lines(root / "d.jsonl", lines), **settings)
    return spec, run(spec)


def test_shards_sizes_and_inputs(tmp_path: Path) -> None:
    _spec, result = planned(tmp_path, h.samples(10))
    assert [(s.id, s.name, s.first_row, s.rows, s.todo) for s in result.shards] == [
        (0, "shard 00000 rows 0-3", 0, 4, 4),
        (1, "shard 00001 rows 4-7", 4, 4, 4),
        (2, "shard 00002 rows 8-9", 8, 2, 2),
    ]
    tokens = [5 + i for i in range(10)]
    assert [s.tokens for s in result.shards] == [sum(tokens[:4]), sum(tokens[4:8]), sum(tokens[8:])]
    assert [s.bytes for s in result.shards][2] == sum(v1.file_bytes(n, h.SHAPE) for n in tokens[8:])
    assert (result.rows, result.valid, result.todo, result.done, result.longest) == (10, 10, 10, 0, 14)
    assert result.bytes_per_token == 4 * h.HIDDEN * 2
    assert result.todo_bytes == sum(s.bytes for s in result.shards)
    dataset = Path(result.dataset_dir)
    assert dataset.name == result.dataset_id == json.loads((dataset / "dataset.json").read_text())["dataset_id"]
    one = read_input(ShardFiles(dataset, 1)).sample(2)
    wanted = json.loads(h.samples(10)[6])
    assert (one.row, one.ids.tolist(), one.mask.tolist()) == (6, wanted["input_ids"], wanted["loss_mask"])
    assert c.decode(c.PlanResult, (tmp_path / "home/runs").glob("*/plan.json").__next__().read_bytes()) == result


@pytest.mark.parametrize("array", ["ids", "mask", "hash"])
def test_a_flipped_bit_in_a_shards_samples_is_found_before_they_are_sent(tmp_path: Path, array: str) -> None:
    _spec, result = planned(tmp_path, h.samples(6))
    files = ShardFiles(Path(result.dataset_dir), 0)
    body = load_file(files.input)
    body[array].reshape(-1)[0] ^= 1
    save_file(body, files.input)
    with pytest.raises(TryAgain, match="row 0 is not the sample that it was") as error:
        read_input(files)
    assert "run plan first" in str(error.value)


def test_rejects_keep_their_rows_and_nothing_shifts(tmp_path: Path) -> None:
    lines = h.samples(9)
    lines[0], lines[5] = "{broken", h.line([1, h.VOCAB])
    _spec, result = planned(tmp_path, lines, max_rejects=2)
    assert (result.rows, result.valid, result.rejected) == (9, 7, 2)
    assert [r.split(":")[0] for r in result.rejects] == ["row 0", "row 5"]
    dataset = Path(result.dataset_dir)
    rows = [read_input(ShardFiles(dataset, s)).rows.tolist() for s in shard_ids(dataset)]
    assert rows == [[1, 2, 3], [4, 6, 7], [8]]
    rejected = [json.loads(one) for one in (dataset / "rejects.jsonl").read_text().splitlines()]
    assert [(r["row"], r["line"]) for r in rejected] == [(0, 1), (5, 6)]
    assert "vocabulary" in rejected[1]["reason"]


def test_too_many_rejects_list_the_first_and_leave_nothing(tmp_path: Path) -> None:
    spec = h.make_spec(tmp_path, h.write_lines(tmp_path / "d.jsonl", [*h.samples(5), "", h.line([])]), max_rejects=1)
    with h.refuses(
        BadInput, "data.max_rejects", "2 of 7 rows", "row 5: the line is empty", "row 6: input_ids is empty"
    ):
        run(spec)
    assert not (tmp_path / "out").exists() or h.tree(tmp_path / "out") == {}


def test_a_file_of_another_kind_is_not_read_to_its_end(tmp_path: Path) -> None:
    spec = h.make_spec(tmp_path, h.write_lines(tmp_path / "d.jsonl", ["prose"] * 5000), max_rejects=3)
    with h.refuses(BadInput, "data.max_rejects", "1003 or more of 1003 read so far"):
        run(spec)


def test_no_valid_sample(tmp_path: Path) -> None:
    spec = h.make_spec(tmp_path, h.write_lines(tmp_path / "d.jsonl", ["x", "y"]), max_rejects=9)
    with h.refuses(BadInput, "data.path", "no valid sample in 2 rows", "row 0"):
        run(spec)


def test_duplicates_are_counted_and_extracted(tmp_path: Path) -> None:
    _, result = planned(tmp_path, [*h.samples(3), h.samples(3)[1], h.samples(3)[1]])
    assert (result.duplicates, result.todo) == (2, 5)


def test_only_the_wanted_shards(tmp_path: Path) -> None:
    _, result = planned(tmp_path, h.samples(10), shards=[2, 0])
    assert [s.id for s in result.shards] == [0, 2]
    assert (result.rows, result.todo) == (10, 6)
    assert shard_ids(Path(result.dataset_dir)) == [0, 2]


@pytest.mark.parametrize("shard", [3, -1])
def test_unknown_shard_is_named(tmp_path: Path, shard: int) -> None:
    spec = h.make_spec(tmp_path, h.write_lines(tmp_path / "d.jsonl", h.samples(10)), shards=[0, shard])
    with h.refuses(BadInput, "data.shards", f"shard {shard} does not exist", "shards 0 to 2"):
        run(spec)


def test_published_samples_are_left_out(tmp_path: Path) -> None:
    spec, _ = planned(tmp_path, h.samples(8))
    dataset = h.publish(spec, rows=[0, 1, 2, 3, 5])
    result = run(spec)
    assert [(s.id, s.todo) for s in result.shards] == [(1, 3)]
    assert (result.done, result.todo) == (5, 3)
    (dataset / "v1/data_2.pt").unlink()
    (dataset / "v1/data_5.pt").write_bytes(b"cut")
    assert [(s.id, s.todo) for s in run(spec).shards] == [(0, 1), (1, 4)]


def test_only_shards_with_samples_that_failed(tmp_path: Path) -> None:
    spec, _ = planned(tmp_path, h.samples(10))
    dataset = h.publish(spec, rows=[0, 1, 3, 4, 5, 6, 7])  # shard 1 is whole, shard 2 was never begun
    assert run(spec, failed=True).shards == []
    for row in (2, 5):  # row 5 was published after it had failed
        files = ShardFiles(dataset, row // 4)
        ledger: Ledger[Failed] = Ledger(files.failures)
        ledger.append(Failed(row, 7, read_input(files).hashes()[row].hex(), "layer_1 is not finite", 3, 0.0))
        ledger.close()
    (shard,) = run(spec, failed=True).shards
    assert (shard.id, shard.todo, shard.failed) == (0, 1, 1)
    assert shard.reasons == ["row 2 after 3 tries: layer_1 is not finite"]
    assert [(s.id, s.failed) for s in run(spec).shards] == [(0, 1), (2, 0)]


def test_a_failure_is_its_samples_and_not_its_rows(tmp_path: Path) -> None:
    spec, _ = planned(tmp_path, h.samples(4))
    files = ShardFiles(fingerprint.opened(spec)[0], 0)
    ledger: Ledger[Failed] = Ledger(files.failures)
    ledger.append(Failed(0, 5, read_input(files).hashes()[0].hex(), "kills the server", 3, 0.0))
    ledger.close()
    h.write_lines(Path(spec.data.path), [h.line([9, 9]), *h.samples(4)])
    assert [s.failed for s in run(spec).shards] == [0, 0]


def test_a_shard_whose_rows_are_all_rejected_has_nothing_left(tmp_path: Path) -> None:
    spec, _ = planned(tmp_path, h.samples(8), max_rejects=4)
    dataset = h.publish(spec, rows=range(4))
    h.write_lines(Path(spec.data.path), [*h.samples(4), "{}", "{}", "{}", "{}"])
    assert run(spec).todo == 0
    assert len(read_input(ShardFiles(dataset, 1))) == 0
    assert verify.run(spec, Namespace(deep=False, shard=None, window_ended=False)).ok


def test_with_nothing_to_do_no_shard_is_named(tmp_path: Path) -> None:
    spec, _ = planned(tmp_path, h.samples(5))
    h.publish(spec)
    result = run(spec)
    assert (result.shards, result.todo, result.done, result.todo_bytes) == ([], 0, 5, 0)


def test_changed_and_added_rows_are_to_do(tmp_path: Path) -> None:
    spec, _ = planned(tmp_path, h.samples(5))
    h.publish(spec)
    lines = h.samples(6)
    lines[1] = h.line([9, 9])
    h.write_lines(Path(spec.data.path), lines)
    result = run(spec)
    assert [(s.id, s.todo) for s in result.shards] == [(0, 1), (1, 1)]
    assert (result.todo, result.changed, result.moved) == (2, 1, 0)


def test_an_inserted_line_moves_files_and_extracts_one_sample(tmp_path: Path) -> None:
    from hsx_host import verify
    from hsx_host.manifest import Published, newest, read_lines

    spec, _ = planned(tmp_path, h.samples(10), proof_samples=20)
    dataset = h.publish(spec)
    before = {row: (dataset / f"v1/data_{row}.pt").read_bytes() for row in range(10)}
    lines = [*h.samples(10)[:3], h.line([9, 9]), *h.samples(10)[3:]]
    h.write_lines(Path(spec.data.path), lines)
    dry = run(spec, dry_run=True)
    result = run(spec)
    assert result == dry
    assert (result.todo, result.moved, result.done, result.changed) == (1, 7, 10, 0)
    assert [(s.id, s.todo) for s in result.shards] == [(0, 1)]
    for row in range(3, 10):
        assert (dataset / f"v1/data_{row + 1}.pt").read_bytes() == before[row]
    published = {}
    for shard in shard_ids(dataset):
        published |= newest(read_lines(ShardFiles(dataset, shard).manifest, Published)[0])
    assert sorted(published) == list(range(11)), "row 3 keeps its old file until it is replaced"
    again = run(spec)
    assert (again.todo, again.moved, again.done) == (1, 0, 10)
    (dataset / "v1/data_3.pt").unlink()
    h.publish(spec, rows=[3])
    report = verify.run(spec, Namespace(deep=True, shard=None, window_ended=False))
    assert (report.ok, report.samples, report.proved) == (True, 11, 11)
    assert not (dataset / "tmp").exists() or not list((dataset / "tmp").rglob("*"))


def test_swapped_and_repeated_rows_are_moved_too(tmp_path: Path) -> None:
    spec, _ = planned(tmp_path, h.samples(6))
    dataset = h.publish(spec)
    lines = h.samples(6)
    lines[0], lines[5] = lines[5], lines[0]
    h.write_lines(Path(spec.data.path), [*lines, lines[2], h.line([7])])
    result = run(spec)
    assert (result.todo, result.moved, result.changed, result.duplicates) == (1, 3, 0, 1)
    for row, line in enumerate([*lines, lines[2]]):
        body = v1.load(dataset / f"v1/data_{row}.pt", h.SHAPE)
        assert body["input_ids"].tolist() == json.loads(line)["input_ids"]


def test_a_move_without_hard_links_copies(tmp_path: Path, monkeypatch: Any) -> None:
    import os

    spec, _ = planned(tmp_path, h.samples(4))
    dataset = h.publish(spec)

    def none(*names: Any, **options: Any) -> None:
        raise OSError("no hard links here")

    monkeypatch.setattr(os, "link", none)
    h.write_lines(Path(spec.data.path), [h.line([7]), *h.samples(4)])
    assert run(spec).moved == 4
    assert v1.load(dataset / "v1/data_4.pt", h.SHAPE)["input_ids"].tolist() == json.loads(h.samples(4)[3])["input_ids"]


def test_a_shard_that_is_being_extracted_is_not_moved_under(tmp_path: Path) -> None:
    from hsx_host import state

    spec, _ = planned(tmp_path, h.samples(5))
    dataset = h.publish(spec)
    h.write_lines(Path(spec.data.path), [h.line([7]), *h.samples(5)])
    before = h.tree(dataset / "v1")
    with state.locked(ShardFiles(dataset, 1).lock, wait_s=0, what="x"), h.refuses(TryAgain, "lock", "shard 00001"):
        run(spec)
    assert h.tree(dataset / "v1") == before


def test_fewer_rows_are_refused_and_the_old_plan_stays(tmp_path: Path) -> None:
    spec, result = planned(tmp_path, h.samples(8))
    before = h.tree(Path(result.dataset_dir))
    h.write_lines(Path(spec.data.path), h.samples(7))
    with h.refuses(Refused, "data.path", "8 rows", "7", "rows would be lost", "data.name"):
        run(spec)
    assert h.tree(Path(result.dataset_dir)) == before


NO_PLANS = {"cut": b'{"type":"PlanRes', "empty": b"", "noise": b"\xff\0", "another document": b"{}"}


@pytest.mark.parametrize("content", NO_PLANS)
def test_a_broken_plan_is_written_anew_and_lost_rows_are_refused_all_the_same(tmp_path: Path, content: str) -> None:
    spec, result = planned(tmp_path, h.samples(8))
    dataset = h.publish(spec)
    (dataset / "plan.json").write_bytes(NO_PLANS[content])
    for rows in (7, 4, 3):
        h.write_lines(Path(spec.data.path), h.samples(rows))
        with h.refuses(Refused, "data.path", f"row {rows} is published", "would be lost"):
            run(spec)
    h.write_lines(Path(spec.data.path), h.samples(8))
    assert run(spec).done == 8
    assert c.decode(c.PlanResult, (dataset / "plan.json").read_bytes()).rows == result.rows


@pytest.mark.parametrize(
    "name", ["\u00b2", "7", "0", "000001", "\u0660\u0660\u0660\u0660\u0667", "0000x", "00002.broken", ".00001", "-0001"]
)
def test_what_is_no_shards_folder(tmp_path: Path, name: str) -> None:
    spec, result = planned(tmp_path, h.samples(5))
    dataset = Path(result.dataset_dir)
    (dataset / "shards" / name).mkdir()
    (dataset / "shards/00009").write_text("a file")
    (dataset / "shards/100000").mkdir()
    assert shard_ids(dataset) == [0, 1, 100000]
    assert run(spec).todo == 5
    assert shard_ids(dataset) == [0, 1]


def test_a_dry_run_leaves_a_folder_that_the_plan_has_not(tmp_path: Path) -> None:
    spec, result = planned(tmp_path, h.samples(5))
    folder = ShardFiles(Path(result.dataset_dir), 7).folder
    folder.mkdir()
    run(spec, dry_run=True)
    assert folder.is_dir()


def test_a_published_row_that_is_now_a_reject_is_refused(tmp_path: Path) -> None:
    spec, _ = planned(tmp_path, h.samples(5), max_rejects=5)
    h.publish(spec)
    h.write_lines(Path(spec.data.path), [*h.samples(5)[:4], "broken"])
    with h.refuses(Refused, "data.path", "row 4 is published", "not JSON"):
        run(spec)


def test_dry_run_writes_nothing_below_the_output(tmp_path: Path) -> None:
    spec = h.make_spec(tmp_path, h.write_lines(tmp_path / "d.jsonl", h.samples(5)))
    result = run(spec, dry_run=True)
    assert result.todo == 5
    assert not (tmp_path / "out").exists()
    assert len(list((tmp_path / "home/runs").glob("*/plan.json"))) == 1
    with h.refuses(TryAgain, "data.name", "plan"):
        fingerprint.opened(spec)


def test_dry_run_beside_a_made_data_set(tmp_path: Path) -> None:
    spec, result = planned(tmp_path, h.samples(5))
    before = h.tree(Path(result.dataset_dir))
    h.write_lines(Path(spec.data.path), h.samples(9))
    assert run(spec, dry_run=True).todo == 9
    assert h.tree(Path(result.dataset_dir)) == before


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"data": {"shard_size": 5}}, "data.shard_size"),
        ({"data": {"path": "elsewhere.jsonl"}}, "data.path"),
    ],
)
def test_another_meaning_under_the_same_id_is_refused(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    spec, _ = planned(tmp_path, h.samples(5))
    values = dict(change["data"])
    if "path" in values:
        values["path"] = str(h.write_lines(tmp_path / values["path"], h.samples(5)))
    with h.refuses(Refused, field, field.split(".")[1], "data.name"):
        run(replace(spec, data=replace(spec.data, **values)))


@pytest.mark.parametrize("what", ["layers", "revision", "config", "weights"])
def test_what_rows_depend_on_makes_another_data_set(tmp_path: Path, what: str) -> None:
    spec, first = planned(tmp_path, h.samples(3))
    changed = spec
    if what == "layers":
        changed = replace(spec, capture=replace(spec.capture, layers=[1, 3, 5]))
    elif what == "revision":
        changed = replace(spec, model=replace(spec.model, revision="r2"))
    elif what == "config":
        h.make_model(Path(spec.model.path), rms_norm_eps=1e-6)
    else:
        file = Path(spec.model.path) / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    assert run(changed).dataset_id != first.dataset_id


@pytest.mark.parametrize(
    ("layers", "word"),
    [
        ([], "ascend"),
        ([3, 1], "ascend"),
        ([1, 1], "ascend"),
        ([1, 8], "layers are 1 to 7"),
        ([0, 2], "layers are 1 to 7"),
        ([-1], "1 to 7"),
    ],
)
def test_layers_that_do_not_exist(tmp_path: Path, layers: list[int], word: str) -> None:
    spec = h.make_spec(tmp_path, h.write_lines(tmp_path / "d.jsonl", h.samples(3)), layers=layers)
    with h.refuses(BadInput, "capture.layers", word):
        run(spec)


@pytest.mark.parametrize("name", ["", "../up", "a/b", "-x", "a b"])
def test_names_that_are_no_folder(tmp_path: Path, name: str) -> None:
    spec = h.make_spec(tmp_path, h.write_lines(tmp_path / "d.jsonl", h.samples(3)), name=name)
    with h.refuses(BadInput, "data.name"):
        run(spec)


def test_what_a_killed_plan_left_is_not_taken_for_a_plan(tmp_path: Path) -> None:
    spec, result = planned(tmp_path, h.samples(5))
    draft = Path(result.dataset_dir) / "tmp/plan"
    draft.mkdir(parents=True)
    (draft / "00009.safetensors").write_bytes(b"of a longer file that never passed")
    run(spec)
    assert shard_ids(Path(result.dataset_dir)) == [0, 1]
    assert not draft.exists()
