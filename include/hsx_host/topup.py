"""More samples by the model itself: production answers given prompts until the data set has what the profile wants.

Nothing is done where the data file already has enough, or the profile wants no top-up. A sample is the prompt and its
answer, the answer trained on. Each is appended to ``topup/samples.jsonl`` of the data set and then to
``topup/manifest.jsonl``; a call that was stopped goes on where it was. ``plan`` reads them as shards of their own
behind the data file's: plan again after a top-up. Production must be up; the host is not borrowed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import requests

from hsx_host import serve, servers, state
from hsx_host.contract import ContractError, PlanResult, RunSpec, TopUpResult, TopUpSettings, decode, encode
from hsx_host.dataset import Sample, identity
from hsx_host.errors import BadInput, Refused, TryAgain
from hsx_host.fingerprint import opened
from hsx_host.layouts import faults
from hsx_host.model_facts import longest_prompt, read_model
from hsx_host.progress import Progress, log
from hsx_host.prompts import Prompt, read_prompts
from hsx_host.shards import FIRST_TOP_UP

HELP = "let production answer prompts until the data set has the samples that are wanted"


@dataclass(frozen=True)
class Made:
    """One line of the manifest. ``kept`` is false for an answer that was empty, too long or the same as another.

    ``at`` and ``bytes``: where its line lies in samples.jsonl. ``turn``: how often this prompt was asked before.
    """

    number: int
    prompt: int
    prompt_hash: str
    turn: int
    seed: int
    kept: bool
    ids_hash: str
    prompt_tokens: int
    answer_tokens: int
    finish: str
    at: int
    bytes: int
    time: float


@dataclass(frozen=True)
class _Ask:
    prompt: Prompt
    turn: int
    seed: int


class Ledger:
    """``topup/``: samples and their manifest. The manifest counts; what lies behind it in the samples is cut off."""

    def __init__(self, dataset: Path) -> None:
        self.folder = dataset / "topup"
        self.samples, self.manifest = self.folder / "samples.jsonl", self.folder / "manifest.jsonl"

    def lines(self) -> list[Made]:
        """Every whole line; Refused where one can't be read."""
        data = faults.content(self.manifest)
        if data is None:
            return []
        *whole, half = data.split(b"\n")
        if half:
            log("the top-up's manifest ends in half a line, which is dropped")
        try:
            return [decode(Made, line) for line in whole]
        except ContractError as e:
            raise Refused(
                f"a line can't be read: {e}", field="topup/manifest.jsonl", value=self.manifest, fix="restore the file"
            ) from None

    def kept(self, shard_size: int) -> Iterator[Sample]:
        """The samples that count, with their rows: shards from FIRST_TOP_UP on.

        :raises Refused: where the samples' file is not what the manifest says.
        """
        lines = [line for line in self.lines() if line.kept]
        if not lines:
            return
        first = FIRST_TOP_UP * shard_size
        try:
            with self.samples.open("rb") as f:
                for line in lines:
                    f.seek(line.at)
                    body = json.loads(f.read(line.bytes))
                    ids, mask = np.array(body["input_ids"], np.int32), np.array(body["loss_mask"], np.uint8)
                    found = identity(ids, mask)
                    if found.hex() != line.ids_hash:
                        raise ValueError(f"sample {line.number} has another hash than the manifest")
                    yield Sample(first + line.number, ids, mask, found)
        except (OSError, ValueError, KeyError) as e:
            raise Refused(
                f"the samples can't be read: {e}", field="topup/samples.jsonl", value=self.samples,
                fix="restore the file, or remove the folder topup to make them anew",
            ) from None  # fmt: skip

    def append(self, line: Made, text: bytes) -> None:
        """Put a sample behind the others, then its line; both last before this returns."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path, data in ((self.samples, text), (self.manifest, (encode(line) + "\n").encode())):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                while data:
                    data = data[os.write(fd, data) :]
                os.fsync(fd)
            finally:
                os.close(fd)

    def repair(self) -> list[Made]:
        """Cut off what a killed call has left behind the last whole line of each file; the lines that count."""
        lines = self.lines()
        for path, size in (
            (self.manifest, sum(len(encode(line)) + 1 for line in lines)),
            (self.samples, max((line.at + line.bytes for line in lines), default=0)),
        ):
            if path.exists() and path.stat().st_size > size:
                os.truncate(path, size)
        return lines


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="only say how many would be made")


def run(spec: RunSpec, args: Namespace) -> TopUpResult:
    """Make what is missing. TryAgain where production does not serve, BadInput where the prompts don't suffice."""
    dataset, meaning = opened(spec)
    plan = state.read_or_none(PlanResult, dataset / "plan.json")
    if plan is None:
        raise TryAgain("the data set has not been planned", field="data.name", value=dataset, fix="run plan first")
    ledger = Ledger(dataset)
    had = plan.valid - plan.top_ups
    if spec.top_up is None:
        made = sum(line.kept for line in ledger.lines())
        return _result(ledger, had, made, had + made, 0, 0, 0.0, "no top-up is wanted")
    folder = state.folder(spec, "state") / f"topup-{meaning.dataset_id}.lock"
    with state.locked(folder, wait_s=0, what="this top-up"):
        lines = ledger.lines() if args.dry_run else ledger.repair()
        made = sum(line.kept for line in lines)
        missing = spec.top_up.samples - had - made
        if missing <= 0 or args.dry_run:
            text = f"{max(missing, 0)} more samples would be made" if missing > 0 else "the data set has enough samples"
            return _result(ledger, had, made, spec.top_up.samples, 0, 0, 0.0, text)
        serve.require_production(spec)
        return _Making(spec, spec.top_up, ledger, lines, missing).make(had)


