"""The formats of a data set, by name: each module of this package is one, with the members of ``Format``.

The first format of a run is laid out before the capture and filled in place; others are derived from it by
``convert``. A module says how a sample's file is called and laid out, which norm its trainer wants, and what its
reader wants beside the samples; nothing else names a format, so that adding one is adding a module.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from numpy.typing import NDArray

from hsx_host.errors import BadInput
from hsx_host.spool import Plane


@dataclass(frozen=True)
class Shape:
    """What every sample of a data set has in common: plane names in file order, elements a row, dtype."""

    planes: list[str]
    hidden_size: int
    dtype: str


@dataclass(frozen=True)
class Laid:
    """A file laid out and not yet filled: where rows go, its final size in bytes, and crc32 of ids and mask.

    ``crcs`` has ``input_ids`` and ``loss_mask``, both as little-endian int64.
    ``crc_at``: where the file wants each record's crc32 (4 bytes, little-endian), for ``complete``.
    """

    bytes: int
    planes: list[Plane]
    crcs: dict[str, int]
    tokens: int
    crc_at: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Row:
    """One sample of a finished folder, for side files. ``read`` gives ids and mask, integers [tokens] each."""

    row: int
    tokens: int
    read: Callable[[], tuple[NDArray[Any], NDArray[Any]]]


class Listed(Protocol):
    """What a manifest says of a sample, as far as side files hold it too; crc32 by data record."""

    @property
    def tokens(self) -> int: ...

    @property
    def crc32(self) -> dict[str, int]: ...


class Format(Protocol):
    """One trainer's files. ``NORM``: whether its final hidden state is ``before`` or ``after`` the final norm.

    ``SIDE``: patterns of what may lie in the folder beside the samples.
    """

    NAME: str
    FOLDER: str
    NORM: str
    SIDE: tuple[str, ...]

    def file_name(self, row: int) -> str:
        """The file of a row, relative to the format's folder."""

    def file_bytes(self, tokens: int, shape: Shape) -> int:
        """The exact size of a sample's file."""

    def lay_out(self, path: Path, ids: NDArray[Any], mask: NDArray[Any], shape: Shape) -> Laid:
        """Write everything but the hidden states, and leave holes of the exact size for them."""

    def complete(self, path: Path, made: Laid, crcs: dict[str, int], shape: Shape) -> dict[str, int]:
        """After the capture: put checksums where the format keeps them; the crc32 by data record, for the manifest.

        :param made: what ``lay_out`` answered.
        :param crcs: of ``input_ids``, ``loss_mask`` and each plane; of planes that lie side by side in each row, the
            one that they have together stands at each of them.
        """

    def check(
        self, path: Path, tokens: int, shape: Shape, ids_hash: str = ""
    ) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
        """The crc32 that the file's header holds, and (offset, bytes), by data record.

        Reads all but the data, and compares it with what the format writes: ValueError, saying why, where the file is
        not a sample of ``tokens`` tokens. ``ids_hash``: the identity that a file that names its sample must have; ""
        takes any.
        """

    def planes(self, path: Path, tokens: int, shape: Shape) -> list[Plane]:
        """Where the rows of each plane lie in a whole file; reads the header only. ValueError as ``check``."""

    def load(self, path: Path, shape: Shape) -> dict[str, Any]:
        """The sample, memory-mapped: ``input_ids``, ``loss_mask`` [n] and ``planes``, a list of [n, H]."""

    def side_files(self, folder: Path, rows: Iterable[Row], facts: dict[str, Any]) -> None:
        """Write what the reader wants beside the samples. ``rows`` ascend; ``facts`` are dataset.json's."""

    def side_bytes(self, samples: int, tokens: int) -> int:
        """The most that ``side_files`` takes on the disk while it is at work, of so many samples and tokens in all."""

    def side_wrong(self, folder: Path, listed: Mapping[int, Listed], deep: bool) -> list[str]:
        """In what the side files that a reader goes by are not of these samples, by row; each begins with its file.

        Cheap, unless ``deep`` also compares ids and masks that stand in them.
        """


def names() -> list[str]:
    """Every format that there is."""
    return sorted(p.stem for p in Path(__file__).parent.glob("[a-z]*.py"))


def get(name: str, field: str = "--format") -> Format:
    """A format by its name; BadInput, naming ``field``, where there is none."""
    if name not in names():
        raise BadInput("no such format", field=field, value=name, fix="one of " + ", ".join(names()))
    return cast(Format, importlib.import_module(f"hsx_host.formats.{name}"))


def of_run(wanted: Sequence[str]) -> list[Format]:
    """The formats of a run, the one that the capture writes first; BadInput where the setting can't be met."""
    if not wanted or len(set(wanted)) != len(wanted):
        raise BadInput(
            "must name formats, each once",
            field="capture.formats",
            value=list(wanted),
            fix="one or several of " + ", ".join(names()) + "; the first is written by the capture",
        )
    found = [get(name, "capture.formats") for name in wanted]
    for other in found[1:]:
        if found[0].NORM == "after" and other.NORM == "before":
            raise BadInput(
                f"{other.NAME} needs the final hidden state before the norm, {found[0].NAME} holds it after the norm",
                field="capture.formats",
                value=list(wanted),
                fix=f"put {other.NAME} first: the other way is exact",
            )
    return found


def primary(wanted: Sequence[str]) -> Format:
    """The format that the capture writes."""
    return of_run(wanted)[0]
