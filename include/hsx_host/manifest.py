"""``manifest.jsonl`` and ``failures.jsonl``: what is published, and what is not and why.

The manifest is the only truth of a data set. A line is written and synced after its file has its final
name; a file without a line does not count, and a line whose file is missing or of another size does not either.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from hsx_host.contract import ContractError, decode, encode
from hsx_host.errors import Refused
from hsx_host.state import write_whole


@dataclass(frozen=True)
class Published:
    """One line of the manifest. ``file`` is relative to the data set's folder; ``crc32`` by data record of the file."""

    index: int
    tokens: int
    file: str
    bytes: int
    ids_hash: str
    crc32: dict[str, int]
    next_token: int
    rid: str
    time: float


@dataclass(frozen=True)
class Failed:
    """One line of the failures: a sample that was tried and is not published."""

    index: int
    tokens: int
    ids_hash: str
    reason: str
    tries: int
    time: float


@dataclass(frozen=True)
class Damaged:
    """One line of ``damaged.jsonl``: what ``verify`` found wrong with the file that the try ``rid`` published."""

    index: int
    rid: str
    reason: str


# How the reasons begin why a line does not count, though its file is there.
CUT, DAMAGED = "has a file", "was found damaged"

_PIECE = 4096

Line = TypeVar("Line", Published, Failed, Damaged)


class Ledger(Generic[Line]):
    """An append-only file of typed lines; anyone reads.

    A line that a killed writer left half written is cut off before the next one, which would else become part of it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, *lines: Line) -> None:
        """Write lines and make them last, all or none: what could not be written whole (ENOSPC) is cut off again."""
        data = _text(lines)
        fcntl.flock(self._fd, fcntl.LOCK_EX)  # of this file alone: two that verify may note damage at once
        try:
            size = _cut_half(self._fd)
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
                os.fsync(self._fd)
            except OSError:
                os.ftruncate(self._fd, size)
                raise
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._fd)


def _cut_half(fd: int) -> int:
    """Cut off what stands behind the last whole line; the size of what is left."""
    size = end = os.fstat(fd).st_size
    while end:
        at = max(0, end - _PIECE)
        newline = os.pread(fd, end - at, at).rfind(b"\n")
        if newline >= 0:
            end = at + newline + 1
            break
        end = at
    if end < size:
        os.ftruncate(fd, end)
    return end


def read_lines(path: Path, cls: type[Line], *, repair: bool = False) -> tuple[list[Line], bool]:
    """Every whole line, and whether any was left out: the last one, only half written (a crash), and with ``repair``
    any that is cut.

    :raises Refused: where another line can't be read: it is cut, or no line of this version of hsx.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], False
    *whole, half = data.split(b"\n")
    lines = []
    for number, line in enumerate(whole):
        try:
            lines.append(decode(cls, line))
        except ContractError as e:
            if repair and not _is_json(line):
                half = line
                continue
            raise Refused(
                f"line {number + 1} can't be read: {e}",
                field=path.name,
                value=path,
                fix="extract the shard again: cut lines are dropped; a line of another version of hsx is not",
            ) from None
    return lines, bool(half)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def newest(lines: Iterable[Line]) -> dict[int, Line]:
    """The line that counts for each row: the last one."""
    return {line.index: line for line in lines}


