"""How a document becomes JSON and back.

Documents carry ``type`` and ``version``; ``decode`` refuses an unknown field, a missing field, a wrong
type or another version, so that two sides of different age fail loudly instead of dropping what they
don't know.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from typing import Any, TypeVar

VERSION = 1


class ContractError(ValueError):
    """A document does not have the shape that this version of hsx knows; the message names the field."""


T = TypeVar("T")


def encode(document: Any) -> str:
    """The document as one line of JSON, with ``type`` and ``version``."""
    body = {"type": type(document).__name__, "version": VERSION, **dataclasses.asdict(document)}
    return json.dumps(body, ensure_ascii=True, separators=(",", ":"), allow_nan=False)


def decode(cls: type[T], text: str | bytes) -> T:
    """Read a document of type ``cls``; raises ContractError that names what does not fit."""
    try:
        body = json.loads(text)
    except ValueError as e:
        raise ContractError(f"{cls.__name__}: not JSON ({e}): {text[:200]!r}") from None
    return from_dict(cls, body)


def from_dict(cls: type[T], body: Any) -> T:
    """Like ``decode``, from a parsed object."""
    if not isinstance(body, dict):
        raise ContractError(f"{cls.__name__}: expected an object, got {type(body).__name__}")
    body = dict(body)
    kind, version = body.pop("type", None), body.pop("version", None)
    if kind != cls.__name__:
        raise ContractError(f"expected a {cls.__name__}, got type {kind!r}")
    if version != VERSION:
        raise ContractError(f"{cls.__name__}: version {version!r}, this side speaks {VERSION}; ship the bundle again")
    return typing.cast(T, _build(cls, body, cls.__name__))


def to_dict(document: Any) -> dict[str, Any]:
    """The document as plain JSON types (for XCom); ``from_dict`` reads it back."""
    return typing.cast(dict[str, Any], json.loads(encode(document)))


def _build(cls: Any, body: Any, where: str) -> Any:
    if not isinstance(body, dict):
        raise ContractError(f"{where}: expected an object, got {body!r}")
    hints, known = _hints(cls), {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(body) - set(known))
    if unknown:
        raise ContractError(f"{where}: unknown field {', '.join(unknown)}")
    values = {}
    for name, f in known.items():
        if name in body:
            values[name] = _convert(hints[name], body[name], f"{where}.{name}")
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ContractError(f"{where}: field {name} is missing")
    return cls(**values)


_HINTS: dict[Any, dict[str, Any]] = {}


def _hints(cls: Any) -> dict[str, Any]:
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls)
    return _HINTS[cls]


def _convert(hint: Any, value: Any, where: str) -> Any:
    if type(value) is hint:  # most values of a manifest, of which there are ten thousands
        return value
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        if not isinstance(value, list):
            raise ContractError(f"{where}: expected a list, got {value!r}")
        return [_convert(args[0], v, f"{where}[{i}]") for i, v in enumerate(value)]
    if origin is dict:
        if not isinstance(value, dict):
            raise ContractError(f"{where}: expected an object, got {value!r}")
        return {k: _convert(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if origin is types.UnionType:
        return None if value is None else _convert(args[0], value, where)
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, where)
    if hint is float and type(value) is int:
        return float(value)
    raise ContractError(f"{where}: expected {hint.__name__}, got {value!r}")
