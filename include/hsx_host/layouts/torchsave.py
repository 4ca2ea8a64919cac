"""The bytes of a ``torch.save`` file before its tensors are known: header, holes, directory.

Written without torch, so that a client that only lays files out starts in no time and stays small; every place is a
formula of the lengths. Sources: PyTorch's ``torch/serialization.py`` (the pickle: protocol 2, one persistent id
``('storage', class, key, 'cpu', elements)`` a tensor, rebuilt by ``torch._utils._rebuild_tensor_v2``) and
``caffe2/serialize/inline_container.cc`` (stored records, data 64-byte aligned by an ``FB`` field in the local header, a
data descriptor behind each); PKWARE APPNOTE 6.3 (4.3.7 local header, 4.3.9 descriptor, 4.3.12 directory, 4.3.14 to
4.3.16 ends, 4.5.3 zip64).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hsx_host.checksum import crc32
from hsx_host.layouts.fields import ITEM_BYTES, pwrite_all

_ALIGN = 64
_ARCHIVE = "archive"
_32 = 0xFFFFFFFF
_FLAGS = 0x0808  # bit 3: checksum and sizes follow the data; bit 11: names are UTF-8
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
STORAGES = {"int64": "LongStorage", "bfloat16": "BFloat16Storage", "float16": "HalfStorage"}


@dataclass(frozen=True)
class Tensor:
    """A contiguous tensor of the file: its shape and dtype (a key of ``STORAGES``)."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n

    @property
    def bytes(self) -> int:
        return self.elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Skeleton:
    """A file without its tensors' data.

    ``parts`` are (offset, bytes); tensor i's data goes to ``offsets[i]``, its crc32 to both places of ``crc_at[i]``.
    """

    size: int
    offsets: list[int]
    crc_at: list[tuple[int, int]]
    parts: list[tuple[int, bytes]]

    def write(self, path: Path, known: Mapping[int, bytes]) -> None:
        """Write a sparse file of the final size, in as few writes as it takes; ``path`` must not exist.

        :param known: data of tensors that are known already, by number; their checksums are written too.
        """
        runs: list[tuple[int, bytearray]] = []
        for offset, data in sorted([*self.parts, *((self.offsets[i], data) for i, data in known.items())]):
            if runs and runs[-1][0] + len(runs[-1][1]) == offset:
                runs[-1][1].extend(data)
            else:
                runs.append((offset, bytearray(data)))
        for i, data in known.items():
            for at in self.crc_at[i]:
                start, run = next((start, run) for start, run in reversed(runs) if start <= at)
                run[at - start : at - start + 4] = struct.pack("<I", crc32(data))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(fd, self.size)
            for offset, run in runs:
                pwrite_all(fd, run, offset)
        finally:
            os.close(fd)

    def place_of(self, text: str) -> int:
        """Where a text stands in the file outside the tensors; 0 where it does not."""
        wanted = text.encode()
        return next((at + data.index(wanted) for at, data in self.parts if wanted in data), 0)

    def crcs(self, fd: int) -> list[int] | None:
        """The tensors' checksums as an open file has them; None where a byte outside the tensors is another one, or the
        two places of a checksum differ."""
        if os.fstat(fd).st_size != self.size:
            return None
        found: list[list[int]] = [[] for _ in self.crc_at]
        places = sorted((at, i) for i, pair in enumerate(self.crc_at) for at in pair)
        for offset, data in self.parts:  # they ascend, as the places do
            there: bytes | bytearray = os.pread(fd, len(data), offset)
            while places and places[0][0] < offset + len(there):
                at, i = places.pop(0)
                found[i].append(int.from_bytes(there[at - offset : at - offset + 4], "little"))
                there = bytearray(there)
                there[at - offset : at - offset + 4] = bytes(4)
            if there != data:
                return None
        return [one for one, _ in found] if all(one == other for one, other in found) else None


Value = Tensor | Sequence[Tensor] | str | bool


