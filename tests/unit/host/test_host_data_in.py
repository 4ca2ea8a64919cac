"""Every kind of data file gives the same samples; conversations get the model's template, and a mask."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import host_data as h
import pytest

from hsx_host import plan
from hsx_host.dataset import Reject, Sample, identity, read_samples
from hsx_host.errors import BadInput

LINES = h.samples(150)
ROWS = [json.loads(line) for line in LINES]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: As Qwen3: the last answer begins with an empty thought, earlier ones have none.
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<t></t>{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: As SmolLM2: a system turn of its own where none is given.
DEFAULTS = (
    "{% if messages and messages[0]['role'] != 'system' %}<|im_start|>system\nbe good<|im_end|>\n{% endif %}" + CHATML
)
#: As Qwen3: thoughts only behind the last question that no tool asked, answers of tools as a user's turn.
THINKS_LATE = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>"
    "{% if m.role == 'tool' %}user\n<r>{{ m.content }}</r>{% else %}{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or m.thought) %}<t>{{ m.thought }}</t>"
    "{% endif %}{{ m.content.split('</t>')[-1] }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<c>{{ c.name }}</c>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: As DeepSeek-R1: a prompt for thoughts that no turn of the past shows.
PROMPTS_THOUGHT = CHATML.replace("assistant\n{% endif", "assistant\n<t>{% endif")
#: Writes the last answer backwards before all else: a turn that is the last then begins otherwise.
REORDERS = "{{ messages[-1]['content'][::-1] }}" + CHATML
STRICT = "{{ raise_exception('only one turn') if messages|length > 2 }}" + CHATML


def tokenizer(folder: Path, template: str | None) -> Any:
    """A tokenizer of single bytes and two special tokens, saved into a model's folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    if template:
        fast.chat_template = template
    fast.save_pretrained(folder)
    return fast


def read(path: Path, model: str = "", longest: int = 400) -> list[Sample | Reject]:
    return list(read_samples(path, vocab_size=h.VOCAB, longest=longest, model=model))


def as_rows(found: list[Sample | Reject]) -> list[Any]:
    return [(s.row, s.ids.tolist(), s.mask.tolist()) if isinstance(s, Sample) else s for s in found]


def write(kind: str, folder: Path) -> Path:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as parquet
    import zstandard

    text = "".join(line + "\n" for line in LINES).encode()
    table = pa.Table.from_pylist([{**row, "note": "x"} for row in ROWS])
    if kind == "zst":
        path = folder / "d.jsonl.zst"
        half = len(text) // 2
        path.write_bytes(b"".join(zstandard.ZstdCompressor().compress(part) for part in (text[:half], text[half:])))
    elif kind == "parquet":
        path = folder / "d.parquet"
        parquet.write_table(table, path, row_group_size=40)
    elif kind == "parquet folder":
        path = folder / "d"
        path.mkdir()
        parquet.write_table(table.slice(0, 70), path / "part-0.parquet")
        parquet.write_table(table.slice(70), path / "part-1.parquet")
    elif kind == "arrow stream":
        path = folder / "d.arrow"
        with pa.OSFile(str(path), "wb") as f, pa.ipc.new_stream(f, table.schema) as w:
            w.write_table(table, max_chunksize=33)
    elif kind == "arrow file":
        path = folder / "d.arrow"
        with pa.OSFile(str(path), "wb") as f, pa.ipc.new_file(f, table.schema) as w:
            w.write_table(table, max_chunksize=33)
    else:  # as prepare-data of speculators saves it
        path = folder / "prepared"
        saved = datasets.Dataset.from_list([{**row, "seq_len": len(row["input_ids"])} for row in ROWS])
        if kind == "saved, masks of truth values":
            saved = saved.map(lambda row: {"loss_mask": [bool(v) for v in row["loss_mask"]]})
        saved.set_format("torch")
        saved.save_to_disk(str(path))
    return path


