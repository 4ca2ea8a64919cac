"""Disk verdicts, what counts as old states, and deleting exactly what was approved."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from host_lifecycle import make_spec

from hsx_host import cleanup, disk, oldstates, openfiles, state
from hsx_host import contract as c
from hsx_host.errors import BadInput, Refused

GIB = 1 << 30
HUGE = 1 << 60


@pytest.fixture
def spec(tmp_path: Path) -> c.RunSpec:
    spec = make_spec(tmp_path)
    (tmp_path / "old").mkdir()
    return spec


def plan(spec: c.RunSpec, todo_bytes: int, dataset: str = "") -> None:
    path = dataset or f"{spec.host.output_root}/new"
    state.write_document(
        state.run_dir(spec) / "plan.json",
        c.PlanResult("id", path, 1, 1, 0, 0, 0, 1, 1, todo_bytes, 1, 1, [], []),
    )


def old_set(root: Path, name: str, file: str = "data_0.pt", size: int = 5000) -> Path:
    path = root / name / file
    path.parent.mkdir(parents=True)
    with path.open("wb") as f:
        f.write(b"x" * size)
        f.flush()
        os.fsync(f.fileno())  # a fresh file's blocks are counted anew when they are allocated
    return root / name


def listed(spec: c.RunSpec) -> c.DiskVerdict:
    return disk.run(spec, Namespace())


def run_cleanup(spec: c.RunSpec, approve: str = "") -> c.CleanupResult:
    return cleanup.run(spec, Namespace(approve=approve))


def test_data_sets_in_the_output_root_are_live_whoever_made_them(spec: c.RunSpec) -> None:
    root = Path(spec.host.output_root)
    spec = replace(spec, host=replace(spec.host, old_state_roots=[str(root)]))
    (old_set(root, "another-run", "v1/data_0.pt") / "dataset.json").write_text("{}")
    old_set(root, "vllm")
    assert [Path(s.path).name for s in oldstates.find(spec, "")] == ["vllm"]


def test_verdicts() -> None:
    old = [c.OldState("/o", 50 * GIB, 1, 1, 1, 0.0)]
    cases = [(10, 20, 5, [], "fits"), (20, 20, 5, old, "cleanup"), (100, 20, 5, old, "short"), (0, 0, 5, [], "fits")]
    for needed, free, reserve, sets, want in cases:
        got = disk.judge(needed * GIB, free * GIB, reserve * GIB, sets)
        assert got.verdict == want
        assert got.text.startswith("fits" if want != "short" else "short by 35.00 GiB")
    assert disk.judge(20 * GIB, 25 * GIB, 5 * GIB, []).verdict == "fits"
    assert disk.judge(20 * GIB + 1, 25 * GIB, 5 * GIB, []).verdict == "short"


def test_what_looks_like_old_states(spec: c.RunSpec, tmp_path: Path) -> None:
    root = tmp_path / "old"
    names = {
        "v1": "data_12.pt", "speculators": "hidden_states/hs_3.safetensors", "specforge": "rows_0-2000/data_0.ckpt",
        "ours": "v1/data_0.pt", "flat": "hs_0.safetensors",
    }  # fmt: skip
    for name, file in names.items():
        old_set(root, name, file)
    (root / "ours" / "dataset.json").write_text("{}")
    for name, file in (
        ("models", "model.safetensors"),
        ("code", "src/data_0.pt"),
        ("web", "dataset.json"),
        ("training", "epoch=3-step=9000.ckpt"),
    ):
        old_set(root, name, file)
    (root / "link").symlink_to(root / "v1")
    (root / "data_9.pt").write_text("a file directly in the root")
    outside = old_set(tmp_path, "outside", size=1 << 20)
    (root / "v1" / "inner_link").symlink_to(outside)
    found = oldstates.find(spec, "")
    assert {Path(s.path).name for s in found} == set(names)
    v1 = next(s for s in found if s.path.endswith("/v1"))
    info = os.lstat(root / "v1")
    assert (v1.device, v1.inode, v1.files) == (info.st_dev, info.st_ino, 1)
    assert v1.bytes >= 5000
    assert v1.bytes < 1 << 20  # the link's target is not counted


def test_the_current_data_set_and_what_holds_it_are_never_listed(spec: c.RunSpec, tmp_path: Path) -> None:
    root = tmp_path / "old"
    current, other = old_set(root, "current"), old_set(root, "other")
    holder = old_set(root, "holder")
    spec = replace(spec, host=replace(spec.host, output_root=str(holder / "deep" / "out")))
    assert [s.path for s in oldstates.find(spec, str(current))] == [str(other)]


def test_needed_and_kept_with_the_run(spec: c.RunSpec, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no plan"):
        listed(spec)
    old_set(tmp_path / "old", "a")
    plan(spec, HUGE)
    answer = listed(spec)
    assert answer.verdict == "short"
    assert answer.needed_bytes == HUGE
    assert [Path(s.path).name for s in answer.old_states] == ["a"]
    assert oldstates.list_hash(answer.old_states) in answer.text
    assert state.read_document(c.DiskVerdict, state.run_dir(spec) / "disk.json") == answer


def test_exactly_the_approved_list_goes(spec: c.RunSpec, tmp_path: Path) -> None:
    root = tmp_path / "old"
    a, b = old_set(root, "a", size=300_000), old_set(root, "b")
    plan(spec, HUGE)
    answer = listed(spec)
    later = old_set(root, "later")
    with pytest.raises(Refused, match="not approved"):
        run_cleanup(spec)
    with pytest.raises(Refused, match="another list"):
        run_cleanup(spec, "0" * 16)
    (b / "data_1.pt").write_bytes(b"new")  # changed since it was listed
    approved = tmp_path / "approved.json"
    approved.write_text(c.encode(answer))
    result = run_cleanup(spec, str(approved))
    assert result.deleted == [str(a)]
    assert "changed since it was listed" in result.refused[str(b)]
    assert not a.exists()
    assert (b / "data_0.pt").exists()
    assert later.exists()
    assert list(root.glob(".hsx*")) == []
    again = run_cleanup(spec, oldstates.list_hash(answer.old_states))
    assert again.deleted == []
    assert "gone" in again.refused[str(a)]


def test_links_in_a_set_are_removed_not_followed(spec: c.RunSpec, tmp_path: Path) -> None:
    outside = old_set(tmp_path, "outside")
    a = old_set(tmp_path / "old", "a")
    (a / "link").symlink_to(outside)
    plan(spec, HUGE)
    listed(spec)
    assert run_cleanup(replace(spec, cleanup=replace(spec.cleanup, policy="auto"))).deleted == [str(a)]
    assert (outside / "data_0.pt").exists()


def test_a_set_replaced_by_a_link_stays(spec: c.RunSpec, tmp_path: Path) -> None:
    a, elsewhere = old_set(tmp_path / "old", "a"), old_set(tmp_path, "elsewhere")
    plan(spec, HUGE)
    answer = listed(spec)
    a.rename(tmp_path / "moved")
    a.symlink_to(elsewhere)
    result = run_cleanup(spec, oldstates.list_hash(answer.old_states))
    assert str(a) in result.refused
    assert (elsewhere / "data_0.pt").exists()


def test_a_listing_that_was_tampered_with_deletes_nothing_outside_the_roots(spec: c.RunSpec, tmp_path: Path) -> None:
    outside = old_set(tmp_path, "outside")
    plan(spec, HUGE)
    answer = replace(listed(spec), old_states=[oldstates.measure(outside)])
    state.write_document(state.run_dir(spec) / "disk.json", answer)
    result = run_cleanup(spec, oldstates.list_hash(answer.old_states))
    assert "not directly below a configured root" in result.refused[str(outside)]
    assert outside.exists()


def test_nothing_goes_where_the_run_fits_or_the_policy_is_never(spec: c.RunSpec, tmp_path: Path) -> None:
    a = old_set(tmp_path / "old", "a")
    plan(spec, HUGE)
    answer = listed(spec)
    never = replace(spec, cleanup=replace(spec.cleanup, policy="never"))
    with pytest.raises(Refused, match="delete nothing"):
        run_cleanup(never, oldstates.list_hash(answer.old_states))
    plan(spec, 1)
    result = run_cleanup(spec, oldstates.list_hash(answer.old_states))
    assert (result.deleted, result.refused, result.freed_bytes) == ([], {}, 0)
    assert a.exists()


def test_a_set_that_is_read_right_now_stays(spec: c.RunSpec, tmp_path: Path) -> None:
    """Open by a descriptor, mapped after its descriptor was closed, or the folder that a process stands in."""
    root = tmp_path / "old"
    for name in ("open", "mapped", "cwd", "free"):
        old_set(root, name)
    plan(spec, HUGE)
    answer = listed(spec)
    code = (
        "import mmap, os, sys; os.chdir(sys.argv[3]); kept = open(sys.argv[1], 'rb'); f = open(sys.argv[2], 'rb');"
        "m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); f.close(); print('up', flush=True); sys.stdin.read()"
    )
    words = [str(root / "open" / "data_0.pt"), str(root / "mapped" / "data_0.pt"), str(root / "cwd")]
    reader = subprocess.Popen(
        [sys.executable, "-c", code, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert reader.stdout is not None
        reader.stdout.readline()
        result = run_cleanup(spec, oldstates.list_hash(answer.old_states))
        assert result.deleted == [str(root / "free")]
        assert len(result.refused) == 3
        assert all(f"held open by pid {reader.pid}" in why for why in result.refused.values())
        assert sorted(p.name for p in root.iterdir()) == ["cwd", "mapped", "open"]  # under their own names again
    finally:
        reader.communicate()
    again = run_cleanup(spec, oldstates.list_hash(answer.old_states))
    assert sorted(again.deleted) == [str(root / n) for n in ("cwd", "mapped", "open")]


def test_a_deletion_that_was_cut_off_goes_on(spec: c.RunSpec, tmp_path: Path) -> None:
    """Killed half way: the same call again ends it, even where the run fits by now; a later run lists what is left."""
    root = tmp_path / "old"
    for name in ("a", "b"):
        old_set(root, name, "hidden_states/hs_0.safetensors")
        (root / name / "data_1.pt").write_bytes(b"x" * 5000)
    plan(spec, HUGE)
    answer = listed(spec)
    a, b = answer.old_states
    for old in (a, b):
        Path(old.path).rename(root / oldstates.doomed(old))
        (root / oldstates.doomed(old) / "data_1.pt").unlink()
        (root / oldstates.doomed(old) / "hidden_states" / "hs_0.safetensors").unlink()
    (root / oldstates.doomed(b)).rename(tmp_path / "elsewhere")
    old_set(root, oldstates.doomed(b))  # another folder under that name: nobody approved it
    plan(spec, 1)
    result = run_cleanup(spec, oldstates.list_hash(answer.old_states))
    assert (result.deleted, result.refused) == ([a.path], {})
    assert [s.path for s in oldstates.find(spec, "")] == [str(root / oldstates.doomed(b))]
    plan(spec, HUGE)
    answer = listed(spec)
    assert run_cleanup(spec, oldstates.list_hash(answer.old_states)).deleted == [str(root / oldstates.doomed(b))]
    assert list(root.iterdir()) == []


def test_a_live_data_set_of_another_run_is_never_listed(spec: c.RunSpec, tmp_path: Path) -> None:
    """Made below a root by another run of this host (another output root): live there, old only where it was moved."""
    root = tmp_path / "old"
    live = old_set(root, "live", "v1/data_0.pt")
    (live / "dataset.json").write_text("{}")
    other = replace(spec, run_id="other")
    plan(other, 1, str(live))
    assert oldstates.find(spec, "") == []
    assert oldstates.look(spec, "", str(live)) == "it is a live data set of hsx"
    live.rename(root / "moved")
    assert [s.path for s in oldstates.find(spec, "")] == [str(root / "moved")]


@pytest.mark.parametrize("private", ["x", "set/hidden_states", "set"])
def test_what_the_login_may_not_read_is_left_out_and_named(
    spec: c.RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], private: str
) -> None:
    old_set(tmp_path / "old", "a")
    (tmp_path / "old" / private).mkdir(parents=True)
    if private.startswith("set"):
        (tmp_path / "old" / "set" / "data_0.pt").write_bytes(b"x")
    of_others = str(tmp_path / "old" / private)

    def scandir(path: str, real: Callable[[Any], Any] = os.scandir) -> Any:  # root may read all
        if str(path) == of_others:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert [Path(s.path).name for s in oldstates.find(spec, "")] == ["a"]
    assert f"can't be read: Permission denied ({of_others})" in capfd.readouterr().err


def test_a_file_that_goes_while_the_set_is_listed(
    spec: c.RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = old_set(tmp_path / "old", "a")
    (a / "data_1.pt").write_bytes(b"")

    def lstat(path: str, real: Callable[[Any], os.stat_result] = os.lstat) -> os.stat_result:
        if str(path).endswith("data_1.pt"):
            Path(path).unlink(missing_ok=True)
        return real(path)

    monkeypatch.setattr(os, "lstat", lstat)
    assert [s.path for s in oldstates.find(spec, "")] == [str(a)]


def test_a_copy_that_kept_its_times_is_a_change(spec: c.RunSpec, tmp_path: Path) -> None:
    a = old_set(tmp_path / "old", "a")
    plan(spec, HUGE)
    approved = oldstates.list_hash(listed(spec).old_states)
    file = a / "data_0.pt"
    was, folder = file.stat(), a.stat()
    copy = tmp_path / "copy"
    copy.write_bytes(b"y" * 5000)
    os.utime(copy, ns=(was.st_atime_ns, was.st_mtime_ns))
    copy.replace(file)
    os.utime(a, ns=(folder.st_atime_ns, folder.st_mtime_ns))
    assert "newest was" in run_cleanup(spec, approved).refused[str(a)]
    assert file.read_bytes() == b"y" * 5000


NAMES = ["a", "in here", "set-größe", "数据", "back\\slash", "tab\tline\nreturn\r", "\x85 \u2028", "bytes \udcff\udc80"]


@pytest.mark.parametrize("name", NAMES)
def test_a_mount_point_is_read_whatever_its_name(name: str) -> None:
    escaped = os.fsencode(name)
    for byte in b"\\ \t\n":  # what the kernel escapes, and nothing else
        escaped = escaped.replace(bytes([byte]), b"\\%03o" % byte)
    line = b"36 35 98:0 / /mnt/" + escaped + b"/m rw,noatime shared:1 - ext4 /dev/sda rw\n"
    assert openfiles.mount_points(line * 2) == [f"/mnt/{name}/m"] * 2


@pytest.mark.parametrize("name", NAMES)
def test_what_is_mounted_in_a_set_is_not_deleted(spec: c.RunSpec, tmp_path: Path, name: str) -> None:
    a, elsewhere = old_set(tmp_path / "old", name), old_set(tmp_path, "elsewhere")
    (a / "in here").mkdir()
    if subprocess.run(["mount", "--bind", str(elsewhere), str(a / "in here")], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        assert oldstates.find(spec, "") == []
        assert "something is mounted in it" in str(oldstates.look(spec, "", str(a)))
    finally:
        subprocess.run(["umount", str(a / "in here")], check=True)
    assert (elsewhere / "data_0.pt").exists()


def test_an_approval_that_is_no_text_is_refused(spec: c.RunSpec, tmp_path: Path) -> None:
    old_set(tmp_path / "old", "a")
    plan(spec, HUGE)
    listed(spec)
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Refused, match="another list"):
        run_cleanup(spec, str(garbage))
