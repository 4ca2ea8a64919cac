"""Conversations as ids and loss mask: the model's own chat template, the loss on what the assistant says.

A template with generation markers (``{% generation %}``) says by itself what the assistant wrote. For any other the
turns are found in the rendered text: what the template adds behind the prompt of a turn is the assistant's, with the
end of turn that it has to learn, and without the blank space that the template puts behind that.
"""

from __future__ import annotations

import re
from typing import Any

from hsx_host.errors import BadInput

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
_ASSISTANT = "assistant"


class NoChat(Exception):
    """A row is no conversation that can be trained on; the message says why."""


class Chat:
    """The tokenizer and chat template of one model.

    :param model: its folder on the host.
    :raises BadInput: where it has no tokenizer or no chat template.
    """

    def __init__(self, model: str, *, trust_remote_code: bool = False) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise BadInput(
                "conversations need the package transformers", field="data.path", fix="install it under host.python"
            ) from None
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                model, local_files_only=True, trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError, ImportError) as e:
            raise BadInput(
                f"the tokenizer can't be loaded: {e}", field="model.path", value=model,
                fix="give the whole model's folder, or tokenise the data set before",
            ) from None  # fmt: skip
        template = getattr(self._tokenizer, "chat_template", None)
        if not template:
            raise BadInput(
                "the model has no chat template, and the data set holds conversations", field="data.path", value=model,
                fix="give a data set of input_ids and loss_mask",
            )  # fmt: skip
        texts = template.values() if isinstance(template, dict) else [template]
        self._marked = any(_MARKER.search(text) for text in texts) and self._tokenizer.is_fast

    def encode(self, body: dict[str, Any]) -> tuple[list[int], list[int]]:
        """Ids and mask of a row with ``messages`` or ``conversations`` (and ``tools``); NoChat says why not."""
        messages = _messages(body)
        tools = body.get("tools") or None
        try:
            if self._marked:
                return self._by_markers(messages, tools)
            return self._by_text(messages, tools)
        except NoChat:
            raise
        except Exception as e:  # a template raises what it likes
            raise NoChat(f"the chat template refuses it: {type(e).__name__}: {str(e)[:200]}") from None

    def _by_markers(self, messages: list[dict[str, Any]], tools: Any) -> tuple[list[int], list[int]]:
        found = self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        mask = found.get("assistant_masks", found.get("assistant_mask"))
        return _ints(found["input_ids"]), _ints(mask)

    def _by_text(self, messages: list[dict[str, Any]], tools: Any) -> tuple[list[int], list[int]]:
        text = self._render(messages, tools)
        spans = self._spans(text, messages, tools)
        if self._tokenizer.is_fast:
            found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            ids, places = _ints(found["input_ids"]), found["offset_mapping"]
            mask = [int(any(start <= a < end for start, end in spans)) for a, b in places]
            return ids, mask
        ids = self._ids(text)
        mask = [0] * len(ids)
        for start, end in spans:
            at, behind = len(self._head(text[:start], ids)), len(self._head(text[:end], ids))
            mask[at:behind] = [1] * (behind - at)
        return ids, mask

    def _spans(self, text: str, messages: list[dict[str, Any]], tools: Any) -> list[tuple[int, int]]:
        """Where the assistant's turns stand in the rendered text."""
        spans: list[tuple[int, int]] = []
        for i, message in enumerate(messages):
            if message["role"] != _ASSISTANT:
                continue
            before = self._render(messages[:i], tools, prompt=True) if i else ""
            if not text.startswith(before):
                before = text[: spans[-1][1]] if spans else ""
                if i and not spans:
                    raise NoChat(f"the chat template changes what stands before turn {i}")
            upto = self._render(messages[: i + 1], tools)
            if i and text.startswith(upto) and len(upto) > len(before):
                end = len(upto)
            else:  # the template writes a last turn otherwise than one in the middle: find what was said
                said = str(message.get("content") or "").strip()
                at = text.find(said, len(before)) if said else -1
                if at < 0:
                    raise NoChat(f"what the assistant says in turn {i} is not in the rendered conversation")
                end = self._behind_turn(text, at + len(said))
            start = len(before)
            stripped = text[start:end].rstrip()
            if stripped.endswith(self._ends()):
                end = start + len(stripped)
            spans.append((start, end))
        return spans

    def _behind_turn(self, text: str, at: int) -> int:
        """``at``, or behind the end of turn that follows there at once."""
        rest = text[at:]
        gap = len(rest) - len(rest.lstrip())
        token = next((t for t in self._ends() if rest[gap:].startswith(t)), "")
        return at + gap + len(token) if token else at

    def _ends(self) -> tuple[str, ...]:
        return tuple(t for t in self._tokenizer.all_special_tokens if t)

    def _render(self, messages: list[dict[str, Any]], tools: Any, *, prompt: bool = False) -> str:
        return str(
            self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
        )

    def _head(self, text: str, ids: list[int]) -> list[int]:
        """The ids of the beginning of a text; NoChat where the whole text is cut into tokens otherwise."""
        head = self._ids(text)
        if ids[: len(head)] != head:
            raise NoChat("a token reaches over the edge of a turn")
        return head

    def _ids(self, text: str) -> list[int]:
        return _ints(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The turns in the form that chat templates take: ``role`` and ``content``."""
    turns = body.get("messages", body.get("conversations"))
    if not isinstance(turns, list) or not turns:
        raise NoChat("messages is no list of turns, or an empty one")
    found = []
    for i, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise NoChat(f"turn {i} is not an object but {type(turn).__name__}")
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if not isinstance(role, str):
            raise NoChat(f"turn {i} has no role")
        kept = {k: v for k, v in turn.items() if k not in ("from", "value", "role", "content") and v is not None}
        found.append({**kept, "role": _ROLES.get(role, role), "content": _text(content, i)})
    if not any(turn["role"] == _ASSISTANT for turn in found):
        raise NoChat("no turn is the assistant's: there is nothing to train on")
    return found


def _text(content: Any, turn: int) -> str:
    if content is None:
        return ""  # a turn of tool calls only
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    raise NoChat(f"the content of turn {turn} is not text")


def _ints(values: Any) -> list[int]:
    return [int(v) for v in values]
