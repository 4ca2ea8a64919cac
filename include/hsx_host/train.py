"""Run the profile's training command on a checked hand-off, and name the drafter that it made.

The command's output goes to stderr as it comes; lines with ``3/24 [`` (tqdm) or hsx's own progress lines become
progress. Its folder is named by the data's hash: the same call goes on from the checkpoints that lie there. On SIGTERM
the command gets SIGTERM and ``--grace`` seconds to save.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from hsx_host import drafter, servers, state, trainers, training_check
from hsx_host.contract import HandoffCheck, RunSpec, TrainingResult
from hsx_host.errors import BadInput, TryAgain
from hsx_host.progress import Progress, log

HELP = "run the training command on a hand-off"

_TQDM = re.compile(r"(\d+)/(\d+) \[")
_TAIL = 15


def add_arguments(parser: ArgumentParser) -> None:
    training_check.add_arguments(parser)
    parser.add_argument("--grace", type=float, default=60.0, help="seconds to save in after SIGTERM")


def run(spec: RunSpec, args: Namespace) -> TrainingResult:
    """Train to the end. TryAgain where the command ended with another code than 0: the next call goes on."""
    check: HandoffCheck = training_check.run(spec, args)
    settings, handoff = training_check.settings_of(spec), training_check.read(spec, args.handoff)
    work = trainers.work_of(settings, handoff)
    work.folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with state.locked(work.folder / "lock", wait_s=0, what=f"the training in {work.folder}"):
        before = drafter.newest_checkpoint(work.checkpoints)
        trainers.write_files(settings, handoff, check.data)
        log(f"training in {work.folder}" + (f", going on from {before}" if before else ""))
        environment = {**servers.clean_base(os.environ), **settings.env}
        for command in commands(check.command):
            _run(command, environment, work.folder, args.grace)
        made = servable(work)
    return TrainingResult(
        name=settings.name,
        work=str(work.folder),
        drafter=str(made),
        seconds=round(time.monotonic() - began, 3),
        resumed=before is not None,
    )


def servable(work: trainers.Work) -> Path:
    """The drafter of a training: what an export made, else the newest checkpoint; TryAgain where there is none."""
    found = work.drafter if (work.drafter / drafter.WEIGHTS).exists() else drafter.newest_checkpoint(work.checkpoints)
    if found is None:
        raise TryAgain(
            "the training has left no checkpoint",
            field="training.command",
            value=work.checkpoints,
            fix="look whether the command writes to {checkpoints} or {drafter}",
        )
    return found


def commands(words: Sequence[str]) -> Iterator[list[str]]:
    """Several commands with ``&&`` between, one after the other; no shell is asked."""
    command: list[str] = []
    for word in [*words, "&&"]:
        if word != "&&":
            command.append(word)
        elif command:
            yield command
            command = []


def _run(command: list[str], environment: dict[str, str], folder: Path, grace_s: float) -> None:
    log(f"$ {' '.join(command)}")
    try:
        child = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
    except OSError as e:
        raise BadInput(
            f"can't be run: {e.strerror}", field="training.command", value=command[0], fix="name a program of this host"
        ) from None
    assert child.stdout is not None
    try:
        tail = tell(child.stdout)
        code = child.wait()
    except BaseException:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(grace_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        raise
    if code != 0:
        raise TryAgain(
            f"the training command ended with {code}; its last lines:\n" + "\n".join(tail),
            field="training.command",
            value=" ".join(command)[:300],
            fix="read its log; the next try goes on from the last checkpoint",
        )


def tell(stream: IO[str]) -> list[str]:
    """Hand every line on to stderr, progress as progress; the last lines."""
    progress: dict[int, Progress] = {}
    tail: list[str] = []
    for line in _lines(stream):
        bar = _TQDM.search(line)
        if bar:
            done, total = int(bar[1]), int(bar[2])
            progress.setdefault(total, Progress("train", total)).update(done)
            continue
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
        if not _is_progress(line):
            tail = [*tail[1 - _TAIL :], line[:500]]
    return tail


def _lines(stream: IO[str]) -> Iterator[str]:
    """Lines; a carriage return ends one too (text mode reads it as a line's end)."""
    for line in stream:
        for part in line.rstrip("\n").split("\r"):
            if part.strip():
                yield part


def _is_progress(line: str) -> bool:
    if not line.startswith('{"progress"'):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
