"""A disk that fills up while a format is written: exit 75 with the bytes that are needed, and the folder."""

from __future__ import annotations

import errno
import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import datasets
import host_data as h
import numpy as np
import pytest

from hsx_host import __main__ as program
from hsx_host import contract as c
from hsx_host import convert, fill, formats, handoff, plan, verify
from hsx_host.errors import HsxError, TryAgain

CONVERT = {"out": "", "source": "", "shards": "", "limit": 0, "min_tokens": 0, "max_tokens": 0, "approximate": False}
TOKENS = [5, 6, 7, 8, 9, 10]
#: How a full disk, a quota, and the library say it.
FULL = {
    "disk": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "quota": OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
    "library": OSError("Not enough disk space. Needed: Unknown size (download: Unknown size, generated: Unknown size)"),
    "wrapped": datasets.exceptions.DatasetGenerationError("An error occurred while generating the dataset"),
}
FULL["wrapped"].__cause__ = FULL["disk"]


def made_in(root: Path, *names: str) -> tuple[c.RunSpec, Path]:
    spec = h.make_spec(root, h.write_lines(root / "d.jsonl", h.samples(6)), formats=names)
    plan.run(spec, Namespace(dry_run=False, failed=False))
    return spec, h.publish(spec)


def hand_off(spec: c.RunSpec) -> object:
    return handoff.run(spec, Namespace(window_ended=False))


def converts(spec: c.RunSpec) -> object:
    return convert.run(spec, Namespace(format="", **CONVERT))


WAYS: dict[str, tuple[tuple[str, ...], Callable[[c.RunSpec], object]]] = {
    "handoff": (("speculators",), hand_off),
    "convert": (("speculators_v1", "speculators"), converts),
}


def raiser(error: Exception) -> Callable[..., NoReturn]:
    def fail(*args: object, **more: object) -> NoReturn:
        raise error

    return fail


def whole(spec: c.RunSpec, way: Callable[[c.RunSpec], object], folder: Path) -> None:
    """There is room again: nothing is in the way."""
    assert not list(folder.rglob(".*.tmp"))
    way(spec)
    hand_off(spec)
    assert verify.run(spec, Namespace(deep=True, shard=None, window_ended=False)).ok


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("full", FULL)
@pytest.mark.parametrize("call", ["from_generator", "save_to_disk"])
def test_the_arrow_data_set_finds_no_room_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, full: str, call: str
) -> None:
    names, run = WAYS[way]
    spec, dataset = made_in(tmp_path, *names)
    monkeypatch.setattr(datasets.Dataset, call, raiser(FULL[full]))
    needed = formats.get("speculators").side_bytes(6, sum(TOKENS))
    with h.refuses(TryAgain, "disk", "no space", f"{needed} bytes", str(dataset / "speculators"), "make room"):
        run(spec)
    monkeypatch.undo()
    whole(spec, run, dataset / "speculators")


@pytest.mark.parametrize("way", WAYS)
def test_the_arrow_data_set_is_counted_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    names, run = WAYS[way]
    spec, dataset = made_in(tmp_path, *names)
    form, plain = formats.get("speculators"), os.statvfs
    needed = form.side_bytes(6, sum(TOKENS))
    needed += sum(form.file_bytes(n, h.SHAPE) for n in TOKENS) if way == "convert" else 0

    class Disk:
        f_bavail, f_frsize = needed - 1, 1

    monkeypatch.setattr(os, "statvfs", lambda path: Disk)
    with h.refuses(TryAgain, "disk", f"{needed} bytes are needed", f"{needed - 1} are free", str(dataset)):
        run(spec)
    assert not list((dataset / "speculators").rglob("*.arrow"))
    monkeypatch.setattr(os, "statvfs", plain)
    whole(spec, run, dataset / "speculators")


@pytest.mark.parametrize("name", ["modelopt", "specforge", "speculators"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_sample_finds_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    spec, dataset = made_in(tmp_path, "speculators_v1", name)
    plain, done = fill.write_sample, []

    def third(*args: Any) -> Any:
        done.append(1)
        if len(done) > 2:
            raise OSError(number, os.strerror(number))
        return plain(*args)

    monkeypatch.setattr(fill, "write_sample", third)
    form = formats.get(name)
    needed = sum(form.file_bytes(n, h.SHAPE) for n in TOKENS) + form.side_bytes(6, sum(TOKENS))
    with h.refuses(TryAgain, "disk", "no space", f"{needed} bytes", str(dataset / form.FOLDER)):
        converts(spec)
    monkeypatch.undo()
    whole(spec, converts, dataset / form.FOLDER)


@pytest.mark.parametrize("name", formats.names())
@pytest.mark.parametrize("count", [1, 700])
def test_side_files_take_no_more_than_is_said(tmp_path: Path, name: str, count: int) -> None:
    form, n = formats.get(name), 40
    path = tmp_path / form.file_name(0)
    h.sample_file(path, [1] * n, [1] * n, h.states(n), form)
    for row in range(1, count):
        (tmp_path / form.file_name(row)).parent.mkdir(exist_ok=True)
        os.link(path, tmp_path / form.file_name(row))
    pair = (np.ones(n, np.int64), np.ones(n, np.int64))
    form.side_files(tmp_path, [formats.Row(row, n, lambda: pair) for row in range(count)], {"layers": [1, 3, 6]})
    samples = {tmp_path / form.file_name(row) for row in range(count)}
    took = sum(p.stat().st_size for p in tmp_path.iterdir() if p.is_file() and p not in samples)
    copies = 2 if name == "speculators" else 1  # its cache has gone again
    assert 0 < copies * took <= form.side_bytes(count, count * n)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE])
def test_what_the_library_wraps_is_told_as_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    spec, _ = made_in(tmp_path, "speculators")
    monkeypatch.setattr(formats.get("speculators"), "load", raiser(OSError(number, os.strerror(number), "/data/x")))
    with pytest.raises(OSError, match="/data/x") as e:
        hand_off(spec)
    assert isinstance(program._of_the_host(e.value), HsxError)
