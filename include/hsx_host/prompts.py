"""Prompts for production and for an acceptance: one JSON line each, as token ids of the model.

``{"input_ids": [...]}``, ``{"prompt": "text"}`` (as it is, no template) or ``{"messages": [...]}`` (the model's chat
template, with the mark that the assistant speaks next).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hsx_host.errors import BadInput


@dataclass(frozen=True)
class Prompt:
    """One line of the file (from 0) and its token ids."""

    line: int
    ids: list[int]

    @property
    def hash(self) -> str:
        """16 hex digits of the ids."""
        return hashlib.sha256(json.dumps(self.ids).encode()).hexdigest()[:16]


def read_prompts(path: str | Path, model: str, *, field: str, longest: int) -> Iterator[Prompt]:
    """Every prompt of a file, in order; those of more than ``longest`` tokens are left out.

    :raises BadInput: naming ``field`` and the line, where the file or a line is not what it should be.
    """
    tokenizer: Any = None
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        _bad(field, path, f"can't be read: {e}")
    for number, text in enumerate(lines):
        if not text.strip():
            continue
        try:
            body = json.loads(text)
        except ValueError as e:
            _bad(field, path, f"line {number + 1} is not JSON: {e}")
        if isinstance(body, dict) and isinstance(body.get("input_ids"), list):
            ids = body["input_ids"]
        else:
            tokenizer = tokenizer or _tokenizer(model)
            ids = _encode(tokenizer, body, lambda why, n=number: _bad(field, path, f"line {n + 1} {why}"))
        if not ids or not all(type(i) is int and i >= 0 for i in ids):
            _bad(field, path, f"line {number + 1} has no token ids")
        if len(ids) <= longest:
            yield Prompt(number, ids)


def _encode(tokenizer: Any, body: Any, bad: Any) -> list[int]:
    if isinstance(body, dict) and isinstance(body.get("prompt"), str):
        return [int(i) for i in tokenizer(body["prompt"])["input_ids"]]
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        bad("has neither input_ids, prompt nor messages")
    try:
        found = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, tokenize=True)
    except Exception as e:  # templates raise errors of their own
        bad(f"does not fit the model's chat template: {e}")
    ids = found["input_ids"] if not isinstance(found, list) else found
    return [int(i) for i in ids]


def _tokenizer(model: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise BadInput(
            "prompts as text need the package transformers", field="host.python", fix="install it, or give input_ids"
        ) from None
    try:
        return AutoTokenizer.from_pretrained(model)
    except Exception as e:
        raise BadInput(f"has no tokenizer that loads: {e}", field="model.path", value=model) from None


def _bad(field: str, path: str | Path, what: str) -> NoReturn:
    raise BadInput(
        what, field=field, value=path, fix='one of {"prompt": text}, {"messages": [...]}, {"input_ids": [...]} a line'
    )
