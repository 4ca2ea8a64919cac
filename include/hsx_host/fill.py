"""Write one whole sample into a format: what the capture does with rows, done with tensors that are there already."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from hsx_host.formats import Format, Shape
from hsx_host.layouts.fields import ITEM_BYTES


def write_sample(form: Format, path: Path, sample: dict[str, Any], shape: Shape) -> tuple[int, dict[str, int]]:
    """Write ``sample`` (``input_ids``, ``loss_mask``, ``planes``) to a new file; its size and crc32 by data record.

    Whole or not at all: it is made under another name beside ``path``, synced, then renamed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        laid = form.lay_out(temporary, sample["input_ids"].numpy(), sample["loss_mask"].numpy(), shape)
        crcs = dict(laid.crcs)
        with temporary.open("r+b") as f:
            os.posix_fallocate(f.fileno(), 0, laid.bytes)  # a full disk is an error here, not a signal below
            whole = np.memmap(f, np.uint8, "r+")
            for place, plane in zip(laid.planes, sample["planes"], strict=True):
                rows = np.ascontiguousarray(_bytes_of(plane))
                crcs[place.name] = zlib.crc32(rows)
                item = ITEM_BYTES[shape.dtype] * shape.hidden_size
                there = np.lib.stride_tricks.as_strided(
                    whole[place.offset :], (len(rows), item), (place.row_stride, 1), writeable=True
                )
                there[:] = rows
            whole.flush()
            del whole
        records = form.complete(temporary, crcs, shape)
        with temporary.open("rb") as f:
            os.fsync(f.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return laid.bytes, records


def _bytes_of(plane: Any) -> Any:
    """A plane of 16-bit floats as bytes, [n, 2 * H]."""
    import torch

    return plane.contiguous().view(torch.uint8).numpy()
