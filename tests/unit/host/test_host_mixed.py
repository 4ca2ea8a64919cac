"""What belongs to another shard, plan or other settings is never mixed into a data set, and costs it nothing."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import host_data as h
import pytest
from host_stand_in import StandIn

from hsx_host import contract as c
from hsx_host import extract, fingerprint, plan, state, verify
from hsx_host.errors import HsxError, Refused
from hsx_host.formats import speculators_v1 as v1
from hsx_host.shards import FIRST_TOP_UP, ShardFiles, shard_ids


def copied_folder(dataset: Path, source: int, to: int) -> None:
    shutil.rmtree(ShardFiles(dataset, to).folder, ignore_errors=True)
    shutil.copytree(ShardFiles(dataset, source).folder, ShardFiles(dataset, to).folder)


COPIES: dict[str, tuple[Callable[[Path], object], int, int]] = {
    "the samples of the one before": (
        lambda d: shutil.copyfile(ShardFiles(d, 0).input, ShardFiles(d, 1).input), 1, 0
    ),
    "the samples of the one behind": (
        lambda d: shutil.copyfile(ShardFiles(d, 1).input, ShardFiles(d, 0).input), 0, 0
    ),
    "the folder of the one before": (lambda d: copied_folder(d, 0, 1), 1, 4),
    "the folder of the one behind": (lambda d: copied_folder(d, 1, 0), 0, 4),
    "a folder beyond the data": (lambda d: copied_folder(d, 0, 2), 2, 0),
    "a folder far beyond the data": (lambda d: copied_folder(d, 1, 777), 777, 0),
    "a folder as a top-up's": (lambda d: copied_folder(d, 0, FIRST_TOP_UP), FIRST_TOP_UP, 0),
    "an empty folder": (lambda d: ShardFiles(d, 2).folder.mkdir(), 2, 0),
    "a file in a folder's place": (
        lambda d: (shutil.rmtree(ShardFiles(d, 1).folder), ShardFiles(d, 1).folder.write_text("x")), 1, 4
    ),
}  # fmt: skip


@pytest.mark.parametrize("copy", COPIES)
def test_another_shards_folder_costs_no_other_shards_file(whole: tuple[c.RunSpec, StandIn], copy: str) -> None:
    spec, server = whole
    dataset, _ = fingerprint.opened(spec)
    before = {p.name: p.read_bytes() for p in (dataset / "v1").iterdir()}
    spoil, shard, redone = COPIES[copy]
    spoil(dataset)
    with pytest.raises(HsxError) as told:
        extract.run(spec, Namespace(shard=shard, stop_after=0.0))
    assert "plan" in str(told.value)
    assert {p.name: p.read_bytes() for p in (dataset / "v1").iterdir()} == before
    assert plan.run(spec, Namespace(dry_run=False, failed=False)).todo == redone
    assert {p.name: p.read_bytes() for p in (dataset / "v1").iterdir()} == before
    assert shard_ids(dataset) == [0, 1]
    asked = len(server.rids)
    for known in (0, 1):
        extract.run(spec, Namespace(shard=known, stop_after=0.0))
    assert len(server.rids) == asked + redone
    report = verify.run(spec, Namespace(deep=True, shard=None, window_ended=False))
    assert (report.ok, report.samples) == (True, 8)
    assert {p.name: p.read_bytes() for p in (dataset / "v1").iterdir()} == before


def test_a_folder_that_the_plan_has_not_stays_where_its_own_samples_are_published(
    whole: tuple[c.RunSpec, StandIn],
) -> None:
    """The data file has lost rows, and so has ``plan.json``: the manifests still say so."""
    spec, _ = whole
    dataset, _ = fingerprint.opened(spec)
    (dataset / "plan.json").unlink()
    h.write_lines(Path(spec.data.path), h.samples(4))
    with h.refuses(Refused, "data.path", "row 4 is published", "rows would be lost"):
        plan.run(spec, Namespace(dry_run=False, failed=False))
    assert ShardFiles(dataset, 1).manifest.exists()


OTHER = {
    "capture.layers": lambda s: replace(s, capture=replace(s.capture, layers=[1, 3, 5])),
    "model.revision": lambda s: replace(s, model=replace(s.model, revision="r2")),
    "capture.dtype": lambda s: replace(s, capture=replace(s.capture, dtype="float16")),
}


@pytest.mark.parametrize("field", OTHER)
def test_other_settings_are_another_data_set(whole: tuple[c.RunSpec, StandIn], field: str) -> None:
    """Another fingerprint, so another folder; and where a folder is given that name by hand, a refusal by field."""
    spec, _ = whole
    dataset, _ = fingerprint.opened(spec)
    other = OTHER[field](spec)
    meaning = fingerprint.semantics(other)
    assert meaning.dataset_id != dataset.name
    moved = dataset.with_name(meaning.dataset_id)
    dataset.rename(moved)
    with h.refuses(Refused, field):
        plan.run(other, Namespace(dry_run=False, failed=False))
    with h.refuses(Refused, field):
        extract.run(other, Namespace(shard=0, stop_after=0.0))
    with h.refuses(Refused, field):
        verify.run(other, Namespace(deep=False, shard=None, window_ended=False))


@pytest.mark.parametrize(
    ("name", "field"),
    [("model_weights_sha256", "model.path"), ("engine_version", "sglang"), ("norm_eps", "model.path")],
)
def test_other_weights_engine_and_norm_are_named(whole: tuple[c.RunSpec, StandIn], name: str, field: str) -> None:
    spec, _ = whole
    dataset, meaning = fingerprint.opened(spec)
    value = 0.5 if name == "norm_eps" else "another"
    state.write_document(dataset / "dataset.json", replace(meaning, **{name: value}))
    with pytest.raises(Refused, match=name):
        extract.run(spec, Namespace(shard=0, stop_after=0.0))


def test_shards_of_top_ups_are_far_away_and_cost_nothing(
    whole: tuple[c.RunSpec, StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leftovers are told from samples by the rows that there are, not by all numbers up to the highest."""
    spec, _ = whole
    dataset = fingerprint.opened(spec)[0]
    (dataset / "shards" / f"{FIRST_TOP_UP:05d}").mkdir()
    topped_up, stranger = dataset / f"v1/data_{FIRST_TOP_UP * 4 + 3}.pt", dataset / "v1/data_99.pt"
    for path in (topped_up, stranger):
        path.write_bytes(b"x")
    named: list[int] = []
    name = v1.file_name
    monkeypatch.setattr(v1, "file_name", lambda row: named.append(row) or name(row))
    extract.run(spec, Namespace(shard=0, stop_after=0.0))
    assert topped_up.exists()
    assert not stranger.exists()
    assert len(named) < 100
