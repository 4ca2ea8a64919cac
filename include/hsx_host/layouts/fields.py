"""What a sample's file holds, told once and used by every container: ids, mask, and hidden states by plane."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsx_host.checksum import crc32
from hsx_host.formats import Laid, Shape
from hsx_host.spool import Plane

_PIECE = 8 << 20

ITEM_BYTES = {"int64": 8, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Field:
    """One tensor of a file: row-major, its name in checksums, and what stands in it.

    ``holds``: ``("input_ids",)``, ``("loss_mask",)``, or names of planes that lie side by side in each row.
    """

    record: str
    shape: tuple[int, ...]
    dtype: str
    holds: tuple[str, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * ITEM_BYTES[self.dtype]

    @property
    def is_text(self) -> bool:
        """Ids or mask: known before the capture."""
        return self.holds[0] in ("input_ids", "loss_mask")


def ids(tokens: int, record: str = "input_ids") -> Field:
    """The token ids, int64 [tokens]."""
    return Field(record, (tokens,), "int64", ("input_ids",))


def mask(tokens: int) -> Field:
    """The loss mask, int64 [tokens], 1 where the loss counts."""
    return Field("loss_mask", (tokens,), "int64", ("loss_mask",))


def text(field: Field, ids: NDArray[Any], mask: NDArray[Any]) -> bytes:
    """The data of ids or mask."""
    data: bytes = np.ascontiguousarray(ids if field.holds == ("input_ids",) else mask, dtype="<i8").tobytes()
    return data


def laid(
    placed: Iterable[tuple[Field, int]],
    size: int,
    texts: Mapping[str, bytes],
    shape: Shape,
    crc_at: Mapping[str, tuple[int, ...]],
) -> Laid:
    """What is known of a file that was laid out.

    :param placed: each field with its offset in the file; ``size``: the file's bytes.
    :param texts: the data of ids and mask, by record.
    """
    planes_at: dict[str, Plane] = {}
    crcs: dict[str, int] = {}
    tokens = 0
    for field, offset in placed:
        if field.is_text:
            crcs[field.holds[0]] = crc32(texts[field.record])
            tokens = field.elements
        else:
            planes_at |= planes(field, offset, shape)
    return Laid(size, [planes_at[name] for name in shape.planes], crcs, tokens, dict(crc_at))


def planes_of(fields: Iterable[Field], places: Mapping[str, tuple[int, int]], shape: Shape) -> list[Plane]:
    """Where the rows of each plane lie in a whole file, by (offset, bytes) of each record."""
    found: dict[str, Plane] = {}
    for field in fields:
        if not field.is_text:
            found |= planes(field, places[field.record][0], shape)
    return [found[name] for name in shape.planes]


def planes(field: Field, offset: int, shape: Shape) -> dict[str, Plane]:
    """Where each plane of a field lies in the file."""
    row = shape.hidden_size * ITEM_BYTES[shape.dtype]
    return {name: Plane(name, offset + i * row, row * len(field.holds)) for i, name in enumerate(field.holds)}


def split(field: Field, tensor: Any, shape: Shape) -> dict[str, Any]:
    """A loaded tensor as what it holds: ids or mask [n], or planes [n, H] (views)."""
    if field.is_text:
        return {field.holds[0]: tensor}
    rows = tensor.reshape(-1, len(field.holds), shape.hidden_size)
    return {name: rows[:, i] for i, name in enumerate(field.holds)}


def as_sample(found: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """What ``split`` gave of all fields, as ``Format.load`` tells it."""
    return {
        "input_ids": found["input_ids"],
        "loss_mask": found["loss_mask"],
        "planes": [found[name] for name in shape.planes],
    }


def crc_of(path: Path, offset: int, length: int) -> int:
    """The crc32 of a part of a file."""
    crc = 0
    fd = os.open(path, os.O_RDONLY)
    try:
        for at in range(offset, offset + length, _PIECE):
            crc = crc32(os.pread(fd, min(_PIECE, offset + length - at), at), crc)
    finally:
        os.close(fd)
    return crc


def pwrite_all(fd: int, data: bytes | bytearray, offset: int) -> None:
    """Write all of ``data``: the kernel may take a part only (a full disk, a quota), and tells so by its count.

    :raises OSError: what kept the rest from being written.
    """
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done
