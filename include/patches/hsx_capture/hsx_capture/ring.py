"""A bounded ring of host buffers between the scheduler and the writers.

A slot holds some rows of one batch: the data in the order of the file's blocks, the token ids, and the least and
the greatest value of each row of each plane, in the order of the data. On a GPU the rows are gathered and reduced on
the device, on the current stream, into one of two staging buffers and copied to the slot's pinned memory on a side
stream; the staging buffers are allocated once, before SGLang sizes its KV cache. On a CPU the same gather writes into
the slot itself.

The scheduler takes a slot and waits where none is free: nothing is dropped and memory stays flat.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

SLOTS = 8
_ALIGN = 64
# Clock cycles that a batch's copy lets pass on the device, 4 ms at 2 GHz. The forward pass goes on to the next tokens,
# which the server copies to the host by the same copy engine, and what comes next on its stream waits for that: behind
# the batch's copy it would wait 1 ms for each 55 MB. So the small copy goes first, the large one beside the next pass.
_HEAD_START = 8_000_000


@dataclass(frozen=True)
class Geometry:
    """Byte places inside a slot that holds ``rows`` rows of ``planes`` planes."""

    rows: int
    ids: int
    stats: int
    end: int

    @staticmethod
    def of(rows: int, planes: int, row_bytes: int) -> Geometry:
        ids = _up(rows * planes * row_bytes)
        stats = _up(ids + rows * 8)
        return Geometry(rows, ids, stats, stats + rows * planes * 8)


def _up(n: int) -> int:
    return -(-n // _ALIGN) * _ALIGN


def rows_per_slot(slot_bytes: int, planes: int, row_bytes: int) -> int:
    """How many rows fit into a slot (0 where not even one does)."""
    return max(0, (slot_bytes - 2 * _ALIGN) // (planes * row_bytes + 8 + planes * 8))


class Slot:
    """One buffer of the ring. ``array`` is its memory as uint8; valid after ``wait``, until the last ``release``."""

    def __init__(self, ring: Ring, host: torch.Tensor) -> None:
        self._ring = ring
        self.host = host
        self.array: np.ndarray[Any, Any] = host.numpy()
        self.geometry = Geometry(0, 0, 0, 0)
        self.shape: tuple[int, ...] = ()
        self._copied: Any = None
        self._users = 0
        self._lock = threading.Lock()

    def hand_to(self, users: int, copied: Any) -> None:
        """Say how many ``release`` calls free the slot, and the event after which its memory is whole."""
        self._users, self._copied = users, copied

    def wait(self) -> None:
        """Wait until the copy into this slot is done (at once on a CPU)."""
        if self._copied is not None:
            self._copied.synchronize()

    def release(self) -> None:
        """One user is done; the last one gives the slot back to the ring."""
        with self._lock:
            self._users -= 1
            free = self._users == 0
        if free:
            self._ring.give_back(self)

    def ids(self) -> np.ndarray[Any, Any]:
        """Token ids, int64 [rows]."""
        g = self.geometry
        return self.array[g.ids : g.ids + g.rows * 8].view(np.int64)

    def stats(self, rows: slice) -> np.ndarray[Any, Any]:
        """float32 [2, rows, planes]: the least and the greatest value of each of ``rows``; NaN where it holds one."""
        g = self.geometry
        values = self.array[g.stats : g.end].view(np.float32).reshape(2, -1)
        blocks, first = [], 0
        for width in self.shape:
            block = values[:, first * g.rows : (first + width) * g.rows].reshape(2, g.rows, width)
            blocks.append(block[:, rows])
            first += width
        return np.concatenate(blocks, axis=2)

    def block(self, index: int, row_bytes: int) -> np.ndarray[Any, Any]:
        """Block ``index``, uint8 [rows, planes of the block, row_bytes]."""
        first, planes = sum(self.shape[:index]), self.shape[index]
        start = first * self.geometry.rows * row_bytes
        part = self.array[start : start + self.geometry.rows * planes * row_bytes]
        return part.reshape(self.geometry.rows, planes, row_bytes)


class Ring:
    """``SLOTS`` slots of equal size, ``ring_bytes`` in all: torch pins the next power of two.

    :raises ValueError: where a slot would not hold a single row.
    """

    def __init__(self, ring_bytes: int, planes: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self.planes, self.hidden, self.dtype, self.device = planes, hidden, dtype, device
        self.row_bytes = hidden * dtype.itemsize
        slot_bytes = ring_bytes // SLOTS // _ALIGN * _ALIGN
        self.slot_rows = rows_per_slot(slot_bytes, planes, self.row_bytes)
        if self.slot_rows < 1:
            least = SLOTS * (planes * (self.row_bytes + 8) + 8 + 4 * _ALIGN)
            raise ValueError(f"CaptureSpec.ring_bytes: {ring_bytes} is too small, {least} bytes hold one row a slot")
        on_gpu = device.type == "cuda"
        memory = torch.empty(SLOTS * slot_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for i in range(SLOTS):
            self._free.put(Slot(self, memory[i * slot_bytes : (i + 1) * slot_bytes]))
        self._stages = [_Stage(slot_bytes, device) for _ in range(2)] if on_gpu else []
        self._side = torch.cuda.Stream(device) if on_gpu else None

    def give_back(self, slot: Slot) -> None:
        self._free.put(slot)

    def fill(
        self,
        sources: Sequence[torch.Tensor],
        ids: torch.Tensor,
        first: int,
        rows: int,
        shape: tuple[int, ...],
        *,
        opens: bool = False,
    ) -> tuple[Slot, Any]:
        """Gather rows [first, first + rows) of a batch into a free slot; waits for one where all are in use.

        :param sources: one [T, H] tensor a plane, on the ring's device.
        :param ids: token ids [T].
        :param shape: planes of each block, in order (``layout.blocks``).
        :param opens: whether it is the first one of its batch.
        :return: the slot, and the event after which its memory is whole (None on a CPU); the caller hands both on.
        """
        slot = self._free.get()
        try:
            slot.geometry = Geometry.of(rows, self.planes, self.row_bytes)
            slot.shape = shape
            if self._side is None:
                self._gather(slot.host, slot.geometry, sources, ids, first, shape)
                return slot, None
            return slot, self._gather_and_copy(slot, sources, ids, first, opens)
        except BaseException:
            self._free.put(slot)
            raise

    def _gather(
        self,
        out: torch.Tensor,
        g: Geometry,
        sources: Sequence[torch.Tensor],
        ids: torch.Tensor,
        first: int,
        shape: tuple[int, ...],
    ) -> None:
        data = out[: g.rows * self.planes * self.row_bytes].view(self.dtype).view(g.rows * self.planes, self.hidden)
        plane = 0
        for width in shape:
            block = data[plane * g.rows : (plane + width) * g.rows].view(g.rows, width, self.hidden)
            for j in range(width):
                block[:, j].copy_(sources[plane + j][first : first + g.rows])
            plane += width
        # As few operations as there can be: between two, a writer may take the interpreter's lock. Both reductions keep
        # NaN; apart they are three times as fast as torch.aminmax on a CPU.
        least, greatest = out[g.stats : g.end].view(torch.float32).view(2, -1)
        least.copy_(torch.amin(data, dim=-1))
        greatest.copy_(torch.amax(data, dim=-1))
        out[g.ids : g.ids + g.rows * 8].view(torch.int64).copy_(ids[first : first + g.rows])

    def _gather_and_copy(
        self, slot: Slot, sources: Sequence[torch.Tensor], ids: torch.Tensor, first: int, opens: bool
    ) -> Any:
        stage = self._stages[0]
        self._stages.reverse()
        now = torch.cuda.current_stream(self.device)
        if stage.copied is not None:
            now.wait_event(stage.copied)  # the device waits, not this thread
        self._gather(stage.buffer, slot.geometry, sources, ids, first, slot.shape)
        gathered = torch.cuda.Event()
        gathered.record(now)
        assert self._side is not None
        self._side.wait_event(gathered)
        with torch.cuda.stream(self._side):
            if opens:
                torch.cuda._sleep(_HEAD_START)
            end = slot.geometry.end
            slot.host[:end].copy_(stage.buffer[:end], non_blocking=True)
            # blocking: a writer that waits sleeps instead of spinning on a core
            copied = torch.cuda.Event(blocking=True)
            copied.record(self._side)
        stage.copied = copied
        return copied


class _Stage:
    """A device buffer, and the event after which it may be written again."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self.copied: Any = None
