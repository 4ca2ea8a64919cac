"""A sample as a safetensors file, laid out before it is filled; checksums stand in the header's metadata.

Source of the layout: the safetensors format (8 bytes header length, little-endian; a JSON object by tensor with dtype,
shape and data_offsets; the tensors' bytes without holes). The header is padded with spaces, as the format allows, so
that the data begins on a multiple of 64.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from hsx_host.formats import Laid, Shape
from hsx_host.layouts import faults
from hsx_host.layouts.fields import Field, as_sample, laid, planes_of, pwrite_all, split, text
from hsx_host.spool import Plane

_ALIGN = 64
_MOST_HEADER = 1 << 20
_DTYPES = {"int64": "I64", "bfloat16": "BF16", "float16": "F16"}
_CRC = "crc32."


class SafetensorsFile:
    """Files of one format. ``fields(tokens, shape)`` tells the tensors in the order of the file."""

    def __init__(self, fields: Callable[[int, Shape], list[Field]]) -> None:
        self._fields = fields

    def file_bytes(self, tokens: int, shape: Shape) -> int:
        """The exact size of a sample's file, in bytes."""
        fields = self._fields(tokens, shape)
        return len(_header(fields, {})) + sum(f.bytes for f in fields)

    def lay_out(self, path: Path, ids: NDArray[Any], mask: NDArray[Any], shape: Shape) -> Laid:
        """Write a sparse file with everything but hidden states. ``path`` must not exist."""
        fields = self._fields(len(ids), shape)
        header = _header(fields, {})
        texts = {field.record: text(field, ids, mask) for field in fields if field.is_text}
        *offsets, size = accumulate((f.bytes for f in fields), initial=len(header))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(fd, size)
            pwrite_all(fd, header, 0)
            for field, offset in zip(fields, offsets, strict=True):
                if field.is_text:
                    pwrite_all(fd, texts[field.record], offset)
        finally:
            os.close(fd)
        return laid(zip(fields, offsets, strict=True), size, texts, shape, {})

    def complete(self, path: Path, made: Laid, crcs: dict[str, int], shape: Shape) -> dict[str, int]:
        """Write the records' checksums into the header, which keeps its length."""
        fields = self._fields(made.tokens, shape)
        done = {f.record: crcs[f.holds[0]] for f in fields}
        fd = os.open(path, os.O_WRONLY)
        try:
            pwrite_all(fd, _header(fields, done), 0)
        finally:
            os.close(fd)
        return done

    def check(
        self, path: Path, tokens: int, shape: Shape, ids_hash: str = ""
    ) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
        """Checksums and places in the file's header; ValueError where it is no sample of ``tokens`` tokens.

        The header is compared byte by byte: another dtype or shape of as many bytes would load as well.
        """
        found, places, _ = _read_header(path)
        fields = self._fields(tokens, shape)
        for field in fields:
            if field.record not in places:
                raise ValueError(f"{field.record} is missing")
            if places[field.record][1] != field.bytes:
                raise ValueError(f"{field.record} has {places[field.record][1]} bytes instead of {field.bytes}")
        size, end = path.stat().st_size, max(offset + length for offset, length in places.values())
        if size != end:
            raise ValueError(f"the file has {size} bytes, its header says {end}")
        wanted = _header(fields, found)
        with path.open("rb") as file:
            if file.read(len(wanted)) != wanted:
                raise ValueError("its header (dtypes, shapes, places) is not what this format writes")
        return {f.record: found.get(f.record, 0) for f in fields}, {f.record: places[f.record] for f in fields}

    def planes(self, path: Path, tokens: int, shape: Shape) -> list[Plane]:
        """Where the rows of each plane lie in a whole file; ValueError as ``check``."""
        return planes_of(self._fields(tokens, shape), self.check(path, tokens, shape)[1], shape)

    def load(self, path: Path, shape: Shape) -> dict[str, Any]:
        """The sample, memory-mapped; ValueError where tensors or shapes are not the format's."""
        from safetensors import SafetensorError, safe_open

        out: dict[str, Any] = {}
        try:
            with safe_open(str(path), framework="pt") as f:
                tokens = f.get_slice("hidden_states").get_shape()[0]
                for field in self._fields(tokens, shape):
                    tensor = f.get_tensor(field.record)
                    if tuple(tensor.shape) != field.shape:
                        raise ValueError(f"{field.record} is {list(tensor.shape)}, not {list(field.shape)}")
                    out |= split(field, tensor, shape)
        except SafetensorError as e:
            raise ValueError(f"not a safetensors file of this format: {e}") from None
        return as_sample(out, shape)


def _header(fields: list[Field], crcs: dict[str, int]) -> bytes:
    """The header with its length in front; checksums take eight hex digits, known or not."""
    body: dict[str, Any] = {"__metadata__": {_CRC + f.record: f"{crcs.get(f.record, 0):08x}" for f in fields}}
    at = 0
    for f in fields:
        body[f.record] = {"dtype": _DTYPES[f.dtype], "shape": list(f.shape), "data_offsets": [at, at + f.bytes]}
        at += f.bytes
    text = json.dumps(body, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    return struct.pack("<Q", len(text)) + text


def _read_header(path: Path) -> tuple[dict[str, int], dict[str, tuple[int, int]], int]:
    """Checksums and (offset, bytes) by tensor, and the rows of the first; ValueError where it is no safetensors."""
    try:
        with path.open("rb") as f:
            (length,) = struct.unpack("<Q", f.read(8))
            if length > _MOST_HEADER:
                raise ValueError(f"its header would have {length} bytes")
            body = json.loads(f.read(length))
        crcs = {k[len(_CRC) :]: int(v, 16) for k, v in body.pop("__metadata__").items() if k.startswith(_CRC)}
        places = {k: (8 + length + v["data_offsets"][0], v["data_offsets"][1] - v["data_offsets"][0])
                  for k, v in body.items()}  # fmt: skip
        return crcs, places, int(next(iter(body.values()))["shape"][0])
    except OSError as e:
        raise ValueError(f"can't be read: {faults.reason(path, e)}") from None
    except (ValueError, struct.error, KeyError, IndexError, TypeError, AttributeError, StopIteration) as e:
        raise ValueError(f"not a whole safetensors file: {e}") from None
