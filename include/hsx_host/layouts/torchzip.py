"""The zip inside a ``torch.save`` file: where each tensor's bytes lie, and the checksums of them.

Source of the structures: PKWARE APPNOTE 6.3 (4.3.7 local header); PyTorch writes
records uncompressed, with a data descriptor behind each (caffe2/serialize/inline_container.cc).
"""

from __future__ import annotations

import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path

from hsx_host.layouts import faults

_LOCAL_BYTES = 30


@dataclass(frozen=True)
class Record:
    """One record: its data, and the crc32 that the directory holds."""

    offset: int
    bytes: int
    crc32: int


def records(path: Path) -> dict[str, Record]:
    """Every record of the archive by its name below the archive's own (``data/0``). Reads headers only.

    :raises ValueError: where the file is no zip, is cut, or has a record that is not stored as PyTorch does.
    :raises TryAgain: where the host can't read it now.
    """
    try:
        with path.open("rb") as f, zipfile.ZipFile(f) as archive:
            found = {}
            for info in archive.infolist():
                f.seek(info.header_offset)
                local = f.read(_LOCAL_BYTES)
                if local[:4] != b"PK\3\4" or info.compress_type != zipfile.ZIP_STORED:
                    raise ValueError(f"record {info.filename} is not stored as torch.save does")
                names = sum(struct.unpack("<2H", local[26:30]))
                name = info.filename.split("/", 1)[-1]
                start = info.header_offset + _LOCAL_BYTES + names
                found[name] = Record(start, info.file_size, info.CRC)
            return found
    except (zipfile.BadZipFile, NotImplementedError, OverflowError, struct.error, OSError) as e:
        raise ValueError(f"not a whole torch.save file: {faults.reason(path, e)}") from None
