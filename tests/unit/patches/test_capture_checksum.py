"""CRC-32 of isal and of zlib: the same numbers, whichever a host has."""

from __future__ import annotations

import random
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from hsx_capture import checksum as plugin
from hsx_host import checksum as host

INCLUDE = Path(__file__).resolve().parents[3] / "include"


@pytest.mark.parametrize("size", [0, 1, 7, 64, 4097, 1 << 20, (1 << 20) + 3])
def test_the_numbers_are_zlibs(size: int) -> None:
    data = random.Random(size).randbytes(size)
    for start in (0, 1, 0xFFFFFFFF):
        assert plugin.crc32(data, start) == host.crc32(data, start) == zlib.crc32(data, start)


def test_runs_on_over_pieces_of_an_array() -> None:
    data = np.random.default_rng(0).integers(0, 256, 300_000, dtype=np.uint8)
    crc = 0
    for piece in np.array_split(data, 7):
        crc = plugin.crc32(piece, crc)
    assert crc == zlib.crc32(data)


@pytest.mark.parametrize(("module", "folder"), [("hsx_capture", "patches/hsx_capture"), ("hsx_host", ".")])
@pytest.mark.parametrize("there", [True, False])
def test_zlib_is_taken_where_isal_is_missing(module: str, folder: str, there: bool) -> None:
    if there:
        pytest.importorskip("isal")
    code = f"""
import sys
{"" if there else "sys.modules['isal'] = sys.modules['isal.isal_zlib'] = None"}
from {module} import checksum
print(checksum.SOURCE, checksum.crc32(b"hidden states"))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=INCLUDE / folder, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["isal" if there else "zlib", str(zlib.crc32(b"hidden states"))]
