"""One requested sample: what the scheduler has sent on, and what a writer has made of it.

The scheduler's thread owns ``next_row`` and ``closed``; the sample's one writer owns ``progress`` and ``answered``,
which the scheduler only reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hsx_capture.checksum import crc32
from hsx_capture.layout import Block, blocks
from hsx_capture.spec import CaptureRecord, CaptureRequest, PlaneRecord


@dataclass
class Progress:
    """What a writer has written so far, in row order; a restart begins a new one. ``crc32`` is by block."""

    blocks: Sequence[Block]
    rows: int = 0
    bytes: int = 0
    chunks: int = 0
    ids_crc32: int = 0
    crc32: list[int] = field(default_factory=list)
    low: Any = None
    high: Any = None

    def __post_init__(self) -> None:
        self.crc32 = [0] * len(self.blocks)

    def see_ids(self, ids: np.ndarray[Any, Any]) -> None:
        """Go on with the CRC-32 of the ids as little-endian int64."""
        self.ids_crc32 = crc32(ids.astype("<i8", copy=False), self.ids_crc32)

    def see_stats(self, stats: np.ndarray[Any, Any]) -> None:
        """Fold in the least and greatest value of each row, [2, rows, planes]; NaN stays."""
        low, high = stats[0].min(axis=0), stats[1].max(axis=0)
        self.low = low if self.low is None else np.minimum(self.low, low)
        self.high = high if self.high is None else np.maximum(self.high, high)

    def plane_records(self, names: list[str]) -> list[PlaneRecord]:
        """One record a plane. ``zero``: every value is 0; ``constant``: all values of the plane are the same."""
        if self.low is None:
            return []
        finite = np.isfinite(self.low) & np.isfinite(self.high)
        constant = self.low == self.high
        zero = constant & (self.low == 0)
        crcs = [crc for crc, block in zip(self.crc32, self.blocks, strict=True) for _ in range(block.planes)]
        return [
            PlaneRecord(name, crcs[i], bool(finite[i]), bool(zero[i]), bool(constant[i]))
            for i, name in enumerate(names)
        ]


class Sample:
    """A request that is being captured."""

    def __init__(self, rid: str, request: CaptureRequest | None, row_bytes: int) -> None:
        self.rid = rid
        self.request = request
        self.blocks: tuple[Block, ...] = blocks(request.planes, row_bytes) if request else ()
        self.shape = tuple(b.planes for b in self.blocks)
        self.next_row = 0
        self.closed = False
        self.answered = False
        self.writer: int | None = None  # the number of its writer, once it has one
        self.progress: Progress | None = None

    def accept(self, start: int, rows: int) -> str:
        """Take the chunk of ``rows`` rows at ``start`` into the account; answers why it does not fit, or ""."""
        if self.request is None:
            return "no request"
        if start == 0:
            self.next_row = 0  # the first chunk, or the first one again: SGLang retracted the request
        if start != self.next_row:
            why = "; its prefix came from a cache" if self.next_row == 0 else ""
            return f"a chunk starts at row {start}, expected row {self.next_row}{why}"
        if start + rows > self.request.tokens:
            return f"{start + rows} rows came, CaptureRequest.tokens says {self.request.tokens}"
        self.next_row = start + rows
        if self.next_row == self.request.tokens:
            self.closed = True
        return ""

    def record(self, error: str = "") -> CaptureRecord:
        """The answer, as far as this sample has come."""
        p = self.progress or Progress(())
        names = [plane.name for plane in self.request.planes] if self.request else []
        return CaptureRecord(self.rid, p.rows, p.bytes, p.chunks, p.ids_crc32, p.plane_records(names), error)