def skeleton(body: Mapping[str, Value]) -> Skeleton:
    """The file that ``torch.save`` would make of a dict of tensors, lists of them, texts and flags, in its order."""
    pickled, tensors = _pickle(body)
    records: list[tuple[str, int, bytes | None]] = [("data.pkl", len(pickled), pickled), ("byteorder", 6, b"little")]
    records += [(f"data/{i}", tensor.bytes, None) for i, tensor in enumerate(tensors)]
    records.append(("version", 2, b"3\n"))
    parts: list[tuple[int, bytes]] = []
    offsets, directory, descriptors, listed_bytes, at = [], [], [], 0, 0
    for name, size, data in records:
        full, crc = f"{_ARCHIVE}/{name}".encode(), crc32(data) if data is not None else 0
        pad = -(at + _LOCAL.size + len(full) + 4) % _ALIGN
        local = _LOCAL.pack(b"PK\3\4", 0, _FLAGS, 0, 0, 0, 0, 0, 0, len(full), 4 + pad)
        header = local + full + b"FB" + struct.pack("<H", pad) + b"Z" * pad
        start = at + len(header)
        sizes = "<4sIQQ" if size >= _32 else "<4sIII"
        parts += [(at, header + (data or b"")), (start + size, struct.pack(sizes, b"PK\7\10", crc, size, size))]
        entry = _entry(full, crc, size, at)
        if data is None:
            offsets.append(start)
            descriptors.append((start + size + 4, listed_bytes + 16))  # the second: within the directory
        directory.append(entry)
        listed_bytes += len(entry)
        at = start + size + struct.calcsize(sizes)
    listed = b"".join(directory)
    end64 = _END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, len(records), len(records), len(listed), at)
    locator = _LOCATOR.pack(b"PK\6\7", 0, at + len(listed), 1)
    end = _END.pack(b"PK\5\6", 0, 0, len(records), len(records), min(len(listed), _32), min(at, _32), 0)
    tail = listed + end64 + locator + end
    parts.append((at, tail))
    crc_at = [(descriptor, at + entry_at) for descriptor, entry_at in descriptors]
    return Skeleton(at + len(tail), offsets, crc_at, parts)


def _entry(name: bytes, crc: int, size: int, at: int) -> bytes:
    """One entry of the central directory, with a zip64 field for what 32 bits don't hold."""
    wide = ([size, size] if size >= _32 else []) + ([at] if at >= _32 else [])
    extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    version = 45 if wide else 0
    short, place = min(size, _32), min(at, _32)
    head = (b"PK\1\2", 0, version, _FLAGS, 0, 0, 0, crc, short, short, len(name), len(extra), 0, 0, 0, 0, place)
    return _CENTRAL.pack(*head) + name + extra


def _pickle(body: Mapping[str, Value]) -> tuple[bytes, list[Tensor]]:
    """The pickle, and the tensors in the order of their storages' keys."""
    tensors: list[Tensor] = []

    def one(tensor: Tensor) -> bytes:
        tensors.append(tensor)
        return _tensor(len(tensors) - 1, tensor)

    out = b"\x80\x02}("
    for key, value in body.items():
        out += _text(key)
        if isinstance(value, Tensor):
            out += one(value)
        elif isinstance(value, bool):
            out += b"\x88" if value else b"\x89"
        elif isinstance(value, str):
            out += _text(value)
        else:
            out += b"](" + b"".join(one(t) for t in value) + b"e"
    return out + b"u.", tensors


def _tensor(key: int, tensor: Tensor) -> bytes:
    strides = [1]
    for size in reversed(tensor.shape[1:]):
        strides.insert(0, strides[0] * size)
    storage = b"(" + _text("storage") + b"ctorch\n" + STORAGES[tensor.dtype].encode() + b"\n"
    storage += _text(str(key)) + _text("cpu") + _whole(tensor.elements) + b"tQ"
    rest = b"K\0" + _tuple(tensor.shape) + _tuple(strides) + b"\x89ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + rest + b"tR"


def _tuple(values: Sequence[int]) -> bytes:
    return b"(" + b"".join(_whole(v) for v in values) + b"t"


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _whole(n: int) -> bytes:
    """A whole number >= 0: BININT1, BININT2, BININT, or LONG1 with its digits in base 256."""
    if n < 1 << 8:
        return b"K" + bytes([n])
    if n < 1 << 16:
        return b"M" + struct.pack("<H", n)
    if n < 1 << 31:
        return b"J" + struct.pack("<i", n)
    data = n.to_bytes(n.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data
