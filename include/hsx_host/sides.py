"""What readers find their samples by, beside the samples, against the manifests; ``handoff`` and ``convert`` write it.

Samples that are right train nothing right where the reader's own list names them in another order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from hsx_host import converted, formats
from hsx_host.manifest import Published, published_lines
from hsx_host.shards import ShardFiles, shard_ids


def wrong(dataset: Path, names: Iterable[str], *, deep: bool) -> Iterator[str]:
    """What is wrong beside the samples of a data set that was handed off in these formats. ``deep`` reads it all."""
    for name in names:
        form = formats.get(name)
        folder = dataset / form.FOLDER
        derived = (folder / converted.MEANING).exists()
        lines = converted.opened(folder).lines if derived else _published(dataset)
        for why in form.side_wrong(folder, lines, deep):
            yield f"{form.FOLDER}/{why}: {'convert' if derived else 'handoff'} writes it again"


def _published(dataset: Path) -> dict[int, Published]:
    found: dict[int, Published] = {}
    for shard in shard_ids(dataset):
        found |= published_lines(ShardFiles(dataset, shard).manifest)
    return found
