"""A sample as a ``torch.save`` file of a dict: laid out without torch, filled by the capture, checked by its zip."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsx_host.dataset import identity
from hsx_host.formats import Laid, Shape
from hsx_host.layouts import torchsave
from hsx_host.layouts.fields import Field, as_sample, laid, planes_of, pwrite_all, split, text
from hsx_host.layouts.torchsave import Skeleton, Tensor
from hsx_host.layouts.torchzip import records
from hsx_host.spool import Plane

IDENTITY = "\0identity"  # stands for the sample's identity in a body: 32 hex digits

Body = Mapping[str, Field | list[Field] | str | bool]


class TorchFile:
    """Files of one format. ``body(tokens, shape)`` tells keys and fields in the order in which torch would pickle."""

    def __init__(self, body: Callable[[int, Shape], Body]) -> None:
        self._body = body

    def file_bytes(self, tokens: int, shape: Shape) -> int:
        """The exact size of a sample's file, in bytes."""
        return self._skeleton(tokens, shape, "0" * 32).size

    def lay_out(self, path: Path, ids: NDArray[Any], mask: NDArray[Any], shape: Shape) -> Laid:
        """Write a sparse file with everything but hidden states. ``path`` must not exist; a failed try removes nothing.

        :param ids: int32 or int64 [n]; ``mask``: uint8 [n].
        :raises OSError: ENOSPC and the like.
        """
        known = identity(ids.astype(np.int32), mask.astype(np.uint8)).hex()
        skeleton, fields = self._skeleton(len(ids), shape, known), self._fields(len(ids), shape)
        texts = {field.record: text(field, ids, mask) for field in fields if field.is_text}
        skeleton.write(path, {i: texts[field.record] for i, field in enumerate(fields) if field.is_text})
        crc_at = {field.record: at for field, at in zip(fields, skeleton.crc_at, strict=True)}
        return laid(zip(fields, skeleton.offsets, strict=True), skeleton.size, texts, shape, crc_at)

    def complete(self, path: Path, made: Laid, crcs: dict[str, int], shape: Shape) -> dict[str, int]:
        """Put the records' checksums into the zip, so that any zip tool proves the file.

        The local header's field stays 0: PyTorch's records say by flag bit 3 that the checksum follows the data.
        """
        fields = self._fields(made.tokens, shape)
        done = {f.record: crcs[f.holds[0]] for f in fields}
        fd = os.open(path, os.O_WRONLY)
        try:
            for field in fields:
                if not field.is_text:
                    for at in made.crc_at[field.record]:
                        pwrite_all(fd, struct.pack("<I", done[field.record]), at)
        finally:
            os.close(fd)
        return done

    def check(
        self, path: Path, tokens: int, shape: Shape, ids_hash: str = ""
    ) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
        """Checksums and places in the file's own directory; ValueError where it is no sample of ``tokens`` tokens.

        Every byte outside the tensors is a formula of the sample, so that all of them are compared: a pickle that names
        the layers in another order reads like a right one. ``ids_hash``: the sample's identity, "" takes any.
        """
        skeleton, fields = self._skeleton(tokens, shape, ids_hash or "0" * 32), self._fields(tokens, shape)
        with path.open("rb") as f:
            if not ids_hash and (at := skeleton.place_of("0" * 32)):
                known = os.pread(f.fileno(), 32, at)
                if not re.fullmatch(rb"[0-9a-f]{32}", known):
                    raise ValueError("its identity is not 32 hex digits")
                skeleton = self._skeleton(tokens, shape, known.decode())
            crcs = skeleton.crcs(f.fileno())
        if crcs is None:
            raise ValueError(self._why(path, fields))
        places = [(offset, field.bytes) for field, offset in zip(fields, skeleton.offsets, strict=True)]
        names = [field.record for field in fields]
        return dict(zip(names, crcs, strict=True)), dict(zip(names, places, strict=True))

    def _why(self, path: Path, fields: list[Field]) -> str:
        """In what a file is not what it should be, as far as its own directory tells."""
        found = records(path)
        for i, field in enumerate(fields):
            there = found.get(f"data/{i}")
            if there is None:
                return f"{field.record} is missing"
            if there.bytes != field.bytes:
                return f"{field.record} has {there.bytes} bytes instead of {field.bytes}"
        return "what stands around the tensors (headers, pickle, directory) is not what this format writes"

    def planes(self, path: Path, tokens: int, shape: Shape) -> list[Plane]:
        """Where the rows of each plane lie in a whole file; ValueError as ``check``."""
        return planes_of(self._fields(tokens, shape), self.check(path, tokens, shape)[1], shape)

    def load(self, path: Path, shape: Shape) -> dict[str, Any]:
        """The sample as its trainer loads it, memory-mapped; ValueError where keys or shapes are not the format's."""
        import torch

        body = torch.load(path, mmap=True, weights_only=True)
        if not isinstance(body, dict) or not isinstance(body.get("input_ids"), torch.Tensor):
            raise ValueError("not a dict with input_ids")
        wanted = self._body(len(body["input_ids"]), shape)
        if set(body) != set(wanted):
            raise ValueError(f"its keys are {', '.join(sorted(body))} instead of {', '.join(sorted(wanted))}")
        found: dict[str, Any] = {}
        for key, value in wanted.items():
            if isinstance(value, (str, bool)):
                continue
            fields = value if isinstance(value, list) else [value]
            tensors = body[key] if isinstance(value, list) else [body[key]]
            if [tuple(t.shape) for t in tensors] != [f.shape for f in fields]:
                raise ValueError(f"{key} is {[list(t.shape) for t in tensors]}, not {[list(f.shape) for f in fields]}")
            for field, tensor in zip(fields, tensors, strict=True):
                found |= split(field, tensor, shape)
        return as_sample(found, shape)

    def _fields(self, tokens: int, shape: Shape) -> list[Field]:
        """The tensors in the order in which torch numbers their storages."""
        out: list[Field] = []
        for value in self._body(tokens, shape).values():
            if isinstance(value, Field):
                out.append(value)
            elif isinstance(value, list):
                out += value
        return out

    def _skeleton(self, tokens: int, shape: Shape, known: str) -> Skeleton:
        def one(value: Field) -> Tensor:
            return Tensor(value.shape, value.dtype)

        body = self._body(tokens, shape)
        try:
            return torchsave.skeleton(
                {
                    key: one(v)
                    if isinstance(v, Field)
                    else [one(f) for f in v]
                    if isinstance(v, list)
                    else (known if v == IDENTITY else v)
                    for key, v in body.items()
                }
            )
        except (struct.error, OverflowError):  # of a damaged line, say: a number that the zip's fields can't hold
            raise ValueError(f"no file holds {tokens} tokens") from None
