"""The formats of a data set, by name. A format is one small module with the members of ``Format``.

A *direct* format is laid out before the capture and filled in place; any other is derived from a finished
data set by ``convert``.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from numpy.typing import NDArray

from hsx_host.errors import BadInput
from hsx_host.spool import Plane

_MODULES = {"speculators_v1": "speculators_v1", "specforge": "specforge"}
_DIRECT = ("speculators_v1",)


@dataclass(frozen=True)
class Shape:
    """What every sample of a data set has in common: plane names in file order, elements a row, dtype."""

    planes: list[str]
    hidden_size: int
    dtype: str


@dataclass(frozen=True)
class Laid:
    """A file laid out and not yet filled: where rows go, its final size in bytes, and crc32 by data record so far."""

    bytes: int
    planes: list[Plane]
    crcs: dict[str, int]


class Format(Protocol):
    """A derived format. ``NORM`` says whether its final hidden state is ``before`` or ``after`` the final norm."""

    NAME: str
    FOLDER: str
    NORM: str

    def file_name(self, row: int) -> str:
        """The file of a row, relative to the format's folder."""

    def write(self, path: Path, sample: dict[str, Any], shape: Shape) -> None:
        """Write one sample (``input_ids``, ``loss_mask`` long [n]; ``planes`` a list of [n, H]) to a new file."""

    def side_files(self, folder: Path, lengths: dict[int, int], facts: dict[str, Any]) -> None:
        """Write what the reader wants beside the samples. ``lengths``: tokens by row."""


class DirectFormat(Protocol):
    """A format that the capture fills in place."""

    NAME: str
    FOLDER: str
    NORM: str

    def file_name(self, row: int) -> str:
        """The file of a row, relative to the format's folder."""

    def file_bytes(self, tokens: int, shape: Shape) -> int:
        """The exact size of a sample's file."""

    def lay_out(self, path: Path, ids: NDArray[Any], mask: NDArray[Any], shape: Shape) -> Laid:
        """Write everything but the hidden states, and leave holes of the exact size for them."""

    def complete(self, path: Path, crcs: dict[str, int], shape: Shape) -> None:
        """After the capture: put checksums (by plane, ``input_ids``, ``loss_mask``) where the format keeps them."""

    def check(self, path: Path, tokens: int, shape: Shape) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
        """The crc32 that the file's header holds, and (offset, bytes), by plane, ``input_ids`` and ``loss_mask``.

        Reads the header only. ValueError, saying why, where the file is not a sample of ``tokens`` tokens.
        """

    def load(self, path: Path, shape: Shape) -> dict[str, Any]:
        """The sample, memory-mapped: ``input_ids``, ``loss_mask`` and ``planes``."""

    def side_files(self, folder: Path, lengths: dict[int, int], facts: dict[str, Any]) -> None:
        """Write what the reader wants beside the samples. ``lengths``: tokens by row."""


def direct(names: Sequence[str]) -> DirectFormat:
    """The one format that the capture writes; BadInput where the setting names another or several."""
    if len(names) != 1 or names[0] not in _DIRECT:
        raise BadInput(
            "the capture writes exactly one of " + ", ".join(_DIRECT),
            field="capture.formats",
            value=list(names),
            fix="name that one; other formats are made by convert",
        )
    return cast(DirectFormat, _load(names[0]))


def derived(name: str) -> Format:
    """A format that ``convert`` makes; BadInput for any other name."""
    known = [n for n in _MODULES if n not in _DIRECT]
    if name not in known:
        raise BadInput("no such format", field="--format", value=name, fix="one of " + ", ".join(known))
    return cast(Format, _load(name))


def _load(name: str) -> Any:
    return importlib.import_module(f"hsx_host.formats.{_MODULES[name]}")
