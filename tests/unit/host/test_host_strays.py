"""Files that no manifest names: what an extraction at work has just renamed is none of them, nor what NFS keeps."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

import host_data as h
import pytest

from hsx_host import contract as c
from hsx_host import convert, converted, handoff, plan, state, verify
from hsx_host.errors import HsxError, Refused, TryAgain
from hsx_host.manifest import Published, published_lines, rewrite
from hsx_host.shards import ShardFiles


@pytest.fixture
def made(tmp_path: Path) -> tuple[c.RunSpec, Path]:
    spec = h.make_spec(tmp_path, h.write_lines(tmp_path / "d.jsonl", h.samples(6)), proof_samples=6)
    plan.run(spec, Namespace(dry_run=False, failed=False))
    return spec, h.publish(spec)


def verified(spec: c.RunSpec) -> c.VerifyReport:
    report: c.VerifyReport = verify.run(spec, Namespace(deep=True, shard=None, window_ended=False))
    return report


def without_line(dataset: Path, row: int) -> dict[int, Published]:
    """The file has its name, its line is to come; the manifest as it will be."""
    files = ShardFiles(dataset, row // 4)
    lines = published_lines(files.manifest)
    rewrite(files.manifest, [line for one, line in lines.items() if one != row])
    return lines


@pytest.mark.parametrize("verb", ["verify", "handoff"])
def test_a_file_that_waits_for_its_line_is_no_stray(made: tuple[c.RunSpec, Path], verb: str) -> None:
    spec, dataset = made
    without_line(dataset, 2)
    copy = dataset / "shards/00000/.manifest.jsonl.1.tmp"
    copy.touch()
    (dataset / "v1/data_5000.pt").touch()

    def said() -> str:
        with pytest.raises(HsxError) as e:
            verified(spec) if verb == "verify" else handoff.run(spec, Namespace(window_ended=False))
        return str(e.value)

    with state.locked(ShardFiles(dataset, 0).lock, wait_s=0, what="a shard"):
        assert "data_2.pt" not in said()
        assert "stands beside" not in said()
        assert "v1/data_5000.pt is in no manifest" in said(), "it is of no shard at work"
        (dataset / "v1/data_5000.pt").unlink()
        if verb == "verify":
            with h.refuses(TryAgain, "manifest.jsonl", "missing rows: 2"):
                verified(spec)
    assert "v1/data_2.pt is in no manifest" in said()
    assert ".manifest.jsonl.1.tmp stands beside the manifest" in said()


def test_a_file_whose_line_came_since_is_no_stray(
    made: tuple[c.RunSpec, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extraction has ended between the census and the look into the folder."""
    spec, dataset = made
    whole, plain = without_line(dataset, 2), verify.census

    def early(*args: object, **more: object) -> verify.Census:
        found = plain(*args, **more)  # type: ignore[arg-type]
        rewrite(ShardFiles(dataset, 0).manifest, whole.values())
        return found

    monkeypatch.setattr(verify, "census", early)
    with h.refuses(TryAgain, "manifest.jsonl", "missing rows: 2"):
        verified(spec)
    assert verified(spec).ok


@pytest.mark.parametrize("form", ["speculators_v1", "speculators"])
def test_what_nfs_keeps_while_it_is_open_is_no_stray(tmp_path: Path, form: str) -> None:
    spec = h.make_spec(tmp_path, h.write_lines(tmp_path / "d.jsonl", h.samples(3)), formats=[form])
    plan.run(spec, Namespace(dry_run=False, failed=False))
    dataset = h.publish(spec)
    folder = convert.of_dataset(spec).form.FOLDER
    (dataset / folder / ".nfs0001").touch()
    assert verified(spec).ok
    handoff.run(spec, Namespace(window_ended=False))
    for inner in filter(Path.is_dir, (dataset / folder).iterdir()):
        (inner / ".nfs000000000123abcd00000002").touch()
    assert verified(spec).ok


@pytest.mark.parametrize("where", ["nowhere", ".", "data_1.pt"])
def test_a_link_is_a_stray_like_any(made: tuple[c.RunSpec, Path], where: str) -> None:
    spec, dataset = made
    (dataset / "v1/data_99.pt").symlink_to(where)
    with h.refuses(Refused, "manifest.jsonl", "v1/data_99.pt is in no manifest"):
        verified(spec)


@pytest.mark.parametrize("where", ["nowhere", "."])
def test_convert_removes_a_link_that_is_no_sample(made: tuple[c.RunSpec, Path], tmp_path: Path, where: str) -> None:
    spec, _dataset = made
    asked = Namespace(
        format="specforge", out=str(tmp_path / "sf"), source="", shards="", limit=0, min_tokens=0, max_tokens=0,
        approximate=False,
    )  # fmt: skip
    convert.run(spec, asked)
    (tmp_path / "sf/data_99.ckpt").symlink_to(where)
    assert list(converted.problems(tmp_path / "sf", deep=True)) == ["sf/data_99.ckpt is in no manifest"]
    convert.run(spec, asked)
    assert not os.path.lexists(tmp_path / "sf/data_99.ckpt")
    assert not list(converted.problems(tmp_path / "sf", deep=True))
