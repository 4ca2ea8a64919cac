"""A plan takes effect: shards get their inputs, and samples that have moved in the data file new names.

A line inserted into a data file moves every later row. A sample's identity is the hash of its ids and mask, so that
what is published of it still is: its file gets a second name (a hard link, or a copy where there are none) and a line
under its new row.

All of a plan takes effect, or nothing: it is made ready in ``tmp/plan``, and from the moment that ``moves.jsonl``
stands there it counts. Whatever ends the verb then (a signal, a full disk), the next one that opens the data set
finishes it.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from hsx_host import state
from hsx_host.errors import TryAgain
from hsx_host.formats import Format
from hsx_host.manifest import (
    Published,
    forget_damaged,
    judged,
    published_lines,
    remove,
    remove_second_manifests,
    rewrite,
)
from hsx_host.progress import log
from hsx_host.shards import ShardFiles, shard_ids, sync_folder

_RECORD = "moves.jsonl"
_LOCK = "plan.lock"
_OWN = ("dataset.json", "plan.json", "rejects.jsonl")  # what only a plan writes, beside the shards


def published(dataset: Path) -> dict[bytes, Published]:
    """Every published sample whose file is whole, by identity; one of several that are the same. Samples that an
    unfinished plan moves are among them."""
    found: dict[bytes, Published] = {}
    for shard in shard_ids(dataset):
        manifest = ShardFiles(dataset, shard).manifest
        good, _, _ = judged(dataset, manifest, None, repair=True)
        for line in good.values():
            found.setdefault(bytes.fromhex(line.ids_hash), line)
    for line in _moves(dataset).values():
        found.setdefault(bytes.fromhex(line.ids_hash), line)
    return found


def draft(dataset: Path) -> Path:
    """Where a plan is made ready: ``<shard>.safetensors``, and the moved samples' files by their new rows."""
    return dataset / "tmp" / "plan"


@contextmanager
def alone(dataset: Path, shard_size: int) -> Iterator[None]:
    """No other plan of the data set is at work, of another host of its disk neither; one that was interrupted has
    taken effect, and what it left unfinished is gone. A data set that this plan does not make leaves no folder.

    :raises TryAgain: another one is at work for a minute, or a shard that the interrupted one moves is.
    """
    dataset.mkdir(parents=True, exist_ok=True)
    with _planning(dataset):
        _finish_interrupted(dataset, shard_size)
        _discard(dataset)
        for name in _OWN:
            for path in dataset.glob(f".{name}.*.tmp"):
                path.unlink()
        try:
            yield
        finally:
            _discard(dataset)
            if not (dataset / "dataset.json").exists():
                (dataset / _LOCK).unlink(missing_ok=True)
                with suppress(OSError):  # not empty: others' work lies there
                    dataset.rmdir()


def _discard(dataset: Path) -> None:
    """Remove what a plan has left that does not count, and the folder that only it has made."""
    folder = draft(dataset)
    if folder.is_dir() and not (folder / _RECORD).exists():
        shutil.rmtree(folder)
        with suppress(OSError):  # not empty: others' work lies there
            folder.parent.rmdir()


def take_effect(dataset: Path, form: Format, shard_size: int, moves: dict[int, Published]) -> None:
    """Publish each sample of ``moves`` under its new row, and give shards the inputs that lie in the draft. The caller
    is ``alone``.

    :param moves: by new row, the line under which the sample is published now.
    :raises TryAgain: one of the shards is being extracted, or a sample has gone meanwhile; nothing is changed then.
    """
    folder = draft(dataset)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(dataset, {row // shard_size for row in moves}):
        for row, line in moves.items():
            try:
                _second_name(dataset / line.file, folder / str(row))
            except FileNotFoundError:
                raise TryAgain(
                    "the sample's file has gone since it was counted",
                    field="file",
                    value=dataset / line.file,
                    fix="start plan again",
                ) from None
        sync_folder(folder)
        new = (replace(moves[r], index=r, file=f"{form.FOLDER}/{form.file_name(r)}") for r in sorted(moves))
        rewrite(folder / _RECORD, new)
        _finish(dataset, shard_size)


def finish(dataset: Path, shard_size: int) -> None:
    """Let a plan that was interrupted take effect, if there is one.

    :raises TryAgain: one of its shards is being extracted, or another verb is at it.
    """
    if (draft(dataset) / _RECORD).exists():
        with _planning(dataset):
            _finish_interrupted(dataset, shard_size)


def _finish_interrupted(dataset: Path, shard_size: int) -> None:
    if (draft(dataset) / _RECORD).exists():  # else another verb has done it meanwhile
        with _locked(dataset, {row // shard_size for row in _moves(dataset)}):
            log("a plan was interrupted: it takes effect now")
            _finish(dataset, shard_size)


def _moves(dataset: Path) -> dict[int, Published]:
    """By new row, of the plan that takes effect. A damaged line moves nothing: its sample is made anew."""
    return published_lines(draft(dataset) / _RECORD, repair=True)


def _finish(dataset: Path, shard_size: int) -> None:
    """May begin anew at any point of it: no line ever stands beside another sample's file."""
    folder = draft(dataset)
    moved = _moves(dataset)
    by_shard: dict[int, list[Published]] = defaultdict(list)
    for row, line in moved.items():
        by_shard[row // shard_size].append(line)
    for shard in by_shard:
        manifest = ShardFiles(dataset, shard).manifest
        remove_second_manifests(manifest)
        forget_damaged(manifest, moved)  # of the files that others take the place of
        _rewrite(dataset, shard, moved, [])
    for row, line in moved.items():
        path = dataset / line.file
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            remove(path)
        with suppress(FileNotFoundError):  # it has its name already
            (folder / str(row)).replace(path)
    for parent in {(dataset / line.file).parent for line in moved.values()}:
        sync_folder(parent)
    for shard, lines in by_shard.items():
        _rewrite(dataset, shard, moved, lines)
    for file in sorted(folder.glob("*.safetensors")):
        files = ShardFiles(dataset, int(file.stem))
        _make_folder(files)
        file.replace(files.input)
        sync_folder(files.folder)
    (folder / _RECORD).unlink()
    _discard(dataset)
    if moved:
        log(f"{len(moved)} samples stand in other rows of the data file now: their files were given these rows' names")


def _rewrite(dataset: Path, shard: int, moved: dict[int, Published], lines: Iterable[Published]) -> None:
    """The manifest of a shard, with these lines in the place of those of the moved rows."""
    manifest = ShardFiles(dataset, shard).manifest
    kept = [line for row, line in published_lines(manifest, repair=True).items() if row not in moved]
    rewrite(manifest, sorted([*kept, *lines], key=lambda line: line.index))


def _planning(dataset: Path) -> AbstractContextManager[None]:
    return state.locked(dataset / _LOCK, wait_s=60, what="a plan of this data set")


def _make_folder(files: ShardFiles) -> None:
    if files.folder.is_file():
        state.set_aside(files.folder)
    files.folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def _locked(dataset: Path, shards: Iterable[int]) -> Iterator[None]:
    with ExitStack() as locks:
        for shard in sorted(shards):
            files = ShardFiles(dataset, shard)
            _make_folder(files)
            locks.enter_context(state.locked(files.lock, wait_s=0, what=f"shard {shard:05d}"))
        yield


def _second_name(source: Path, path: Path) -> None:
    try:
        os.link(source, path)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, path)
        with path.open("rb") as copy:
            os.fsync(copy.fileno())
