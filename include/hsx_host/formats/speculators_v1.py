"""speculators v1: one ``torch.save`` file a sample, read by speculators 0.3 to 0.7 (0.8 and later don't).

A dict of ``input_ids`` long [n], ``hidden_states`` list of [n, H] (layers ascending, last the final hidden
state before the final norm) and ``loss_mask`` long [n], loadable with ``torch.load(mmap=True, weights_only=True)``.
Source: speculators 0.7.0, train/data.py (``standardize_data_v1``, ``SampleFileDataset``). Its reader takes every file
below the folder whose name ends in ``pt``, so that nothing else may lie there under such a name.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsx_host.formats import Laid, Shape
from hsx_host.formats.torchsave import ITEM_BYTES, Skeleton, Tensor, skeleton
from hsx_host.formats.torchzip import records, set_crcs
from hsx_host.spool import Plane
from hsx_host.state import write_text

NAME = "speculators_v1"
FOLDER = "v1"
NORM = "before"


def file_name(row: int) -> str:
    """``data_<row>.pt``."""
    return f"data_{row}.pt"


def file_bytes(tokens: int, shape: Shape) -> int:
    """The exact size of a sample's file, in bytes."""
    return _skeleton(tokens, shape).size


def lay_out(path: Path, ids: NDArray[Any], mask: NDArray[Any], shape: Shape) -> Laid:
    """Write a sparse file with everything but the hidden states. ``path`` must not exist; a failed try removes nothing.

    :param ids: int32 or int64 [n]; ``mask``: uint8 [n].
    :raises OSError: ENOSPC and the like.
    """
    laid = _skeleton(len(ids), shape)
    laid.write(path)
    places = dict(zip(_names(shape), laid.offsets, strict=True))
    crcs = {}
    fd = os.open(path, os.O_WRONLY)
    try:
        for name, values in (("input_ids", ids), ("loss_mask", mask)):
            data = np.ascontiguousarray(values, dtype="<i8").tobytes()
            os.pwrite(fd, data, places[name])
            crcs[name] = zlib.crc32(data)
    finally:
        os.close(fd)
    stride = shape.hidden_size * ITEM_BYTES[shape.dtype]
    return Laid(bytes=laid.size, planes=[Plane(name, places[name], stride) for name in shape.planes], crcs=crcs)


def complete(path: Path, crcs: dict[str, int], shape: Shape) -> None:
    """Put the records' checksums into the zip, so that any zip tool proves the file."""
    keys = _keys(shape)
    set_crcs(path, {keys[name]: crc for name, crc in crcs.items()})


def check(path: Path, tokens: int, shape: Shape) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
    """The checksums and places in the file's own directory; ValueError where it is no sample of ``tokens`` tokens."""
    found, keys = records(path), _keys(shape)
    lengths = dict.fromkeys(shape.planes, tokens * shape.hidden_size * ITEM_BYTES[shape.dtype])
    lengths |= {"input_ids": tokens * 8, "loss_mask": tokens * 8}
    for name, length in lengths.items():
        record = found.get(keys[name])
        if record is None:
            raise ValueError(f"{name} is missing")
        if record.bytes != length:
            raise ValueError(f"{name} has {record.bytes} bytes instead of {length}")
    return (
        {name: found[keys[name]].crc32 for name in lengths},
        {name: (found[keys[name]].offset, found[keys[name]].bytes) for name in lengths},
    )


def load(path: Path, shape: Shape) -> dict[str, Any]:
    """The sample as its trainer loads it, memory-mapped; ValueError where keys or shapes are not v1's."""
    import torch

    body = torch.load(path, mmap=True, weights_only=True)
    if not isinstance(body, dict) or set(body) != {"input_ids", "hidden_states", "loss_mask"}:
        raise ValueError("not the three keys of speculators v1")
    n = len(body["input_ids"])
    wanted = [(n, shape.hidden_size)] * len(shape.planes)
    if [tuple(t.shape) for t in body["hidden_states"]] != wanted or body["loss_mask"].shape != (n,):
        raise ValueError("shapes are not [n], [n, H] a layer, [n]")
    return {"input_ids": body["input_ids"], "loss_mask": body["loss_mask"], "planes": body["hidden_states"]}


def side_files(folder: Path, lengths: dict[int, int], facts: dict[str, Any]) -> None:
    """``sample_lengths.json`` (complete, or the reader ignores it as a whole) and ``data_config.json`` (for people)."""
    import json

    write_text(folder / "sample_lengths.json", json.dumps({str(row): n for row, n in sorted(lengths.items())}) + "\n")
    write_text(folder / "data_config.json", json.dumps(facts, indent=2, sort_keys=True) + "\n")


def _names(shape: Shape) -> list[str]:
    """The tensors in the order in which torch numbers their storages."""
    return ["input_ids", *shape.planes, "loss_mask"]


def _keys(shape: Shape) -> dict[str, str]:
    """The zip record of each tensor."""
    return {name: f"data/{i}" for i, name in enumerate(_names(shape))}


def _skeleton(tokens: int, shape: Shape) -> Skeleton:
    ids, plane = Tensor((tokens,), "int64"), Tensor((tokens, shape.hidden_size), shape.dtype)
    return skeleton({"input_ids": ids, "hidden_states": [plane] * len(shape.planes), "loss_mask": ids})
