"""Write one whole sample into a format: what the capture does with rows, done with tensors that are there already."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hsx_host.checksum import crc32
from hsx_host.formats import Format, Shape
from hsx_host.layouts.fields import ITEM_BYTES
from hsx_host.spool import Plane


def write_sample(form: Format, path: Path, sample: dict[str, Any], shape: Shape) -> tuple[int, dict[str, int]]:
    """Write ``sample`` (``input_ids``, ``loss_mask``, ``planes``) to a new file; its size and crc32 by data record.

    Whole or not at all: it is made under another name beside ``path``, synced, then renamed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        laid = form.lay_out(temporary, sample["input_ids"].numpy(), sample["loss_mask"].numpy(), shape)
        item = ITEM_BYTES[shape.dtype] * shape.hidden_size
        rows = {p.name: np.ascontiguousarray(_bytes_of(x)) for p, x in zip(laid.planes, sample["planes"], strict=True)}
        crcs = dict(laid.crcs)
        for block in side_by_side(laid.planes, item):
            together = [rows[plane.name] for plane in block]
            data = together[0] if len(block) == 1 else np.concatenate(together, axis=1)
            crcs |= dict.fromkeys((plane.name for plane in block), crc32(data))
        with temporary.open("r+b") as f:
            os.posix_fallocate(f.fileno(), 0, laid.bytes)  # a full disk is an error here, not a signal below
            whole = np.memmap(f, np.uint8, "r+")
            for place in laid.planes:
                there = np.lib.stride_tricks.as_strided(
                    whole[place.offset :], rows[place.name].shape, (place.row_stride, 1), writeable=True
                )
                there[:] = rows[place.name]
            whole.flush()
            del whole
        records = form.complete(temporary, laid, crcs, shape)
        with temporary.open("rb") as f:
            os.fsync(f.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return laid.bytes, records


def side_by_side(planes: Sequence[Plane], row_bytes: int) -> list[list[Plane]]:
    """Planes of a file, in its order, grouped by the tensor whose rows they share."""
    found: list[list[Plane]] = []
    for plane in planes:
        block = found[-1] if found else []
        if (
            block
            and plane.row_stride == block[0].row_stride >= (len(block) + 1) * row_bytes
            and plane.offset == block[0].offset + len(block) * row_bytes
        ):
            block.append(plane)
        else:
            found.append([plane])
    return found


def _bytes_of(plane: Any) -> Any:
    """A plane of 16-bit floats as bytes, [n, 2 * H]."""
    import torch

    return plane.contiguous().view(torch.uint8).numpy()