def rewrite(path: Path, lines: Iterable[Published | Failed]) -> None:
    """Put other lines in the file's place, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, _text(lines))


def _text(lines: Iterable[Published | Failed | Damaged]) -> bytes:
    return "".join(encode(line) + "\n" for line in lines).encode()


def standing(dataset: Path, line: Published, ids_hash: bytes | None) -> str:
    """Empty where a line counts: same sample as in the plan, and a file of the right size. Else why it does not."""
    if ids_hash is None:
        return "is not in the plan"
    if line.ids_hash != ids_hash.hex():
        return "was another sample"
    try:
        size = os.stat(dataset / line.file).st_size
    except OSError as e:
        return f"has no file {line.file} ({e.strerror})"
    return "" if size == line.bytes else f"{CUT} of {size} bytes instead of {line.bytes}"


def judged(
    dataset: Path, path: Path, hashes: Mapping[int, bytes]
) -> tuple[dict[int, Published], dict[int, str], dict[int, Published]]:
    """The lines of a manifest that count, why each other row's does not, and every row's line.

    A line counts where it is ``standing``, and ``verify`` has not found its file damaged (``damaged.jsonl``).

    :param hashes: identity by row, of the plan.
    """
    lines = published_lines(path)
    good, why = _judge(dataset, lines, hashes, _damaged(path))
    return good, why, lines


def resume(dataset: Path, path: Path, hashes: dict[int, bytes], say: Callable[[str], None]) -> dict[int, Published]:
    """What counts as published of a shard (``judged``); every other line leaves the manifest (rewritten atomically
    where needed), and what was known of damage is forgotten with it.

    :param hashes: identity by row, of the plan.
    :param say: told of each line that was dropped, and why.
    """
    lines, half = read_lines(path, Published, repair=True)
    good, why = _judge(dataset, newest(lines), hashes, _damaged(path))
    for row, reason in why.items():
        say(f"row {row} {reason}: it leaves the manifest")
    if half:
        say("a line of the manifest was half written: it is dropped")
    if half or len(good) != len(lines):
        rewrite(path, good.values())
    damaged_path(path).unlink(missing_ok=True)
    return good


def _judge(
    dataset: Path, lines: Mapping[int, Published], hashes: Mapping[int, bytes], damaged: Mapping[tuple[int, str], str]
) -> tuple[dict[int, Published], dict[int, str]]:
    good, why = {}, {}
    for row, line in lines.items():
        reason = standing(dataset, line, hashes.get(row))
        if not reason and (row, line.rid) in damaged:
            reason = f"{DAMAGED}: {damaged[row, line.rid]}"
        if reason:
            why[row] = reason
        else:
            good[row] = line
    return good, why


def _damaged(manifest: Path) -> dict[tuple[int, str], str]:
    """What ``verify`` found wrong, by row and rid of the try that published it."""
    lines: tuple[list[Damaged], bool] = read_lines(damaged_path(manifest), Damaged, repair=True)
    return {(d.index, d.rid): d.reason for d in lines[0]}


def damaged_path(manifest: Path) -> Path:
    """``damaged.jsonl`` beside a shard's manifest."""
    return manifest.with_name("damaged.jsonl")


def note_damaged(manifest: Path, found: Iterable[tuple[Published, str]]) -> None:
    """Remember published samples whose files are wrong, for the next ``resume`` of their shard."""
    ledger: Ledger[Damaged] = Ledger(damaged_path(manifest))
    for line, reason in found:
        ledger.append(Damaged(line.index, line.rid, reason))
    ledger.close()


def remove_second_manifests(manifest: Path) -> list[str]:
    """Remove what stands beside a manifest and could be taken for it: copies, a killed writer's temporary files."""
    known = {manifest, damaged_path(manifest)}
    found = [p for p in manifest.parent.iterdir() if p.is_file() and p not in known and is_second_manifest(p)]
    for path in found:
        path.unlink()
    return sorted(path.name for path in found)


def is_second_manifest(path: Path) -> bool:
    """Whether a file of a shard's folder could be taken for its manifest, or is a document's half-written next one."""
    return path.name != "manifest.jsonl" and ("manifest" in path.name or path.suffix == ".tmp")


def remove_leftovers(folder: Path, dataset: Path, rows: dict[int, str], published: dict[int, Published]) -> list[str]:
    """Remove files of a shard's rows that are not in the manifest.

    :param folder: the format's folder. ``rows``: file name by row, of every row number of the shard.
    :returns: the names of what was removed.
    """
    kept = {dataset / line.file for line in published.values()}
    removed = []
    for name in rows.values():
        file = folder / name
        if file not in kept and file.exists():
            file.unlink()
            removed.append(name)
    return removed


def published_lines(path: Path, *, repair: bool = False) -> dict[int, Published]:
    """The line that counts for each row of a manifest; whether its sample still stands is not looked at.

    :param repair: lines that are cut are left out (``read_lines``).
    """
    return newest(read_lines(path, Published, repair=repair)[0])


def failures(path: Path) -> dict[int, Failed]:
    """The failure that counts for each row. A cut line names none: its row is missing, and is tried again."""
    lines: tuple[list[Any], bool] = read_lines(path, Failed, repair=True)
    return newest(lines[0])


def settle_failures(path: Path, hashes: Mapping[int, bytes], published: Mapping[int, Published]) -> dict[int, Failed]:
    """The failures that still count: of samples of the plan that are not published. Other lines leave the file."""
    known = failures(path)
    left = {row: f for row, f in known.items() if row not in published and f.ids_hash == hashes.get(row, b"").hex()}
    if path.exists() and path.read_bytes() != (whole := _text(left.values())):
        write_whole(path, whole)
    return left
