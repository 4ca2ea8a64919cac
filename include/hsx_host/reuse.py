"""Samples that have moved to other rows of the data file: their files get new names instead of being extracted again.

A line inserted into a data file moves every later row. A sample's identity is the hash of its ids and mask, so that
what is published of it still is: its file gets a second name (a hard link, or a copy where there are none) and a line
under its new row.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from hsx_host import state
from hsx_host.formats import Format
from hsx_host.manifest import Published, judged, published_lines, rewrite
from hsx_host.progress import log
from hsx_host.shards import ShardFiles, shard_ids, sync_folder


def published(dataset: Path) -> dict[bytes, Published]:
    """Every published sample whose file is whole, by identity; one of several that are the same."""
    found: dict[bytes, Published] = {}
    for shard in shard_ids(dataset):
        manifest = ShardFiles(dataset, shard).manifest
        hashes = {row: bytes.fromhex(line.ids_hash) for row, line in published_lines(manifest).items()}
        good, _, _ = judged(dataset, manifest, hashes)  # whatever the plan has in these rows now
        for row, line in good.items():
            found.setdefault(hashes[row], line)
    return found


def move(dataset: Path, form: Format, shard_size: int, moves: dict[int, Published]) -> None:
    """Publish each sample of ``moves`` under its new row.

    A crash at any moment leaves no line beside another sample's file: the lines of the rows go first, then files take
    their names, then the new lines are written.

    :param moves: by new row, the line under which the sample is published now.
    :raises TryAgain: one of the shards is being extracted.
    """
    by_shard: dict[int, list[int]] = defaultdict(list)
    for row in moves:
        by_shard[row // shard_size].append(row)
    aside = dataset / "tmp" / "moves"
    shutil.rmtree(aside, ignore_errors=True)
    with ExitStack() as locks:
        for shard in sorted(by_shard):
            files = ShardFiles(dataset, shard)
            files.folder.mkdir(parents=True, exist_ok=True)
            locks.enter_context(state.locked(files.lock, wait_s=0, what=f"shard {shard:05d}"))
        aside.mkdir(parents=True)
        for row, line in moves.items():
            _second_name(dataset / line.file, aside / str(row))
        kept = {}
        for shard, rows in by_shard.items():
            files = ShardFiles(dataset, shard)
            kept[shard] = published_lines(files.manifest)
            for row in rows:
                kept[shard].pop(row, None)
            rewrite(files.manifest, kept[shard].values())
        folders = set()
        for row in moves:
            path = dataset / form.FOLDER / form.file_name(row)
            path.parent.mkdir(parents=True, exist_ok=True)
            (aside / str(row)).replace(path)
            folders.add(path.parent)
        for folder in folders:
            sync_folder(folder)
        for shard, rows in by_shard.items():
            for row in rows:
                name = f"{form.FOLDER}/{form.file_name(row)}"
                kept[shard][row] = replace(moves[row], index=row, file=name)
            rewrite(ShardFiles(dataset, shard).manifest, [kept[shard][row] for row in sorted(kept[shard])])
    shutil.rmtree(aside, ignore_errors=True)
    log(f"{len(moves)} samples stand in other rows of the data file now: their files were given these rows' names")


def _second_name(source: Path, path: Path) -> None:
    try:
        os.link(source, path)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, path)