class _Making:
    """One call's work: asks ``concurrency`` at once, appends in the order in which answers come."""

    def __init__(self, spec: RunSpec, settings: TopUpSettings, ledger: Ledger, lines: list[Made], missing: int) -> None:
        self._spec, self._settings, self._ledger, self._missing = spec, settings, ledger, missing
        self._asked = {(line.prompt_hash, line.turn) for line in lines}
        self._known = {line.ids_hash for line in lines if line.kept}
        self._number = sum(line.kept for line in lines)
        self._at = max((line.at + line.bytes for line in lines), default=0)
        self._longest = longest_prompt(read_model(spec.model.path), spec.extraction)
        self._local = threading.local()

    def make(self, had: int) -> TopUpResult:
        began, before = time.monotonic(), self._number
        progress = Progress("top-up", self._missing)
        progress.update(0)
        tokens = dropped = made = 0
        asks = self._asks()
        with ThreadPoolExecutor(self._settings.concurrency) as pool:
            flying: dict[Future[tuple[list[int], str]], _Ask] = {}
            try:
                while made < self._missing:
                    room = min(self._settings.concurrency, self._missing - made) - len(flying)
                    for ask in itertools.islice(asks, max(room, 0)):
                        flying[pool.submit(self._answer, ask)] = ask
                    if not flying:
                        raise self._spent(made)
                    for future in wait(flying, return_when=FIRST_COMPLETED).done:
                        line = self._keep(flying.pop(future), *future.result())
                        made, dropped = made + line.kept, dropped + (not line.kept)
                        tokens += line.answer_tokens
                        progress.update(made, tokens=tokens)
            finally:
                for future in flying:
                    future.cancel()
        seconds = time.monotonic() - began
        text = f"{made} samples made, {dropped} answers dropped, {tokens} tokens in {seconds:.0f} s"
        log(text)
        return _result(self._ledger, had, before + made, self._settings.samples, dropped, tokens, seconds, text)

    def _asks(self) -> Iterator[_Ask]:
        """Prompts in seeded order, again and again where answers differ; what was asked is left out."""
        settings = self._settings
        room = longest_prompt(read_model(self._spec.model.path), self._spec.production) - settings.max_new_tokens
        prompts = list(read_prompts(settings.prompts, self._spec.model.path, field="data.top_up.prompts", longest=room))
        if not prompts:
            raise BadInput(
                f"has no prompt of at most {room} tokens", field="data.top_up.prompts", value=settings.prompts
            )
        random.Random(settings.seed).shuffle(prompts)
        for turn in itertools.count() if settings.temperature > 0 else range(1):
            for prompt in prompts:
                if (prompt.hash, turn) not in self._asked:
                    text = f"{settings.seed} {prompt.hash} {turn}"
                    yield _Ask(prompt, turn, int(hashlib.sha256(text.encode()).hexdigest()[:7], 16))

    def _spent(self, made: int) -> BadInput:
        return BadInput(
            f"the prompts are used up, {self._missing - made} samples are still missing: "
            "at temperature 0 each prompt has one answer",
            field="data.top_up.prompts",
            value=self._settings.prompts,
            fix="give more prompts, or a temperature above 0",
        )

    def _answer(self, ask: _Ask) -> tuple[list[int], str]:
        """The answer's ids and why it ended; tried again a few times, then TryAgain."""
        settings = self._settings
        sampling = {
            "max_new_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "sampling_seed": ask.seed,
        }
        why = ""
        for _ in range(settings.tries):
            try:
                answer = self._session().post(
                    f"{servers.url(self._spec.production)}/generate",
                    json={"input_ids": ask.prompt.ids, "sampling_params": sampling},
                    timeout=(10, settings.request_timeout_s),
                )
                if answer.status_code == 200:
                    found = answer.json()
                    reason = found["meta_info"].get("finish_reason") or {}
                    return [int(i) for i in found["output_ids"]], str(reason.get("type", ""))
                why = f"{answer.status_code}: {answer.text[:200]}"
            except (requests.RequestException, ValueError, KeyError, TypeError, AttributeError) as e:
                why = f"{type(e).__name__}: {e}"
        raise TryAgain(
            f"production gives no answer to prompt {ask.prompt.line}: {why}",
            field="data.top_up",
            value=servers.url(self._spec.production),
            fix="look whether production is up; the next call goes on here",
        )

    def _keep(self, ask: _Ask, answer: list[int], finish: str) -> Made:
        """Append one answer; what is empty, too long to extract or there already is noted and not kept."""
        ids = np.array([*ask.prompt.ids, *answer], np.int32)
        mask = np.array([0] * len(ask.prompt.ids) + [1] * len(answer), np.uint8)
        name = identity(ids, mask).hex()
        kept = bool(answer) and len(ids) <= self._longest and name not in self._known and finish != "abort"
        body = {"input_ids": ids.tolist(), "loss_mask": mask.tolist()}
        text = (json.dumps(body) + "\n").encode() if kept else b""
        line = Made(
            number=self._number if kept else -1,
            prompt=ask.prompt.line,
            prompt_hash=ask.prompt.hash,
            turn=ask.turn,
            seed=ask.seed,
            kept=kept,
            ids_hash=name,
            prompt_tokens=len(ask.prompt.ids),
            answer_tokens=len(answer),
            finish=finish,
            at=self._at,
            bytes=len(text),
            time=time.time(),
        )
        self._ledger.append(line, text)
        self._number, self._at = self._number + kept, self._at + len(text)
        self._known.add(name)
        return line

    def _session(self) -> requests.Session:
        if not hasattr(self._local, "session"):
            self._local.session = requests.Session()
            self._local.session.trust_env = False
            self._local.session.headers.update(servers.headers(self._spec.production))
        session: requests.Session = self._local.session
        return session


def _result(
    ledger: Ledger, had: int, made: int, wanted: int, dropped: int, tokens: int, seconds: float, text: str
) -> TopUpResult:
    return TopUpResult(
        path=str(ledger.samples),
        wanted=wanted,
        had=had,
        made=made,
        now=had + made,
        dropped=dropped,
        tokens=tokens,
        seconds=round(seconds, 3),
        text=text,
    )
