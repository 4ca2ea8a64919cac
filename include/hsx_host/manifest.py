"""``manifest.jsonl`` and ``failures.jsonl``: what is published, and what is not and why.

The manifest is the only truth of a data set. A line is written and synced after its file has its final
name; a file without a line does not count, and a line whose file is missing or of another size does not either.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import stat
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from hsx_host.contract import ContractError, decode, encode
from hsx_host.errors import Refused
from hsx_host.layouts import faults
from hsx_host.state import write_whole
from hsx_host.wire import VERSION


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
    any that is damaged.

    :raises Refused: where another line can't be read. One of another version of hsx is never left out.
    """
    data = faults.content(path)
    if data is None:
        return [], False
    *whole, half = data.split(b"\n")
    lines, left_out = [], bool(half)
    for number, line in enumerate(whole, start=1):
        try:
            lines.append(_writable(decode(cls, line)))
        except (ContractError, OverflowError, RecursionError) as e:
            other = _is_of_another_version(line)
            if other or not repair:
                fix = "extract the shard again: it drops damaged lines and makes their samples anew"
                if other:
                    fix = "go on with the hsx that wrote it, or remove this line: its sample is made anew"
                raise Refused(f"line {number} can't be read: {e}", field=path.name, value=path, fix=fix) from None
            left_out = True
    return lines, left_out


def _writable(line: Line) -> Line:
    """The line, where it can be written again and its hash be compared."""
    if not math.isfinite(getattr(line, "time", 0.0)):
        raise ContractError("the time is no number")
    try:
        bytes.fromhex(getattr(line, "ids_hash", ""))
    except ValueError:
        raise ContractError("the ids_hash is no hash") from None
    return line


def _is_of_another_version(line: bytes) -> bool:
    """Whether a line says so; one that says nothing is damaged."""
    try:
        body = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(body, dict) and body.get("version", VERSION) != VERSION


def newest(lines: Iterable[Line]) -> dict[int, Line]:
    """The line that counts for each row: the last one."""
    return {line.index: line for line in lines}


def rewrite(path: Path, lines: Iterable[Published | Failed | Damaged]) -> None:
    """Put other lines in the file's place, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, _text(lines))


def _text(lines: Iterable[Published | Failed | Damaged]) -> bytes:
    return "".join(encode(line) + "\n" for line in lines).encode()


def standing(dataset: Path, line: Published, ids_hash: bytes | None) -> str:
    """Empty where a line counts: same sample as in the plan, and a file of the right size. Else why it does not.

    :raises TryAgain: where it can't be told whether the file is there (no rights, a disk that fails).
    """
    if ids_hash is None:
        return "is not in the plan"
    if line.ids_hash != ids_hash.hex():
        return "was another sample"
    if what := _impossible(line):
        return f"{DAMAGED}: its line can't be: {what}"
    path = dataset / line.file
    try:
        found = os.stat(path)
    except OSError as e:
        return f"has no file {line.file} ({faults.reason(path, e)})"
    if not stat.S_ISREG(found.st_mode):
        return f"has no file {line.file} (what has this name is none)"
    return "" if found.st_size == line.bytes else f"{CUT} of {found.st_size} bytes instead of {line.bytes}"


def _impossible(line: Published) -> str:
    """What no extraction has written, whatever the format; empty where all may be so."""
    if not 0 < line.tokens <= line.bytes:
        return f"{line.tokens} tokens in {line.bytes} bytes"
    if line.next_token < 0:
        return f"next token {line.next_token}"
    crcs = line.crc32.values()
    if min(crcs, default=0) < 0 or max(crcs, default=0) >= 2**32:
        return "a checksum that is no crc32"
    if not line.file.isprintable() or line.file.startswith("/") or ".." in line.file.split("/"):
        return f"the file {line.file!r}"
    return ""


def judged(
    dataset: Path, path: Path, hashes: Mapping[int, bytes] | None, *, repair: bool = False
) -> tuple[dict[int, Published], dict[int, str], dict[int, Published]]:
    """The lines of a manifest that count, why each other row's does not, and every row's line.

    A line counts where it is ``standing``, and ``verify`` has not found its file damaged (``damaged.jsonl``).

    :param hashes: identity by row, of the plan; None, whatever the plan has in these rows now.
    :param repair: lines that are damaged are left out (``read_lines``).
    """
    lines = published_lines(path, repair=repair)
    if hashes is None:
        hashes = {row: bytes.fromhex(line.ids_hash) for row, line in lines.items()}
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
        say("a line of the manifest was half written or damaged: it is dropped")
    if half or len(good) != len(lines):
        rewrite(path, good.values())
    remove(damaged_path(path))
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
    path = damaged_path(manifest)
    lines: tuple[list[Damaged], bool] = ([], False) if path.is_dir() else read_lines(path, Damaged, repair=True)
    return {(d.index, d.rid): d.reason for d in lines[0]}


def damaged_path(manifest: Path) -> Path:
    """``damaged.jsonl`` beside a shard's manifest."""
    return manifest.with_name("damaged.jsonl")


def note_damaged(path: Path, found: Iterable[tuple[Published, str]]) -> None:
    """Remember in the list ``path`` published samples whose files are wrong, for the next ``resume`` or ``convert``."""
    if path.is_dir():
        remove(path)
    ledger: Ledger[Damaged] = Ledger(path)
    ledger.append(*(Damaged(line.index, line.rid, reason) for line, reason in found))
    ledger.close()


def forget_damaged(manifest: Path, rows: Container[int]) -> None:
    """Notes of damage of these rows count no longer: other files take the places of those that were looked at."""
    path = damaged_path(manifest)
    if path.is_file():
        rewrite(path, [d for d in read_lines(path, Damaged, repair=True)[0] if d.index not in rows])


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
            remove(file)
            removed.append(name)
    return removed


def remove(path: Path) -> None:
    """Remove a file, or a folder that stands in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def published_lines(path: Path, *, repair: bool = False) -> dict[int, Published]:
    """The line that counts for each row of a manifest; whether its sample still stands is not looked at.

    :param repair: lines that are damaged are left out (``read_lines``).
    """
    return newest(read_lines(path, Published, repair=repair)[0])


def failures(path: Path) -> dict[int, Failed]:
    """The failure that counts for each row. A damaged line names none: its row is missing, and is tried again."""
    lines: tuple[list[Any], bool] = read_lines(path, Failed, repair=True)
    return newest(lines[0])


def settle_failures(path: Path, hashes: Mapping[int, bytes], published: Mapping[int, Published]) -> dict[int, Failed]:
    """The failures that still count: of samples of the plan that are not published. Other lines leave the file."""
    known = failures(path)
    left = {row: f for row, f in known.items() if row not in published and f.ids_hash == hashes.get(row, b"").hex()}
    if path.exists() and path.read_bytes() != (whole := _text(left.values())):
        write_whole(path, whole)
    return left
