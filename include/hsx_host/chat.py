"""Conversations as ids and loss mask: the model's own chat template, the loss on what the assistant says.

A template with generation markers (``{% generation %}``) says by itself what the assistant wrote. For any other the
turns are found in the rendered text: what the template adds behind the prompt of a turn is the assistant's, with the
end of turn that it has to learn, and without the blank space that the template puts behind that. A conversation in
which a turn's edges can't be told is no sample: the loss is never on a guess.
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
        text = self.render(messages, tools)
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
        """Where the assistant's turns stand in the rendered text; NoChat where one's edges can't be told."""
        spans: list[tuple[int, int]] = []
        for i, message in enumerate(messages):
            if message["role"] != _ASSISTANT:
                continue
            before = self.render(messages[:i], tools, prompt=True) if i else ""
            upto = self.render(messages[: i + 1], tools)
            if before and text.startswith(before) and text.startswith(upto) and len(upto) > len(before):
                start, end = len(before), len(upto)
            else:  # the template writes a first or last turn otherwise than one in the middle
                known = len(before) if before and text.startswith(before) else None
                start, end = _Marked(self, text, messages, tools).turn(i, spans[-1][1] if spans else 0, known)
            stripped = text[start:end].rstrip()
            if stripped.endswith(self._ends()):
                end = start + len(stripped)
            spans.append((start, end))
        return spans

    def _ends(self) -> tuple[str, ...]:
        return tuple(t for t in self._tokenizer.all_special_tokens if t)

    def render(self, messages: list[dict[str, Any]], tools: Any, *, prompt: bool = False) -> str:
        """A conversation as the template writes it; ``prompt`` adds what comes before an answer."""
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


class _Marked:
    """Finds a turn by a character that stands nowhere else: put into a turn's content, it shows where that stands.

    It counts only where the rendered text, without it, is the very same: then the template took it for plain text.
    """

    def __init__(self, chat: Chat, text: str, messages: list[dict[str, Any]], tools: Any) -> None:
        self._chat, self._text, self._messages, self._tools = chat, text, messages, tools
        self._mark = next(mark for mark in map(chr, range(0xE000, 0xF8FF)) if mark not in text)

    def turn(self, i: int, behind: int, start: int | None) -> tuple[int, int]:
        """Begin and end of the assistant's turn i.

        :param behind: where the assistant's turn before it ends; ``start``: where this one begins, if known.
        """
        content = self._messages[i]["content"]
        at = self._place(i, len(content.rstrip()))
        if at is None:
            raise NoChat(f"what the assistant says in turn {i} is not in the rendered conversation as it was said")
        first = self._place(i, len(content) - len(content.lstrip()))
        if start is None:
            start = self._start(i, self._others(i, behind), at if first is None else first, first)
        if start > (at if first is None else first):
            raise NoChat(f"the chat template writes turn {i} before its own header")
        return start, self._end(i, at)

    def _start(self, i: int, behind: int, upto: int, first: int | None) -> int:
        """Behind the header of turn i, which stands between ``behind`` and ``upto``; else where its content begins."""
        header = self._header(i)
        count = self._text.count(header, behind, upto) if header else 0
        if count == 1:
            return self._text.index(header, behind, upto) + len(header)
        if count or first is None or set(self._messages[i]) - {"role", "content", "tool_calls"}:
            raise NoChat(f"where turn {i} begins can't be told from the rendered conversation")
        return first

    def _header(self, i: int) -> str:
        """What the template writes before an answer; empty where it writes nothing of its own."""
        for messages in (self._messages, self._messages[:i]):
            bare = self._chat.render(messages, self._tools) if messages else ""
            asked = self._chat.render(messages, self._tools, prompt=True) if messages else ""
            if asked.startswith(bare) and asked[len(bare) :].strip():
                return asked[len(bare) :]
        return ""

    def _others(self, i: int, behind: int) -> int:
        """Behind the content of every turn between the assistant's last one and turn i."""
        for j in range(i - 1, -1, -1):
            content = self._messages[j]["content"].rstrip()
            if self._messages[j]["role"] == _ASSISTANT:
                break
            if not content:
                continue
            # a template may look at how a content ends: then a mark inside it has to do
            places = (self._place(j, at) for at in (len(content), len(content) // 2))
            at = next((place for place in places if place is not None), None)
            if at is None:
                raise NoChat(f"where turn {j} stands can't be told from the rendered conversation")
            behind = max(behind, at)
        return behind

    def _end(self, i: int, at: int) -> int:
        """Behind what the template writes after turn i's content, which ends at ``at``: tool calls, end of turn."""
        alone = self._chat.render(self._with_mark(i, len(self._messages[i]["content"].rstrip()))[: i + 1], self._tools)
        tail = alone.partition(self._mark)[2]
        for wanted in (tail, tail.rstrip()):
            if self._text.startswith(wanted, at):
                return at + len(wanted)
        raise NoChat(f"where turn {i} ends can't be told from the rendered conversation")

    def _place(self, i: int, at: int) -> int | None:
        """Where the character ``at`` of turn i's content stands in the rendered text."""
        found = self._chat.render(self._with_mark(i, at), self._tools)
        place = found.find(self._mark)
        return place if place >= 0 and found[:place] + found[place + 1 :] == self._text else None

    def _with_mark(self, i: int, at: int) -> list[dict[str, Any]]:
        content = self._messages[i]["content"]
        turn = {**self._messages[i], "content": content[:at] + self._mark + content[at:]}
        return [*self._messages[:i], turn, *self._messages[i + 1 :]]


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
