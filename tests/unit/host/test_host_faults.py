"""Errors of a host's disks say nothing of what a file holds: they are told, and nothing is noted as damage."""

from __future__ import annotations

import errno
import io
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import host_data as h
import numpy as np
import pytest

from hsx_host import __main__ as program
from hsx_host import contract as c
from hsx_host import converted, formats, plan, proof, verify
from hsx_host.dataset import identity
from hsx_host.errors import BadInput, Refused, TryAgain
from hsx_host.layouts import faults
from hsx_host.manifest import Published

OF_THE_HOST = {
    errno.EACCES: "readable for this login",
    errno.EPERM: "readable for this login",
    errno.EMFILE: "limit of open files",
    errno.ENFILE: "limit of open files",
    errno.EIO: "disk or file server",
    errno.ESTALE: "file server",
    errno.ENOTCONN: "file server's mount",
    errno.ESHUTDOWN: "file server's mount",
    errno.ETIMEDOUT: "file server's mount",
    errno.ENOMEM: "memory",
}
OF_CONTENT = [errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR]


@pytest.fixture
def made(tmp_path: Path) -> tuple[c.RunSpec, Path]:
    spec = h.make_spec(tmp_path, h.write_lines(tmp_path / "d.jsonl", h.samples(6)), proof_samples=6)
    plan.run(spec, Namespace(dry_run=False, failed=False))
    return spec, h.publish(spec)


def check(spec: c.RunSpec, deep: bool = False) -> c.VerifyReport:
    report: c.VerifyReport = verify.run(spec, Namespace(deep=deep, shard=None, window_ended=False))
    return report


def fails(monkeypatch: pytest.MonkeyPatch, call: str, name: str, number: int) -> None:
    """Files of this name can't be opened, or read, as the kernel says it."""
    plain_open, plain_pread, real_open = os.open, os.pread, io.open

    def error(path: object) -> OSError:
        return OSError(number, os.strerror(number), str(path))

    def opened(path: Any, *args: Any, **more: Any) -> Any:
        if call == "open" and str(path).endswith(name):
            raise error(path)
        return plain_open(path, *args, **more)

    def file(path: Any, *args: Any, **more: Any) -> Any:
        if call == "open" and str(path).endswith(name):
            raise error(path)
        return real_open(path, *args, **more)

    def pread(fd: int, size: int, at: int) -> bytes:
        if call == "read" and os.readlink(f"/proc/self/fd/{fd}").endswith(name):
            raise OSError(number, os.strerror(number))
        return plain_pread(fd, size, at)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(io, "open", file)
    monkeypatch.setattr(os, "pread", pread)


@pytest.mark.parametrize("number", OF_THE_HOST)
@pytest.mark.parametrize("call", ["open", "read"])
@pytest.mark.parametrize("deep", [False, True])
def test_what_the_host_can_not_read_is_not_noted_as_damaged(
    made: tuple[c.RunSpec, Path], monkeypatch: pytest.MonkeyPatch, number: int, call: str, deep: bool
) -> None:
    spec, dataset = made
    fails(monkeypatch, call, "v1/data_3.pt", number)
    with h.refuses(TryAgain, "file", "v1/data_3.pt", os.strerror(number), OF_THE_HOST[number]):
        check(spec, deep)
    assert not list(dataset.rglob("damaged.jsonl"))
    monkeypatch.undo()
    assert check(spec, deep=True).ok


LINES = ("shards/00000/manifest.jsonl", "shards/00000/failures.jsonl", "shards/00000/damaged.jsonl")


@pytest.mark.parametrize("number", OF_THE_HOST)
@pytest.mark.parametrize("name", LINES)
def test_lines_that_the_host_can_not_read_are_read_later(
    made: tuple[c.RunSpec, Path], monkeypatch: pytest.MonkeyPatch, number: int, name: str
) -> None:
    spec, dataset = made
    (dataset / name).touch()
    before = h.tree(dataset)
    fails(monkeypatch, "open", name, number)
    with h.refuses(TryAgain, "file", name, OF_THE_HOST[number]):
        check(spec)
    monkeypatch.undo()
    assert h.tree(dataset) == before


