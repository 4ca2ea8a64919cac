"""How a sample's planes lie in its file, and so how a batch's rows are best gathered.

Planes that lie side by side in each row make one block: a block's chunk of rows is then one stretch of the file.
Contiguous planes (speculators v1) are blocks of one plane each; ``[seq, L+1, H]`` is one block of all planes;
``[seq, 3H]`` beside ``[seq, H]`` is a block of three and a block of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hsx_capture.spec import CaptureRequest, CaptureSpec, Plane, SpecError


@dataclass(frozen=True)
class Block:
    """``planes`` planes from plane ``first`` on; row r of the block lies at ``offset + r * row_stride``."""

    first: int
    planes: int
    offset: int
    row_stride: int


def blocks(planes: Sequence[Plane], row_bytes: int) -> tuple[Block, ...]:
    """Cut planes into blocks. ``row_bytes``: one row of one plane (hidden size times element size)."""
    found: list[Block] = []
    for i, plane in enumerate(planes):
        last = found[-1] if found else None
        if (
            last is not None
            and plane.row_stride == last.row_stride
            and plane.offset == last.offset + last.planes * row_bytes
            and plane.row_stride >= (last.planes + 1) * row_bytes
        ):
            found[-1] = Block(last.first, last.planes + 1, last.offset, last.row_stride)
        else:
            found.append(Block(i, 1, plane.offset, plane.row_stride))
    return tuple(found)


def file_bytes(parts: Sequence[Block], rows: int, row_bytes: int) -> int:
    """The least size of a file that holds ``rows`` rows of every block."""
    return max(b.offset + (rows - 1) * b.row_stride + b.planes * row_bytes for b in parts)


def check(request: CaptureRequest, rid: str, spec: CaptureSpec, row_bytes: int) -> None:
    """Refuse a request that does not fit the spec; raises SpecError that names the field."""
    if request.rid != rid:
        raise SpecError(f"CaptureRequest.rid: {request.rid!r} stands in the document of {rid!r}")
    if request.tokens < 1:
        raise SpecError(f"CaptureRequest.tokens: {request.tokens}, expected 1 or more")
    if len(request.planes) != len(spec.layers) + 1:
        raise SpecError(
            f"CaptureRequest.planes: {len(request.planes)}, expected {len(spec.layers) + 1} "
            f"(layers {spec.layers}, then final)"
        )
    for plane in request.planes:
        if plane.offset < 0:
            raise SpecError(f"CaptureRequest.planes: offset {plane.offset} of plane {plane.name} is below 0")
        if plane.row_stride < row_bytes:
            raise SpecError(
                f"CaptureRequest.planes: row_stride {plane.row_stride} of plane {plane.name} "
                f"is below the {row_bytes} bytes of a row"
            )
