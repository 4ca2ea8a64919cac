"""The pre-tokenised data set: a stream of validated samples from ``.jsonl`` or ``.jsonl.gz``.

A sample's number is its line number, counted from 0, rejects included, so that nothing ever shifts.
Memory holds one line at a time.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from hsx_host.errors import BadInput

MAX_LINE_BYTES = 64 << 20  # a line of a million tokens; anything longer is no sample, and must not fill the memory


@dataclass(frozen=True, slots=True)
class Sample:
    """One valid line: ``ids`` int32 [n], ``mask`` uint8 [n], and ``hash`` (16 bytes, see ``identity``)."""

    row: int
    ids: NDArray[np.int32]
    mask: NDArray[np.uint8]
    hash: bytes


@dataclass(frozen=True, slots=True)
class Reject:
    """One line that can't be extracted, and why."""

    row: int
    reason: str


def identity(ids: NDArray[np.int32], mask: NDArray[np.uint8]) -> bytes:
    """A sample's identity: the first 16 bytes of SHA-256 over token count (8 bytes), ids (int32) and mask (bytes).

    All little-endian. Spaces, key order and other fields of the line don't count: only what would be extracted does.
    """
    digest = hashlib.sha256(len(ids).to_bytes(8, "little"))
    digest.update(np.ascontiguousarray(ids, dtype="<i4").data)
    digest.update(np.ascontiguousarray(mask, dtype=np.uint8).data)
    return digest.digest()[:16]


def read_samples(path: str | Path, *, vocab_size: int, longest: int) -> Iterator[Sample | Reject]:
    """Every line of the file in order, as a Sample or a Reject.

    :param vocab_size: ids must lie in [0, vocab_size).
    :param longest: the longest prompt that the server takes, in tokens.
    :raises BadInput: with field ``data.path``, where the file is missing, empty, not a file, or a broken gzip.
    """
    row = -1
    for row, line in enumerate(_lines(Path(path))):
        checked = check_line(line, vocab_size=vocab_size, longest=longest)
        if isinstance(checked, str):
            yield Reject(row, checked)
        else:
            ids, mask = checked
            yield Sample(row, ids, mask, identity(ids, mask))
    if row < 0:
        _bad(path, "the file is empty")


def check_line(
    line: bytes | None, *, vocab_size: int, longest: int
) -> tuple[NDArray[np.int32], NDArray[np.uint8]] | str:
    """Ids and mask of one line, or the reason why it is none. ``None`` stands for a line beyond MAX_LINE_BYTES."""
    if line is None:
        return f"the line is longer than {MAX_LINE_BYTES >> 20} MiB"
    if not line.strip():
        return "the line is empty"
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as e:
        return f"not JSON: {e}"
    if not isinstance(body, dict):
        return f"not an object but {type(body).__name__}"
    for key in ("input_ids", "loss_mask"):
        if key not in body:
            return f"{key} is missing"
        if not isinstance(body[key], list):
            return f"{key} is not a list but {type(body[key]).__name__}"
    ids, mask = body["input_ids"], body["loss_mask"]
    return (
        _ids_wrong(ids, vocab_size, longest)
        or _mask_wrong(mask, len(ids))
        or (
            np.array(ids, dtype=np.int32),
            np.array(mask, dtype=np.uint8),
        )
    )


def _ids_wrong(ids: list[Any], vocab_size: int, longest: int) -> str:
    if not ids:
        return "input_ids is empty"
    where = _first_not_int(ids)
    if where is not None:
        return f"input_ids[{where}] = {str(ids[where])[:40]} is not a whole number"
    if min(ids) < 0 or max(ids) >= vocab_size:
        i = next(i for i, v in enumerate(ids) if not 0 <= v < vocab_size)
        return f"input_ids[{i}] = {str(ids[i])[:40]} lies outside the vocabulary of {vocab_size}"
    if len(ids) > longest:
        return f"{len(ids)} tokens are more than the {longest} that the server takes"
    return ""


def _mask_wrong(mask: list[Any], length: int) -> str:
    if len(mask) != length:
        return f"loss_mask has {len(mask)} values for {length} tokens"
    where = _first_not_int(mask)
    if where is None and not set(mask) <= {0, 1}:
        where = next(i for i, v in enumerate(mask) if v not in (0, 1))
    if where is not None:
        return f"loss_mask[{where}] = {str(mask[where])[:40]} is neither 0 nor 1"
    return ""


def _first_not_int(values: list[Any]) -> int | None:
    """The first value that is no int; True and 1.0 are none."""
    if set(map(type, values)) <= {int}:
        return None
    return next(i for i, v in enumerate(values) if type(v) is not int)


def _lines(path: Path) -> Iterator[bytes | None]:
    count = 0
    try:
        with _open(path) as f:
            while line := f.readline(MAX_LINE_BYTES):
                if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                    while (rest := f.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                        pass
                    yield None
                else:
                    yield line
                count += 1
    except (EOFError, gzip.BadGzipFile, zlib.error) as e:
        _bad(path, f"a broken gzip file after line {count}: {e}")
    except OSError as e:
        _bad(path, f"the file can't be read: {e.strerror or e}")


def _open(path: Path) -> IO[bytes] | gzip.GzipFile:
    if path.name.endswith(".jsonl.gz"):
        return gzip.open(path, "rb")
    if not path.name.endswith(".jsonl"):
        _bad(path, "the name ends neither in .jsonl nor in .jsonl.gz")
    return path.open("rb")


def _bad(path: str | Path, what: str) -> NoReturn:
    raise BadInput(
        what, field="data.path", value=path, fix="give a .jsonl or .jsonl.gz file on the host, one sample a line"
    )
