"""The zip inside a ``torch.save`` file: where each tensor's bytes lie, and the checksums of them.

Source of the structures: PKWARE APPNOTE 6.3 (4.3.9 data descriptor, 4.3.12 central directory); PyTorch writes
records uncompressed, with a data descriptor behind each (caffe2/serialize/inline_container.cc).
"""

from __future__ import annotations

import os
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path

_CENTRAL = struct.Struct("<4s6H3I5H2I")  # one entry of the central directory, without name, extra and comment
_LOCAL_BYTES = 30


@dataclass(frozen=True)
class Record:
    """One record: its data, the crc32 that the directory holds, and where the directory's entry lies."""

    offset: int
    bytes: int
    crc32: int
    entry: int


def records(path: Path) -> dict[str, Record]:
    """Every record of the archive by its name below the archive's own (``data/0``). Reads headers only.

    :raises ValueError: where the file is no zip, is cut, or has a record that is not stored as PyTorch does.
    """
    try:
        with path.open("rb") as f, zipfile.ZipFile(f) as archive:
            found = {}
            entry = archive.start_dir
            for info in archive.infolist():
                f.seek(entry)
                head = _CENTRAL.unpack(f.read(_CENTRAL.size))
                f.seek(info.header_offset)
                local = f.read(_LOCAL_BYTES)
                if head[0] != b"PK\1\2" or local[:4] != b"PK\3\4" or info.compress_type != zipfile.ZIP_STORED:
                    raise ValueError(f"record {info.filename} is not stored as torch.save does")
                names = sum(struct.unpack("<2H", local[26:30]))
                name = info.filename.split("/", 1)[-1]
                start = info.header_offset + _LOCAL_BYTES + names
                found[name] = Record(start, info.file_size, info.CRC, entry)
                entry += _CENTRAL.size + head[10] + head[11] + head[12]
            return found
    except (zipfile.BadZipFile, struct.error, OSError) as e:
        raise ValueError(f"not a whole torch.save file: {e}") from None


def set_crcs(path: Path, known: dict[str, Record], crcs: dict[str, int]) -> None:
    """Write the crc32 of records (by name) into their data descriptors and the central directory.

    ``known`` is what ``records`` found. The local header's field stays 0: PyTorch's records say by flag bit 3 that the
    checksum follows the data.
    """
    fd = os.open(path, os.O_WRONLY)
    try:
        for name, crc in crcs.items():
            record, field = known[name], struct.pack("<I", crc)
            os.pwrite(fd, field, record.offset + record.bytes + 4)  # behind the descriptor's signature
            os.pwrite(fd, field, record.entry + 16)
    finally:
        os.close(fd)
