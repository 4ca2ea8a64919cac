"""speculators v1: one ``torch.save`` file a sample, read by speculators 0.3 to 0.7 (0.8 and later don't).

A dict of ``input_ids`` long [n], ``hidden_states`` list of [n, H] (layers ascending, last the final hidden
state before the final norm) and ``loss_mask`` long [n], loadable with ``torch.load(mmap=True, weights_only=True)``.
Source: speculators 0.7.0, train/data.py (``standardize_data_v1``, ``SampleFileDataset``). Its reader takes every file
below the folder whose name ends in ``pt``, so that nothing else may lie there under such a name.
"""

from __future__ import annotations

import functools
import os
import tempfile
import threading
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from hsx_host.errors import Refused
from hsx_host.formats import Laid, Shape
from hsx_host.formats.torchzip import Record, records, set_crcs
from hsx_host.spool import Plane
from hsx_host.state import write_text

NAME = "speculators_v1"
FOLDER = "v1"
NORM = "before"

_PERIOD = 32  # tokens after which every record's length is again a multiple of torch's alignment of 64 bytes
_proved: set[tuple[int, int, str]] = set()
_proving = threading.Lock()


def file_name(row: int) -> str:
    """``data_<row>.pt``."""
    return f"data_{row}.pt"


def file_bytes(tokens: int, shape: Shape) -> int:
    """The exact size of a sample's file, in bytes.

    torch itself is asked for one length of each kind; sizes between are exact, since 32 tokens more make every
    record longer by a multiple of torch's alignment, as long as the pickle's whole numbers keep their width.
    """
    rows = tokens * shape.hidden_size
    kind = (tokens % _PERIOD, _width(tokens), _width(rows), rows * 16 >= 1 << 32)
    least, size = _measured(kind, tokens, len(shape.planes), shape.hidden_size, shape.dtype)
    return size + (tokens - least) * (16 + len(shape.planes) * shape.hidden_size * _element(shape.dtype))


def lay_out(path: Path, ids: NDArray[Any], mask: NDArray[Any], shape: Shape) -> Laid:
    """Write a sparse file with everything but the hidden states. ``path`` must not exist; a failed try removes nothing.

    :param ids: int32 or int64 [n]; ``mask``: uint8 [n].
    :raises OSError: ENOSPC and the like.
    """
    with path.open("xb") as f:
        _skeleton(f, len(ids), len(shape.planes), shape.hidden_size, shape.dtype)
    found, keys = records(path), _keys(shape)
    crcs = {}
    fd = os.open(path, os.O_WRONLY)
    try:
        for name, values in (("input_ids", ids), ("loss_mask", mask)):
            data = np.ascontiguousarray(values, dtype="<i8").tobytes()
            os.pwrite(fd, data, found[keys[name]].offset)
            crcs[name] = zlib.crc32(data)
    finally:
        os.close(fd)
    _prove(path, found, shape)
    stride = shape.hidden_size * _element(shape.dtype)
    planes = [Plane(name, found[keys[name]].offset, stride) for name in shape.planes]
    return Laid(bytes=path.stat().st_size, planes=planes, crcs=crcs)


def complete(path: Path, crcs: dict[str, int], shape: Shape) -> None:
    """Put the records' checksums into the zip, so that any zip tool proves the file."""
    keys = _keys(shape)
    set_crcs(path, {keys[name]: crc for name, crc in crcs.items()})


def check(path: Path, tokens: int, shape: Shape) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
    """The checksums and places in the file's own directory; ValueError where it is no sample of ``tokens`` tokens."""
    found, keys = records(path), _keys(shape)
    lengths = dict.fromkeys(shape.planes, tokens * shape.hidden_size * _element(shape.dtype))
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


def _keys(shape: Shape) -> dict[str, str]:
    """The zip record of each tensor: torch numbers storages in the order in which it pickles them."""
    names = ["input_ids", *shape.planes, "loss_mask"]
    return {name: f"data/{i}" for i, name in enumerate(names)}


def _skeleton(f: IO[bytes], tokens: int, planes: int, hidden_size: int, dtype: str) -> None:
    """Let torch write the file with holes for all data (a file object makes it name the archive ``archive``)."""
    import torch

    empty = {
        "input_ids": torch.empty(tokens, dtype=torch.long),
        "hidden_states": [torch.empty(tokens, hidden_size, dtype=getattr(torch, dtype)) for _ in range(planes)],
        "loss_mask": torch.empty(tokens, dtype=torch.long),
    }
    with torch.serialization.skip_data():
        torch.save(empty, f)


@functools.cache
def _measured_at(tokens: int, planes: int, hidden_size: int, dtype: str) -> int:
    with tempfile.TemporaryFile() as f:
        _skeleton(f, tokens, planes, hidden_size, dtype)
        return f.seek(0, os.SEEK_END)


_kinds: dict[tuple[object, ...], tuple[int, int]] = {}


def _measured(kind: tuple[object, ...], tokens: int, planes: int, hidden_size: int, dtype: str) -> tuple[int, int]:
    key = (*kind, planes, hidden_size, dtype)
    if key not in _kinds or tokens * hidden_size * planes * 2 >= 1 << 31:  # zip64 has widths of its own: ask torch
        _kinds[key] = (tokens, _measured_at(tokens, planes, hidden_size, dtype))
    return _kinds[key]


def _width(n: int) -> int:
    """Bytes of a whole number in a pickle of protocol 2: BININT1, BININT2, BININT, LONG1."""
    return 1 if n < 1 << 8 else 2 if n < 1 << 16 else 4 if n < 1 << 31 else 5 + n.bit_length() // 8


def _element(dtype: str) -> int:
    return {"bfloat16": 2, "float16": 2}[dtype]


def _prove(path: Path, found: dict[str, Record], shape: Shape) -> None:
    """Once a process and shape: the places from the zip are where torch itself reads (Refused where not)."""
    key = (len(shape.planes), shape.hidden_size, shape.dtype)
    with _proving:
        if key in _proved:
            return
        import torch

        body = torch.load(path, mmap=True, weights_only=True)
        tensors = [body["input_ids"], *body["hidden_states"], body["loss_mask"]]
        base = tensors[0].data_ptr() - found["data/0"].offset  # of the mapped file, if the first tensor is right
        torchs = [t.data_ptr() - base for t in tensors]
        ours = [found[f"data/{i}"].offset for i in range(len(tensors))]
        ids = np.fromfile(path, dtype="<i8", count=tensors[0].numel(), offset=ours[0])
        if torchs != ours or not np.array_equal(tensors[0].numpy(), ids):
            raise Refused(
                f"torch {torch.__version__} reads tensors at {torchs}, the file has them at {ours}",
                field="host.python",
                fix="use a torch that hsx knows (2.11 to 2.14)",
            )
        _proved.add(key)
