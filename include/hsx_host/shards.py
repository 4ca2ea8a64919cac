"""A shard on disk: its folder, its lock, and ``input.safetensors``, the samples that ``plan`` cut for it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsx_host.dataset import Sample, identity
from hsx_host.errors import TryAgain
from hsx_host.state import write_whole

#: Top-ups are shards from here on: a data file may grow without meeting their rows.
FIRST_TOP_UP = 50_000

_KINDS = {"ids": np.int32, "mask": np.uint8, "offsets": np.int64, "rows": np.int64, "hash": np.uint8}


@dataclass(frozen=True)
class ShardFiles:
    """Where everything of one shard lies. ``dataset``: the data set's folder."""

    dataset: Path
    id: int

    @property
    def folder(self) -> Path:
        return self.dataset / "shards" / f"{self.id:05d}"

    @property
    def input(self) -> Path:
        return self.folder / "input.safetensors"

    @property
    def manifest(self) -> Path:
        return self.folder / "manifest.jsonl"

    @property
    def failures(self) -> Path:
        return self.folder / "failures.jsonl"

    @property
    def suspects(self) -> Path:
        """What was in flight when the server died (``suspects.Suspects``)."""
        return self.folder / "suspects.json"

    @property
    def lock(self) -> Path:
        return self.folder / "lock"

    @property
    def tmp(self) -> Path:
        """Unfinished files: on the data set's file system, so that publishing is a rename, and outside every format."""
        return self.dataset / "tmp" / f"shard-{self.id:05d}"


def shard_name(shard: int, shard_size: int, rows: int) -> str:
    """A shard's name, ``shard 00007 rows 3500-3999``, of a data file of ``rows`` rows."""
    first = shard * shard_size
    return f"shard {shard:05d} rows {first}-{min(first + shard_size, rows) - 1}"


def shard_ids(dataset: Path) -> list[int]:
    """The shards that have a folder, ascending. What is not called as ``ShardFiles.folder`` writes it is none."""
    root = dataset / "shards"
    found = root.iterdir() if root.is_dir() else ()
    return sorted(int(p.name) for p in found if re.fullmatch("[0-9]{5}|[1-9][0-9]{5,}", p.name) and p.is_dir())


def row_numbers(dataset: Path, shard_size: int) -> Iterator[int]:
    """Every row number that a sample may have: of the data file up to its last shard, and of each top-up's shard."""
    ids = shard_ids(dataset)
    yield from range((max((s for s in ids if s < FIRST_TOP_UP), default=-1) + 1) * shard_size)
    for shard in (s for s in ids if s >= FIRST_TOP_UP):
        yield from range(shard * shard_size, (shard + 1) * shard_size)


@dataclass(frozen=True)
class ShardInput:
    """The valid samples of one shard, in row order.

    ``ids`` int32 [tokens] and ``mask`` uint8 [tokens] hold all samples one after another; sample i is
    ``offsets[i]:offsets[i+1]``. ``rows`` int64 [n] are line numbers of the data file, ``hash`` uint8 [n, 16].
    """

    ids: NDArray[np.int32]
    mask: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    rows: NDArray[np.int64]
    hash: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, i: int) -> Sample:
        """Sample i of the shard (its position, not its row)."""
        at, end = int(self.offsets[i]), int(self.offsets[i + 1])
        return Sample(int(self.rows[i]), self.ids[at:end], self.mask[at:end], self.hash[i].tobytes())

    def hashes(self) -> dict[int, bytes]:
        """Each row's identity."""
        return {int(row): self.hash[i].tobytes() for i, row in enumerate(self.rows)}

    def lengths(self) -> dict[int, int]:
        """Each row's tokens."""
        return dict(zip(self.rows.tolist(), np.diff(self.offsets).tolist(), strict=True))


def pack(samples: Sequence[Sample]) -> ShardInput:
    """Samples of one shard, one after another."""
    lengths = [len(s.ids) for s in samples]
    return ShardInput(
        ids=np.concatenate([s.ids for s in samples]) if samples else np.zeros(0, np.int32),
        mask=np.concatenate([s.mask for s in samples]) if samples else np.zeros(0, np.uint8),
        offsets=np.cumsum([0, *lengths], dtype=np.int64),
        rows=np.array([s.row for s in samples], np.int64),
        hash=np.frombuffer(b"".join(s.hash for s in samples), np.uint8).reshape(len(samples), 16),
    )


def write_input(path: Path, shard: ShardInput) -> None:
    """Write ``input.safetensors``, whole or not at all."""
    from safetensors.numpy import save

    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, save({name: np.ascontiguousarray(getattr(shard, name)) for name in _KINDS}))


def read_input(files: ShardFiles) -> ShardInput:
    """What ``plan`` wrote; TryAgain where it is missing, broken or another shard's: another plan makes it anew.

    Another shard's rows would be taken for all that this one has, and what is published of it for leftovers.
    """
    from safetensors.numpy import load_file

    try:
        found: dict[str, Any] = load_file(files.input)
        if {k: v.dtype for k, v in found.items()} != {k: np.dtype(v) for k, v in _KINDS.items()}:
            raise ValueError("its arrays are not those of a shard")
        shard = ShardInput(**found)
        size = int(json.loads((files.dataset / "dataset.json").read_bytes())["shard_size"])
        strange = [row for row in shard.rows.tolist() if row // size != files.id]
        if strange:
            raise ValueError(f"row {strange[0]} is not one of shard {files.id:05d}")
        for sample in map(shard.sample, range(len(shard))):
            if identity(sample.ids, sample.mask) != sample.hash:
                raise ValueError(f"row {sample.row} is not the sample that it was")
        return shard
    except Exception as e:  # safetensors has an exception of its own for a broken header
        raise TryAgain(
            f"the shard's samples can't be read: {e}", field="shard", value=files.input, fix="run plan first"
        ) from None


def sync_folder(path: Path) -> None:
    """Make renames in a folder last a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