def test_a_folder_in_a_manifests_place_is_refused_by_name_until_it_is_away(made: tuple[c.RunSpec, Path]) -> None:
    spec, dataset = made
    manifest = dataset / LINES[0]
    manifest.unlink()
    manifest.mkdir()
    for verb in (lambda: check(spec), lambda: plan.run(spec, Namespace(dry_run=False, failed=False))):
        with h.refuses(Refused, "manifest.jsonl", str(manifest), "move it away"):
            verb()
    manifest.rmdir()
    assert [s.id for s in plan.run(spec, Namespace(dry_run=False, failed=False)).shards] == [0]


def test_a_proof_that_can_not_read_a_file_notes_nothing(
    made: tuple[c.RunSpec, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, dataset = made

    def no_more(path: Path, *args: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr(proof, "_last_row", no_more)
    with h.refuses(TryAgain, "file", "v1/data_", "limit of open files"):
        check(spec)
    assert not list(dataset.rglob("damaged.jsonl"))


@pytest.mark.parametrize("number", OF_CONTENT)
def test_what_says_something_of_the_file_is_noted(
    made: tuple[c.RunSpec, Path], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    spec, dataset = made
    fails(monkeypatch, "open", "v1/data_3.pt", number)
    with h.refuses(Refused, "manifest.jsonl", "row 3: v1/data_3.pt: " + os.strerror(number)):
        check(spec)
    assert (dataset / "shards/00000/damaged.jsonl").read_text().count("\n") == 1


@pytest.mark.parametrize("name", formats.names())
@pytest.mark.parametrize("number", OF_THE_HOST)
@pytest.mark.parametrize("whole", [True, False])
def test_no_reader_takes_the_hosts_error_for_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int, whole: bool
) -> None:
    """Nor where the file is spoilt already, and its reader looks for the reason."""
    form = formats.get(name)
    crcs = h.sample_file(tmp_path / "x", [3] * 9, [1] * 9, h.states(9), form)
    if not whole:
        with (tmp_path / "x").open("r+b") as f:
            f.seek(12)
            f.write(b"\xff" * 4)
    known = identity(np.full(9, 3, np.int32), np.ones(9, np.uint8)).hex()
    line = Published(0, 9, "x", (tmp_path / "x").stat().st_size, known, crcs, 1, "r", 1.0)
    assert bool(converted.file_wrong(tmp_path, line, form, h.SHAPE, True)) != whole
    fails(monkeypatch, "open", "/x", number)
    with pytest.raises(TryAgain, match=OF_THE_HOST[number]):
        converted.file_wrong(tmp_path, line, form, h.SHAPE, True)


@pytest.mark.parametrize("number", sorted(OF_THE_HOST.keys() - {errno.EACCES, errno.EPERM}))
def test_no_verb_calls_the_hosts_error_a_bug(number: int) -> None:
    error = program._of_the_host(OSError(number, os.strerror(number), "/data/x"))
    assert isinstance(error, TryAgain)
    assert (error.doc.value, OF_THE_HOST[number] in error.doc.fix) == ("/data/x", True)


@pytest.mark.parametrize("name", ["plan.lock", "plan.json"])
def test_a_folder_in_a_files_place_is_no_bug(made: tuple[c.RunSpec, Path], name: str) -> None:
    spec, dataset = made
    (dataset / name).unlink(missing_ok=True)
    (dataset / name).mkdir()
    with pytest.raises(IsADirectoryError) as error:
        plan.run(spec, Namespace(dry_run=False, failed=False))
    said = program._of_the_host(error.value)
    assert isinstance(said, BadInput)
    assert (str(said.doc.value), "move it away" in said.doc.fix) == (str(dataset / name), True)
    assert not list(dataset.rglob("*.tmp"))


def test_a_librarys_error_without_a_number_is_of_the_content() -> None:
    assert faults.reason(Path("x"), OSError("Expected to read 8 bytes")) == "Expected to read 8 bytes"
