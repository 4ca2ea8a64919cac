"""What readers find their samples by, beside the samples, against the manifests; ``handoff`` and ``convert`` write it.

Samples that are right train nothing right where the reader's own list names them in another order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from hsx_host import converted, formats
from hsx_host.errors import Refused
from hsx_host.manifest import Published, published_lines
from hsx_host.shards import ShardFiles, shard_ids


def wrong(dataset: Path, names: Iterable[str], *, deep: bool) -> Iterator[str]:
    """What is wrong beside the samples of a data set that was handed off in these formats. ``deep`` reads it all.

    Also what ``verify`` has noted of samples that ``convert`` made: the manifests don't know of them.
    """
    for name in names:
        form = formats.get(name)
        folder = dataset / form.FOLDER
        derived = (folder / converted.MEANING).exists()
        try:
            lines = converted.lines_of(folder) if derived else _published(dataset)
        except Refused as e:
            if not derived:
                raise
            yield f"{form.FOLDER}/{e.doc.field}: {e.doc.message}: convert writes it again"
            continue
        for row, why in sorted(converted.noted(folder, lines).items()) if derived else []:
            yield f"row {row}: {form.FOLDER}/{lines[row].file}: {why}: convert writes it again"
        for why in form.side_wrong(folder, lines, deep):
            yield f"{form.FOLDER}/{why}: {'convert' if derived else 'handoff'} writes it again"


def _published(dataset: Path) -> dict[int, Published]:
    found: dict[int, Published] = {}
    for shard in shard_ids(dataset):
        found |= published_lines(ShardFiles(dataset, shard).manifest)
    return found
