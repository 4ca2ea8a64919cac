"""The demo's data set: real chat turns, answered by the model itself through the running production server.

Runs under the Python that has SGLang (``python -m hsx_demo.dataset --model M --url U --cache C``); prints the file. One
JSON object a line: ``input_ids`` is the chat template applied to question and answer, ``loss_mask`` is 1 on
the answer and its end of turn. Kept by content: model, questions and this recipe.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests

from hsx_demo.errors import DemoError
from hsx_demo.model import model_hash
from hsx_demo.prompts import QUESTIONS

RECIPE = 1  # counts changes of what follows that make other rows
AT_ONCE = 40


def make_dataset(model: Path, url: str, cache: Path) -> Path:
    """The data set's file below ``cache``; generated where it is not there yet.

    :param url: a running SGLang server of ``model``.
    :raises DemoError: the server refuses a request, or an answer does not continue its prompt.
    """
    file = dataset_file(model, cache)
    if file.exists():
        return file
    rows = generate(model, url)
    cache.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    with temporary.open("w") as f:
        f.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
        f.flush()
        os.fsync(f.fileno())
    temporary.rename(file)
    return file


def dataset_file(model: Path, cache: Path) -> Path:
    """Where the data set of this model, these questions and this recipe lies, made or not."""
    key = hashlib.sha256(f"{RECIPE} {model_hash(model)} {json.dumps(QUESTIONS)}".encode()).hexdigest()[:12]
    return cache / f"smollm2-chat-{key}.jsonl"


def generate(model: Path, url: str) -> list[dict[str, list[int]]]:
    """All rows, in the order of the questions; greedy, many at once."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    end_of_turn = tokenizer.eos_token_id
    turns = [f"{question}\n\n{pasted}" if pasted else question for question, pasted, _ in QUESTIONS]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": turn}], add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        for turn in turns
    ]
    with requests.Session() as session, ThreadPoolExecutor(AT_ONCE) as pool:
        session.trust_env = False
        answers = list(pool.map(lambda p, q: _answer(session, url, p, q[2]), prompts, QUESTIONS))
    return [_row(p, a, end_of_turn) for p, a in zip(prompts, answers, strict=True)]


def _answer(session: requests.Session, url: str, prompt: list[int], most: int) -> list[int]:
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": most}}
    answer = session.post(f"{url}/generate", json=body, timeout=600)
    if not answer.ok:
        raise DemoError(
            f"the server refuses a prompt of {len(prompt)} tokens: HTTP {answer.status_code} {answer.text[:300]}"
        )
    ids: Any = answer.json()["output_ids"]
    if not ids:
        raise DemoError(f"the server gave no answer to a prompt of {len(prompt)} tokens")
    return [int(i) for i in ids]


def _row(prompt: list[int], answer: list[int], end_of_turn: int) -> dict[str, list[int]]:
    """A cut answer gets its end of turn too: every row is a whole turn."""
    if answer[-1] != end_of_turn:
        answer = [*answer, end_of_turn]
    return {"input_ids": [*prompt, *answer], "loss_mask": [0] * len(prompt) + [1] * len(answer)}


def main() -> int:
    """Make the data set and print its file."""
    parser = argparse.ArgumentParser(prog="python -m hsx_demo.dataset", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--cache", type=Path, required=True)
    options = parser.parse_args()
    try:
        print(make_dataset(options.model, options.url, options.cache))
    except (DemoError, requests.RequestException) as e:
        print(f"hsx demo: the data set could not be made: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
