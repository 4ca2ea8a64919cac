"""Writer threads: from a slot of the ring into the sample's file, and its record at the end.

A sample always goes to the same writer, so that its chunks stay in order and its CRCs can run on. The threads spend
their time in ``os.pwrite`` and CRC-32, which release the interpreter's lock. Nothing raised here leaves the
thread: it becomes the ``error`` of the sample's record.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hsx_capture import spec
from hsx_capture.checksum import crc32
from hsx_capture.layout import Block, file_bytes
from hsx_capture.ring import Slot
from hsx_capture.sample import Progress, Sample

log = logging.getLogger("hsx_capture")

# Checksummed and written piece by piece: small enough that the second pass over a piece may find it in the cache, large
# enough that the scheduler, which shares the interpreter's lock, is seldom asked for it.
_PIECE = 8 << 20


@dataclass(frozen=True)
class Chunk:
    """Rows ``[slot_row, slot_row + rows)`` of a slot are the sample's rows from ``first_row`` on."""

    sample: Sample
    slot: Slot
    slot_row: int
    first_row: int
    rows: int


@dataclass(frozen=True)
class Failure:
    """The sample can't be completed, for a reason that the scheduler's side found."""

    sample: Sample
    reason: str


class Writers:
    """``count`` threads; ``row_bytes`` is one row of one plane."""

    def __init__(self, count: int, spool: Path, row_bytes: int) -> None:
        self._spool, self._row_bytes = spool, row_bytes
        self._queues: list[queue.SimpleQueue[Chunk | Failure | None]] = [queue.SimpleQueue() for _ in range(count)]
        self._given, self._done = [0] * count, [0] * count  # rows, by writer; one thread changes each number
        self._threads = [
            threading.Thread(target=self._run, args=(i, q), name=f"hsx-writer-{i}", daemon=True)
            for i, q in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: Chunk | Failure) -> None:
        """Hand a job to its sample's writer; never waits (the ring bounds what is under way).

        A new sample goes to the writer with the least to do. Called on the scheduler's thread alone.
        """
        sample = job.sample
        if sample.writer is None:
            sample.writer = min(range(len(self._queues)), key=lambda i: self._given[i] - self._done[i])
        if isinstance(job, Chunk):
            self._given[sample.writer] += job.rows
        self._queues[sample.writer].put(job)

    def close(self) -> None:
        """Let the threads finish what is queued, and end them."""
        for q in self._queues:
            q.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, number: int, jobs: queue.SimpleQueue[Chunk | Failure | None]) -> None:
        while (job := jobs.get()) is not None:
            try:
                self._do(job)
            except Exception as e:
                self._fail(job.sample, f"{type(e).__name__}: {e}")
            finally:
                if isinstance(job, Chunk):
                    job.slot.release()
                    self._done[number] += job.rows

    def _do(self, job: Chunk | Failure) -> None:
        if isinstance(job, Failure):
            self._fail(job.sample, job.reason)
        elif not job.sample.answered:
            self._write(job)

    def _fail(self, sample: Sample, reason: str) -> None:
        if not sample.answered:
            log.warning("%s: %s", sample.rid, reason)
            self._answer(sample, reason)

    def _answer(self, sample: Sample, error: str = "") -> None:
        sample.answered = True
        if not (self._spool / f"{sample.rid}.json").exists():
            return  # withdrawn: nobody would take the record away
        try:
            spec.write(sample.record(error), self._spool / f"{sample.rid}.done.json")
        except OSError as e:  # the client's deadline is all that is left
            log.error("%s: its record can't be written: %s", sample.rid, e)

    def _write(self, chunk: Chunk) -> None:
        sample, request = chunk.sample, chunk.sample.request
        assert request is not None
        chunk.slot.wait()
        if chunk.first_row == 0:
            sample.progress = Progress(sample.blocks)
        progress = sample.progress
        if progress is None or progress.rows != chunk.first_row:
            raise RuntimeError(f"rows from {chunk.first_row} came out of order")
        rows = slice(chunk.slot_row, chunk.slot_row + chunk.rows)
        fd = os.open(request.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            size, needed = os.fstat(fd).st_size, file_bytes(sample.blocks, request.tokens, self._row_bytes)
            if size < needed:
                raise ValueError(f"CaptureRequest.path: {request.path} has {size} bytes, the row map needs {needed}")
            for i, block in enumerate(sample.blocks):
                data = chunk.slot.block(i, self._row_bytes)[rows]
                progress.crc32[i] = self._write_block(fd, block, data, chunk.first_row, progress.crc32[i])
                progress.bytes += data.nbytes
        finally:
            os.close(fd)
        progress.see_ids(chunk.slot.ids()[rows])
        progress.see_stats(chunk.slot.stats(rows))
        progress.rows += chunk.rows
        progress.chunks += 1
        if progress.rows == request.tokens:
            if progress.ids_crc32 == request.ids_crc32:
                self._answer(sample)
            else:
                self._fail(
                    sample,
                    f"the server's token ids have CRC {progress.ids_crc32}, "
                    f"CaptureRequest.ids_crc32 says {request.ids_crc32}",
                )

    def _write_block(self, fd: int, block: Block, data: np.ndarray[Any, Any], first_row: int, crc: int) -> int:
        """Write ``data``, uint8 [rows, planes, row_bytes], to rows from ``first_row`` of the block; the CRC so far."""
        width = block.planes * self._row_bytes
        step = max(1, _PIECE // width)
        for r in range(0, len(data), step):
            piece = data[r : r + step].reshape(-1)
            at = block.offset + (first_row + r) * block.row_stride
            if block.row_stride == width:
                _pwrite(fd, memoryview(piece), at)
            else:
                for j in range(0, len(piece), width):
                    _pwrite(fd, memoryview(piece[j : j + width]), at + j // width * block.row_stride)
            crc = crc32(piece, crc)
        return crc


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done
