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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from hsx_host import state
from hsx_host.formats import Format
from hsx_host.manifest import Published, judged, published_lines, rewrite
from hsx_host.progress import log
from hsx_host.shards import ShardFiles, shard_ids, sync_folder

_RECORD = "moves.jsonl"


def published(dataset: Path) -> dict[bytes, Published]:
    """Every published sample whose file is whole, by identity; one of several that are the same. Samples that an
    unfinished plan moves are among them."""
    found: dict[bytes, Published] = {}
    for shard in shard_ids(dataset):
        manifest = ShardFiles(dataset, shard).manifest
        good, _, _ = judged(dataset, manifest, None, repair=True)
        for line in good.values():
            found.setdefault(bytes.fromhex(line.ids_hash), line)
    for line in published_lines(draft(dataset) / _RECORD).values():
        found.setdefault(bytes.fromhex(line.ids_hash), line)
    return found


def draft(dataset: Path) -> Path:
    """Where a plan is made ready: ``<shard>.safetensors``, and the moved samples' files by their new rows."""
    return dataset / "tmp" / "plan"


def discard(dataset: Path) -> None:
    """Remove what a plan has left that does not count, and folders that only it has made."""
    folder = draft(dataset)
    if folder.is_dir() and not (folder / _RECORD).exists():
        shutil.rmtree(folder)
        for parent in (folder.parent, dataset):
            with suppress(OSError):  # not empty: others' work lies there
                parent.rmdir()


def take_effect(dataset: Path, form: Format, shard_size: int, moves: dict[int, Published]) -> None:
    """Publish each sample of ``moves`` under its new row, and give shards the inputs that lie in the draft.

    :param moves: by new row, the line under which the sample is published now.
    :raises TryAgain: one of the shards is being extracted; nothing is changed then.
    """
    folder = draft(dataset)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(dataset, {row // shard_size for row in moves}):
        for row, line in moves.items():
            _second_name(dataset / line.file, folder / str(row))
        sync_folder(folder)
        new = (replace(moves[r], index=r, file=f"{form.FOLDER}/{form.file_name(r)}") for r in sorted(moves))
        rewrite(folder / _RECORD, new)
        _finish(dataset, shard_size)


def finish(dataset: Path, shard_size: int) -> None:
    """Let a plan that was interrupted take effect, if there is one.

    :raises TryAgain: one of its shards is being extracted, or another verb is at it.
    """
    record = draft(dataset) / _RECORD
    if record.exists():
        with _locked(dataset, {row // shard_size for row in published_lines(record)}):
            if record.exists():  # else another verb has done it meanwhile
                log("a plan was interrupted: it takes effect now")
                _finish(dataset, shard_size)


def _finish(dataset: Path, shard_size: int) -> None:
    """May begin anew at any point of it: no line ever stands beside another sample's file."""
    folder = draft(dataset)
    moved = published_lines(folder / _RECORD)
    by_shard: dict[int, list[Published]] = defaultdict(list)
    for row, line in moved.items():
        by_shard[row // shard_size].append(line)
    for shard in by_shard:
        _rewrite(dataset, shard, moved, [])
    for row, line in moved.items():
        path = dataset / line.file
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # it has its name already
            (folder / str(row)).replace(path)
    for parent in {(dataset / line.file).parent for line in moved.values()}:
        sync_folder(parent)
    for shard, lines in by_shard.items():
        _rewrite(dataset, shard, moved, lines)
    for file in sorted(folder.glob("*.safetensors")):
        files = ShardFiles(dataset, int(file.stem))
        if files.folder.is_file():
            state.set_aside(files.folder)
        files.folder.mkdir(parents=True, exist_ok=True)
        file.replace(files.input)
        sync_folder(files.folder)
    (folder / _RECORD).unlink()
    discard(dataset)
    if moved:
        log(f"{len(moved)} samples stand in other rows of the data file now: their files were given these rows' names")


def _rewrite(dataset: Path, shard: int, moved: dict[int, Published], lines: Iterable[Published]) -> None:
    """The manifest of a shard, with these lines in the place of those of the moved rows."""
    manifest = ShardFiles(dataset, shard).manifest
    kept = [line for row, line in published_lines(manifest, repair=True).items() if row not in moved]
    rewrite(manifest, sorted([*kept, *lines], key=lambda line: line.index))


@contextmanager
def _locked(dataset: Path, shards: Iterable[int]) -> Iterator[None]:
    with ExitStack() as locks:
        locks.enter_context(state.locked(dataset / "plan.lock", wait_s=60, what="a plan of this data set"))
        for shard in sorted(shards):
            files = ShardFiles(dataset, shard)
            files.folder.mkdir(parents=True, exist_ok=True)
            locks.enter_context(state.locked(files.lock, wait_s=0, what=f"shard {shard:05d}"))
        yield


def _second_name(source: Path, path: Path) -> None:
    try:
        os.link(source, path)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, path)
        with path.open("rb") as copy:
            os.fsync(copy.fileno())
