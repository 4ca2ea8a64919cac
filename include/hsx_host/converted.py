"""A folder that ``convert`` made: ``hsx.json`` says what it means, ``hsx-samples.jsonl`` is its manifest.

It stands by itself: the final norm lies in it too, so that it can be moved, checked and converted again without the
data set that it came from.
"""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from hsx_host import formats, norm, state
from hsx_host.errors import BadInput, Refused
from hsx_host.fingerprint import DatasetSemantics
from hsx_host.layouts import faults
from hsx_host.layouts.fields import crc_of
from hsx_host.manifest import Damaged, Published, note_damaged, published_lines, read_lines
from hsx_host.progress import Progress
from hsx_host.state import read_document

MEANING, SAMPLES, DAMAGED = "hsx.json", "hsx-samples.jsonl", "hsx-damaged.jsonl"
LOCK = ".lock"
_READERS = 4
_UNFIT = "its line does not fit the format"
OWN_FILES = (MEANING, SAMPLES, DAMAGED, *norm.FILES, LOCK)


@dataclass(frozen=True)
class ConvertedSet:
    """``hsx.json``. ``final``: before_norm or after_norm; ``approximate``: a norm was undone on the way here."""

    format: str
    final: str
    approximate: bool
    source: str
    meaning: DatasetSemantics


@dataclass(frozen=True)
class Collection:
    """Samples in one format, wherever they lie: ``base / line.file`` is a sample's file."""

    base: Path
    form: formats.Format
    shape: formats.Shape
    meaning: DatasetSemantics
    approximate: bool
    norm_file: Path
    lines: dict[int, Published]

    @property
    def final(self) -> str:
        """before_norm or after_norm."""
        return self.meaning.final


def opened(folder: Path, field: str = "--source") -> Collection:
    """A converted folder; BadInput where it is none."""
    found = read_document(ConvertedSet, folder / MEANING)
    if found is None:
        raise BadInput(
            "not a folder that convert made", field=field, value=folder, fix=f"give a folder that holds {MEANING}"
        )
    meaning = replace(found.meaning, final=found.final, formats=[found.format])
    return Collection(
        folder, formats.get(found.format, field), meaning.shape, meaning, found.approximate,
        folder / norm.NORM_FILE, lines_of(folder),
    )  # fmt: skip


def lines_of(folder: Path) -> dict[int, Published]:
    """The folder's samples by row; Refused where a line can't be read."""
    try:
        return published_lines(folder / SAMPLES)
    except Refused as e:
        raise Refused(
            e.doc.message, field=SAMPLES, value=folder / SAMPLES,
            fix="convert to this folder again: its samples are made anew",
        ) from None  # fmt: skip


def same_sample(have: Published | None, line: Published) -> bool:
    """Whether a converted sample was made of this very line of the data set."""
    return have is not None and (have.ids_hash, have.rid, have.time) == (line.ids_hash, line.rid, line.time)


def missing(folder: Path, lines: dict[int, Published]) -> list[int]:
    """Rows of a data set that a converted folder lacks, or holds of an earlier extraction."""
    have = lines_of(folder)
    return [row for row, line in sorted(lines.items()) if not same_sample(have.get(row), line)]


def problems(folder: Path, *, deep: bool) -> Iterator[str]:
    """What is wrong with a converted folder: files against its manifest, and files that it does not name."""
    one = opened(folder)
    for row, why in wrong_files(one, one.lines, deep=deep).items():
        yield f"row {row}: {folder.name}/{one.lines[row].file}: {why}"
    for stray in strays(folder, one.form, {line.file for line in one.lines.values()}):
        yield f"{folder.name}/{stray} is in no manifest"
    if why := norm_wrong(one):
        yield why
    for why in one.form.side_wrong(folder, one.lines, deep):
        yield f"{folder.name}/{why}"


def wrong_files(one: Collection, lines: Mapping[int, Published], *, deep: bool) -> dict[int, str]:
    """Why by row: what an earlier look has noted, or this one finds."""
    wrong = noted(one.base, lines)
    left = [line for row, line in sorted(lines.items()) if row not in wrong]
    wrong |= files_wrong(one.base, left, one.form, one.shape, deep=deep, what=f"verify {one.form.NAME}")
    return dict(sorted(wrong.items()))


def norm_wrong(one: Collection) -> str:
    """What is wrong with the norm that went with the samples; empty where nothing is."""
    why = norm.damage(one.norm_file)
    return why and f"{one.base.name}/{norm.NORM_FILE}: the final norm {why}"