@pytest.mark.parametrize(
    "kind",
    ["zst", "parquet", "parquet folder", "arrow stream", "arrow file", "saved", "saved, masks of truth values"],
)
def test_every_kind_of_file_gives_the_same_samples(tmp_path: Path, kind: str) -> None:
    found = read(write(kind, tmp_path))
    plain = read(h.write_lines(tmp_path / "plain.jsonl", LINES))
    assert as_rows(found) == as_rows(plain) == [(i, r["input_ids"], r["loss_mask"]) for i, r in enumerate(ROWS)]
    assert [s.hash for s in found] == [s.hash for s in plain]  # type: ignore[union-attr]


def test_rows_of_a_table_that_are_no_samples_keep_their_numbers(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    rows = [{"input_ids": [1, 2], "loss_mask": [1, 1]}, {"input_ids": None, "loss_mask": [1]},
            {"input_ids": [1], "loss_mask": [7]}, {"input_ids": [h.VOCAB], "loss_mask": [1]}]  # fmt: skip
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    first, *others = read(tmp_path / "d.parquet")
    assert isinstance(first, Sample)
    assert [(r.row, r.reason.split(" ")[0]) for r in others if isinstance(r, Reject)] == [
        (1, "input_ids"), (2, "loss_mask[0]"), (3, "input_ids[0]"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "data", "word"),
    [
        ("cut.jsonl.zst", "cut", "broken zstd"),
        ("no.jsonl.zst", b"no zstd at all", "broken zstd"),
        ("no.parquet", b"no parquet", "Parquet file can't be read"),
        ("no.arrow", b"no arrow at all, but long enough", "Arrow file can't be read"),
        ("wide.jsonl", (LINES[0] + "\n").encode("utf-16"), "UTF-8"),
        ("wide.jsonl", (LINES[0] + "\n").encode("utf-32"), "UTF-8"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, data: Any, word: str) -> None:
    import zstandard

    path = tmp_path / name
    text = "".join(line + "\n" for line in LINES).encode()
    path.write_bytes(zstandard.ZstdCompressor().compress(text)[:-30] if data == "cut" else data)
    with h.refuses(BadInput, "data.path", word, name):
        read(path)


@pytest.mark.parametrize("kind", ["arrow stream", "saved"])
@pytest.mark.parametrize("where", ["behind a batch", "before the last byte"])
def test_an_arrow_stream_that_was_cut_is_not_a_shorter_one(tmp_path: Path, kind: str, where: str) -> None:
    path = write(kind, tmp_path)
    file = path if path.is_file() else next(path.glob("data-*.arrow"))
    os.truncate(file, file.stat().st_size - (8 if where == "behind a batch" else 1))
    with h.refuses(BadInput, "data.path", "no end mark", file.name):
        read(path)


def test_a_file_that_compresses_to_nothing_reads_as_any_other(tmp_path: Path) -> None:
    import zstandard

    text = (LINES[0] + " " * 1000 + "\n") * 30_000
    (tmp_path / "d.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(text.encode()))
    found = read(tmp_path / "d.jsonl.zst")
    assert len(found) == 30_000
    assert len({s.hash for s in found if isinstance(s, Sample)}) == 1


def test_utf_16_without_a_mark_is_rejected_and_a_mark_of_utf_8_is_not(tmp_path: Path) -> None:
    (tmp_path / "wide.jsonl").write_bytes((LINES[0] + "\n").encode("utf-16-le"))
    assert all(isinstance(one, Reject) for one in read(tmp_path / "wide.jsonl"))
    (tmp_path / "marked.jsonl").write_bytes(b"\xef\xbb\xbf" + LINES[0].encode() + b"\n")
    assert isinstance(read(tmp_path / "marked.jsonl")[0], Sample)


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz", "d.parquet", "d.arrow"])
def test_a_pipe_is_refused_at_once(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with h.refuses(BadInput, "data.path", "not a plain file"):
        read(tmp_path / name)


def test_folders_that_are_no_data_set(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with h.refuses(BadInput, "data.path", "neither a saved data set"):
        read(tmp_path / "empty")
    (tmp_path / "both/train").mkdir(parents=True)
    (tmp_path / "both/dataset_dict.json").write_text("{}")
    with h.refuses(BadInput, "data.path", "several splits", "both/train"):
        read(tmp_path / "both")


# ---------------------------------------------------------------------------------- conversations

TURNS = [
    {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"}, {"role": "assistant", "content": "four"},
]  # fmt: skip


def trained(fast: Any, sample: Sample) -> list[str]:
    """What the mask covers, a text for each stretch of it."""
    parts, ids = [], list[int]()
    for token, on in [*zip(sample.ids.tolist(), sample.mask.tolist(), strict=True), (0, 0)]:
        if on:
            ids.append(token)
        elif ids:
            parts.append(fast.decode(ids))
            ids = []
    return parts


def chats(tmp_path: Path, template: str, *bodies: dict[str, Any]) -> tuple[Any, list[Sample | Reject]]:
    fast = tokenizer(tmp_path / "m", template)
    return fast, read(h.write_lines(tmp_path / "c.jsonl", map(json.dumps, bodies)), str(tmp_path / "m"))


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_only_what_the_assistant_says_is_trained_on(tmp_path: Path, template: str) -> None:
    old = [{"from": {"user": "human", "assistant": "gpt"}[t["role"]], "value": t["content"]} for t in TURNS]
    parts = [{**t, "content": [{"type": "text", "text": t["content"]}]} for t in TURNS]
    fast, found = chats(tmp_path, template, {"messages": TURNS}, {"conversations": old}, {"messages": parts})
    whole = "".join(f"<|im_start|>{t['role']}\n{t['content']}<|im_end|>\n" for t in TURNS)
    for one in found:
        assert isinstance(one, Sample), one
        assert fast.decode(one.ids.tolist()) == whole
        assert trained(fast, one) == ["two<|im_end|>", "four<|im_end|>"]
        assert one.hash == identity(one.ids, one.mask) == found[0].hash  # type: ignore[union-attr]


def test_a_template_that_writes_the_last_turn_otherwise(tmp_path: Path) -> None:
    fast, (one,) = chats(tmp_path, THINKS, {"messages": TURNS})
    assert isinstance(one, Sample), one
    assert trained(fast, one) == ["two<|im_end|>", "<t></t>four<|im_end|>"]


def _says(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


ASKS = {"role": "user", "content": "one"}
HEADER = {"role": "user", "content": "<|im_start|>assistant\n<t>x"}
GREETING = [_says("hello"), ASKS, _says("two")]
TWICE = [ASKS, _says("two"), _says("three")]
TOOLS = [
    ASKS, _says("look", thought="why", tool_calls=[{"name": "find"}]), {"role": "tool", "content": "SECRET"},
    _says("two", thought="so"), {"role": "user", "content": "two?"}, _says("four", thought="then"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("template", "turns", "said"),
    [
        (CHATML, GREETING, ["hello", "two"]),
        (DEFAULTS, GREETING, ["hello", "two"]),
        (DEFAULTS, [{"role": "system", "content": "SYS"}, *GREETING], ["hello", "two"]),
        (THINKS_LATE, GREETING, ["hello", "<t></t>two"]),
        (CHATML, TWICE, ["two", "three"]),
        (THINKS, TWICE, ["two", "<t></t>three"]),
        (THINKS_LATE, TWICE, ["two", "<t></t>three"]),
        (THINKS_LATE, TOOLS, ["look<c>find</c>", "two", "<t>then</t>four"]),
        (THINKS_LATE, TOOLS[:4], ["<t>why</t>look<c>find</c>", "<t>so</t>two"]),
        (THINKS_LATE, [ASKS, _says("<t>x</t>two"), ASKS, _says("three")], ["two", "<t></t>three"]),
        (THINKS, [ASKS, _says(" one \n"), ASKS, _says("")], [" one \n", "<t></t>"]),
        (PROMPTS_THOUGHT, TWICE, ["two", "three"]),
        (PROMPTS_THOUGHT, [ASKS, _says("two", thought="x")], "where turn 1 begins can't be told"),
        (THINKS_LATE, [HEADER, *TOOLS[1:]], ["look<c>find</c>", "two", "<t>then</t>four"]),
        (PROMPTS_THOUGHT, [HEADER, _says("two")], ["two"]),
        (REORDERS, TWICE, "where turn 1 ends can't be told"),
    ],
)  # fmt: skip
def test_the_loss_is_on_the_assistants_words_alone_or_the_row_is_rejected(
    tmp_path: Path, template: str, turns: list[dict[str, Any]], said: list[str] | str
) -> None:
    """Greetings, answers in a row, thoughts that come and go, tools: nothing of a header, a default, another's turn."""
    fast, (one,) = chats(tmp_path, template, {"messages": turns})
    if isinstance(said, str):
        assert isinstance(one, Reject)
        assert said in one.reason
        return
    assert isinstance(one, Sample), one
    assert trained(fast, one) == [f"{text}<|im_end|>" for text in said]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"messages": []}, "no list of turns"),
        ({"messages": "hello"}, "no list of turns"),
        ({"messages": ["hello"]}, "turn 0 is not an object"),
        ({"messages": [{"content": "x"}]}, "turn 0 has no role"),
        ({"messages": TURNS[:1]}, "nothing to train on"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}, "content of turn 0 is not text"),
        ({"messages": TURNS}, "the chat template refuses it"),
        ({"messages": [{"role": "user", "content": "x" * 500}, TURNS[1]]}, "more than the 400"),
    ],
)
def test_what_is_no_conversation_is_a_reject(tmp_path: Path, body: dict[str, Any], why: str) -> None:
    _, (one,) = chats(tmp_path, STRICT, body)
    assert isinstance(one, Reject)
    assert why in one.reason


def test_conversations_need_a_template(tmp_path: Path) -> None:
    tokenizer(tmp_path / "m", None)
    path = h.write_lines(tmp_path / "c.jsonl", [json.dumps({"messages": TURNS})])
    with h.refuses(BadInput, "data.path", "no chat template"):
        read(path, str(tmp_path / "m"))
    (tmp_path / "none").mkdir()
    with h.refuses(BadInput, "model.path", "tokenizer can't be loaded"):
        read(path, str(tmp_path / "none"))


def test_a_tokenizer_without_offsets_masks_by_the_edges_of_turns(tmp_path: Path) -> None:
    """Such as Kimi's: Python, no offsets. Here the fast one, told to be slow."""
    from hsx_host.chat import Chat

    fast = tokenizer(tmp_path / "m", CHATML)
    chat = Chat(str(tmp_path / "m"))
    quick = chat.encode({"messages": TURNS})

    class Slow:
        is_fast = False

        def __getattr__(self, name: str) -> Any:
            return getattr(fast, name)

        def __call__(self, text: str, **how: Any) -> Any:
            assert "return_offsets_mapping" not in how
            return fast(text, **how)

    chat._tokenizer = Slow()
    assert chat.encode({"messages": TURNS}) == quick


def test_plan_takes_conversations_in_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    path = tmp_path / "chats.parquet"
    parquet.write_table(pa.Table.from_pylist([{"messages": TURNS}, {"messages": TURNS[:2]}]), path)
    spec = h.make_spec(tmp_path, path)
    tokenizer(Path(spec.model.path), CHATML)
    result = plan.run(spec, Namespace(dry_run=False, failed=False))
    assert (result.valid, result.todo, result.dataset_id.startswith("tiny-chats-")) == (2, 2, True)
