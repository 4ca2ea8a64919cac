"""What pydantic finds wrong with a profile, as one line a problem: the field, the value, what is wrong, the fix."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails


def path_of(loc: tuple[int | str, ...]) -> str:
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in loc).lstrip(".")


def problem(d: ErrorDetails, path: str, model: type[BaseModel]) -> str:
    """One pydantic error as ``field = value: what is wrong (fix)``; ``path`` is where it stands in the file."""
    kind, value = d["type"], d["input"]
    if kind == "missing":
        return f"{path}: is missing (add it)"
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(str(d["loc"][-1]), _known_fields(model, d["loc"][:-1]), n=1)
        return f"{path} = {value!r}: is not a setting (" + (f"did you mean {near[0]}?" if near else "remove it") + ")"
    message = d["msg"].removeprefix("Value error, ")
    fix = f"give {_hint(d)}" if _hint(d) else "change it"
    if kind == "string_pattern_mismatch" and d.get("ctx", {}).get("pattern", "").startswith("^/"):
        message, fix = "is not an absolute path", "give a path that starts with /, as it is on the host"
    return f"{path} = {value!r}: {message[:1].lower()}{message[1:]} ({fix})"


def _hint(d: ErrorDetails) -> str:
    ctx = d.get("ctx", {})
    parts = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    bounds = [f"{text} {ctx[key]}" for key, text in parts.items() if key in ctx]
    if bounds:
        return "a number of " + " and ".join(bounds)
    if "expected" in ctx:
        return str(ctx["expected"])
    kinds = {"int": "a whole number", "float": "a number", "bool": "true or false", "string": "a text (quote it)"}
    return next((text for key, text in kinds.items() if d["type"].startswith(key)), "")


def _known_fields(model: Any, loc: tuple[int | str, ...]) -> list[str]:
    for part in loc:
        field = getattr(model, "model_fields", {}).get(part)
        model = field.annotation if field else None
    return list(getattr(model, "model_fields", {}))