def files_wrong(
    base: Path, lines: Sequence[Published], form: formats.Format, shape: formats.Shape, *, deep: bool, what: str
) -> dict[int, str]:
    """``file_wrong`` of many, by row; several at once.

    :param what: the name under which progress is told.
    """
    wrong: dict[int, str] = {}
    progress, tokens, size = Progress(what, len(lines)), 0, 0
    with ThreadPoolExecutor(_READERS) as pool:  # checksums and reads release the interpreter's lock
        results = pool.map(lambda line: file_wrong(base, line, form, shape, deep), lines)
        for done, (line, why) in enumerate(zip(lines, results, strict=True), start=1):
            if why:
                wrong[line.index] = why
            else:  # numbers of a damaged line are no one's
                tokens, size = tokens + line.tokens, size + line.bytes
            progress.update(done, tokens=tokens, bytes=size)
    return wrong


def noted(folder: Path, lines: Mapping[int, Published]) -> dict[int, str]:
    """What ``verify`` has found wrong with files of these lines, by row: the next ``convert`` makes them anew."""
    found: tuple[list[Damaged], bool] = read_lines(folder / DAMAGED, Damaged, repair=True)
    return {d.index: d.reason for d in found[0] if d.index in lines and lines[d.index].rid == d.rid}


def note(folder: Path, lines: Mapping[int, Published], wrong: Mapping[int, str]) -> None:
    """Remember what was found wrong, by row, once."""
    known = noted(folder, lines)
    if fresh := [(lines[row], why) for row, why in wrong.items() if row not in known]:
        note_damaged(folder / DAMAGED, fresh)


def strays(folder: Path, form: formats.Format, kept: set[str]) -> Iterator[str]:
    """Files below a format's folder that are no sample of the manifest and nothing that the format puts beside them.

    What a killed step left unfinished is none: no reader takes it, and the next ``handoff`` or ``convert`` removes it.
    """
    for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
        inner = path.relative_to(folder)
        name = inner.as_posix()
        folder_itself = path.is_dir() and not path.is_symlink()
        if folder_itself or name in kept or name in OWN_FILES or any(map(is_unfinished, inner.parts)):
            continue
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in form.SIDE):
            yield name


def is_unfinished(name: str) -> bool:
    """Whether a file or folder of this name is one that hsx makes and then renames, or NFS keeps while it is open."""
    return (name.startswith(".") and name.endswith(".tmp")) or faults.is_nfs_own(name)


def is_held(lock: Path) -> bool:
    """Whether a process holds a lock file now. One that was never made, or is another login's, is taken for free."""
    try:
        return not state.is_free(lock)
    except OSError:
        return False


def sweep(folder: Path) -> None:
    """Remove what a killed step left unfinished below a format's folder; the caller is the only one at work there."""
    for path in list(folder.rglob(".*.tmp")):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def file_wrong(base: Path, line: Published, form: formats.Format, shape: formats.Shape, deep: bool) -> str:
    """Why a sample's file is not what its line says; empty where it is. ``deep`` reads every byte.

    :raises TryAgain: the host can't read the file now, which says nothing of what it holds.
    """
    path = base / line.file
    try:
        size = path.stat().st_size
        if size != line.bytes:
            return f"has {size} bytes instead of {line.bytes}"
        crcs, places = form.check(path, line.tokens, shape, line.ids_hash)
        if places.keys() != line.crc32.keys():
            return f"{_UNFIT}: checksums of {', '.join(sorted(line.crc32))} instead of {', '.join(sorted(places))}"
        if differing := sorted(name for name in places if crcs[name] != line.crc32[name]):
            return f"its header has other checksums than the manifest for {', '.join(differing)}" + _swapped(
                {name: crcs[name] for name in differing}, line.crc32
            )
        if deep:
            read = {name: crc_of(path, *place) for name, place in places.items()}
            if differing := [name for name in read if read[name] != line.crc32[name]]:
                return f"{', '.join(differing)} does not match its checksum" + _swapped(
                    {name: read[name] for name in differing}, line.crc32
                )
    except OSError as e:
        return faults.reason(path, e)
    except ValueError as e:
        return _line_wrong(line, form, shape) or str(e)
    return ""


def _line_wrong(line: Published, form: formats.Format, shape: formats.Shape) -> str:
    """Why no file of the format could be what a line says, whatever the file holds; empty where one could."""
    try:
        fits = form.file_bytes(line.tokens, shape) == line.bytes and "\0" not in line.file
    except ValueError:
        fits = False
    return "" if fits else f"{_UNFIT}: {line.tokens} tokens in {line.bytes} bytes of {line.file!r}"


def _swapped(found: dict[str, int], wanted: dict[str, int]) -> str:
    """Says where the data of one layer stands in another's place."""
    owners = {crc: name for name, crc in wanted.items()}
    holds = {name: owners[crc] for name, crc in found.items() if crc in owners}
    if not holds:
        return ""
    return ": the order of layers is swapped: " + ", ".join(f"{name} holds {there}" for name, there in holds.items())
