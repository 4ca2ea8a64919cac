"""CRC-32 as zip files have it: isal's where this Python has the package, else zlib's, which costs as much as the write.

Both give the same numbers and release the interpreter's lock.
"""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32

    SOURCE = "isal"
except ImportError:
    from zlib import crc32

    SOURCE = "zlib"

__all__ = ["SOURCE", "crc32"]
