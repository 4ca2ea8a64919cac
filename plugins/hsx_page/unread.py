"""One odd document costs its own part of the page and no more, and the page says that it could not be read.

What tasks published may be of another version, kept elsewhere by an XCom backend, or wrong.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D")

log = logging.getLogger(__name__)

_SAID = 10


class Unread:
    """What could not be read, in words."""

    def __init__(self) -> None:
        self._lines: dict[str, None] = {}

    def say(self, line: str) -> None:
        """Keep one sentence, once."""
        self._lines[line] = None

    def part(self, what: str, instead: D, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | D:
        """``make(*args)``; where it can't, ``instead``, and the page says that ``what`` can't be read."""
        try:
            return make(*args, **kwargs)
        except Exception as e:
            log.debug("%s", what, exc_info=True)
            self.say(f"{what} can't be read ({type(e).__name__}: {str(e)[:100]})")
            return instead

    def said(self) -> list[str]:
        """The sentences, the first ten of many."""
        lines = list(self._lines)
        return lines if len(lines) <= _SAID else [*lines[:_SAID], f"and {len(lines) - _SAID} more"]


def number(value: Any) -> int | float | None:
    """A finite number, None for all else."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None


def mapping(value: Any) -> dict[str, Any]:
    """A mapping, empty for all else."""
    return value if isinstance(value, dict) else {}


def listing(value: Any) -> list[Any]:
    """A list, empty for all else."""
    return value if isinstance(value, list) else []


def clean(value: Any) -> Any:
    """The document as JSON can say it: NaN and infinities as null, half characters as question marks."""
    if isinstance(value, dict):
        return {clean(str(k)): clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(v) for v in value]
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, int | bool) else str(value)
