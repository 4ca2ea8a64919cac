"""The documents of the spool folder, read and written strictly.

One JSON object a file, with ``type`` (the class's name) and ``version``. A reader refuses unknown and missing fields
and wrong types, so that a client of another age fails loudly. Units are bytes and rows; one row is one token.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

VERSION = 1
T = TypeVar("T")


class SpecError(ValueError):
    """A document can't be used; the message names the field."""


@dataclass(frozen=True)
class CaptureSpec:
    """What ``HSX_CAPTURE_SPEC`` names: what to capture of which model, and where the spool is.

    ``final``: whether the final hidden state is taken ``before`` or ``after`` the final norm.
    """

    plugin_id: str
    spool: str
    layers: list[int]
    num_blocks: int
    hidden_size: int
    dtype: str
    writers: int
    ring_bytes: int
    rid_prefix: str = "hsx-"
    final: str = "before"

    def __post_init__(self) -> None:
        if self.final not in ("before", "after"):
            raise SpecError(f"CaptureSpec.final: {self.final!r}, expected before or after")


@dataclass(frozen=True)
class Plane:
    """Row r of a plane lies at ``offset + r * row_stride`` of the file, ``hidden_size`` elements each."""

    name: str
    offset: int
    row_stride: int


@dataclass(frozen=True)
class CaptureRequest:
    """``<rid>.json``: the file to fill. Planes: the layers in ascending order, then ``final``."""

    rid: str
    path: str
    tokens: int
    ids_crc32: int
    planes: list[Plane]


@dataclass(frozen=True)
class PlaneRecord:
    """What was written of one plane. The CRC runs over the rows of its block, in the order of the file: planes that lie
    side by side in each row have one CRC together, which stands at each of them."""

    name: str
    crc32: int
    finite: bool
    zero: bool
    constant: bool


@dataclass(frozen=True)
class CaptureRecord:
    """``<rid>.done.json``: the answer, written last. ``error`` is empty, or why the sample is not complete."""

    rid: str
    rows: int
    bytes: int
    chunks: int
    ids_crc32: int
    planes: list[PlaneRecord]
    error: str = ""


@dataclass(frozen=True)
class PluginReady:
    """``ready-<pid>.json``: what one scheduler process has proved of its seams, or why it captures nothing."""

    plugin_id: str
    pid: int
    tp_rank: int
    sglang: str
    model_class: str
    layers_to_capture: list[int]
    num_blocks: int
    hidden_size: int
    norm_class: str
    norm_eps: float
    seams: dict[str, str]
    error: str = ""


def read(cls: type[T], path: Path) -> T:
    """Read one document of type ``cls``; raises SpecError naming the field, or OSError."""
    try:
        body = json.loads(path.read_bytes())
    except ValueError as e:
        raise SpecError(f"{path.name}: not JSON ({e})") from None
    if not isinstance(body, dict):
        raise SpecError(f"{path.name}: not an object")
    kind, version = body.pop("type", None), body.pop("version", None)
    if kind != cls.__name__ or version != VERSION:
        raise SpecError(f"{path.name}: expected {cls.__name__} version {VERSION}, got {kind!r} version {version!r}")
    return typing.cast(T, _build(cls, body, cls.__name__))


def write(document: Any, path: Path) -> None:
    """Write a document under a temporary name, then rename it: a reader never sees half of it.

    Not synced to disk: the spool means nothing once this server is gone.
    """
    body = {"type": type(document).__name__, "version": VERSION, **dataclasses.asdict(document)}
    text = json.dumps(body, separators=(",", ":"), allow_nan=False)
    temp = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    temp.write_text(text)
    temp.replace(path)


def _build(cls: Any, body: Any, where: str) -> Any:
    if not isinstance(body, dict):
        raise SpecError(f"{where}: expected an object, got {body!r}")
    hints = _hints(cls)
    unknown = sorted(set(body) - set(hints))
    if unknown:
        raise SpecError(f"{where}: unknown field {', '.join(unknown)}")
    for f in dataclasses.fields(cls):
        if f.name not in body and f.default is dataclasses.MISSING:
            raise SpecError(f"{where}: field {f.name} is missing")
    return cls(**{name: _convert(hints[name], value, f"{where}.{name}") for name, value in body.items()})


_HINTS: dict[Any, dict[str, Any]] = {}


def _hints(cls: Any) -> dict[str, Any]:
    # Resolving annotations costs more than reading a request, and requests are read on the scheduler's thread.
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls)
    return _HINTS[cls]


def _convert(hint: Any, value: Any, where: str) -> Any:
    if typing.get_origin(hint) is list:
        if not isinstance(value, list):
            raise SpecError(f"{where}: expected a list, got {value!r}")
        inner = typing.get_args(hint)[0]
        return [_convert(inner, v, f"{where}[{i}]") for i, v in enumerate(value)]
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, where)
    if type(value) is not hint:
        raise SpecError(f"{where}: expected {hint.__name__}, got {value!r}")
    return value
