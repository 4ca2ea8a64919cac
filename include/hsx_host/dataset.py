"""The data set: a stream of validated samples from whatever ``rows`` reads, tokenised before or conversations.

A sample's number is its row's, counted from 0, rejects included, so that nothing ever shifts. Its identity is the hash
of its ids and mask, so that it is known again in another row, file or spelling.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsx_host.chat import Chat, NoChat
from hsx_host.errors import BadInput
from hsx_host.rows import rows


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


def read_samples(
    path: str | Path, *, vocab_size: int, longest: int, model: str = "", trust_remote_code: bool = False
) -> Iterator[Sample | Reject]:
    """Every row of the file in order, as a Sample or a Reject.

    :param vocab_size: ids must lie in [0, vocab_size).
    :param longest: the longest prompt that the server takes, in tokens.
    :param model: the folder of the model, whose tokenizer and chat template turn conversations into samples.
    :raises BadInput: with field ``data.path``, where the file is missing, empty, not a file, or broken.
    """
    row, chat = -1, None
    for row, body in enumerate(rows(Path(path))):
        if isinstance(body, dict) and "input_ids" not in body and ("messages" in body or "conversations" in body):
            chat = chat or Chat(model, trust_remote_code=trust_remote_code)
            body = _as_ids(chat, body)
        checked = body if isinstance(body, str) else check_row(body, vocab_size=vocab_size, longest=longest)
        if isinstance(checked, str):
            yield Reject(row, checked)
        else:
            ids, mask = checked
            yield Sample(row, ids, mask, identity(ids, mask))
    if row < 0:
        raise BadInput("the file is empty", field="data.path", value=path, fix="give a file with one sample a row")


def _as_ids(chat: Chat, body: dict[str, Any]) -> dict[str, Any] | str:
    try:
        ids, mask = chat.encode(body)
    except NoChat as e:
        return str(e)
    return {"input_ids": ids, "loss_mask": mask}


def check_row(
    body: dict[str, Any], *, vocab_size: int, longest: int
) -> tuple[NDArray[np.int32], NDArray[np.uint8]] | str:
    """Ids and mask of one row, or the reason why it is no sample."""
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
