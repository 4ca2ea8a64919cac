"""Serve the target alone, then with the trained drafter, under the same prompts: acceptance length and tokens a second.

Both are servers of their own on the settings' port, one after the other; production is not touched. Prompts are asked
greedily with a fixed number of tokens. The acceptance length is the tokens that came for each step of the target
(SGLang's ``spec_verify_ct``), the first token aside, which the prefill gives; 1.0 is a drafter that never helps.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import requests

from hsx_host import drafter, health, processes, procid, prompts, servers, state, train, trainers, training_check
from hsx_host.contract import (
    AcceptanceResult,
    AcceptanceSettings,
    HandoffResult,
    RunSpec,
    ServedFigures,
    ServerSettings,
)
from hsx_host.errors import BadInput, Refused, TryAgain
from hsx_host.model_facts import longest_prompt, read_model
from hsx_host.progress import Progress, log
from hsx_host.prompts import Prompt

HELP = "acceptance length and speed of a drafter, against the target alone"

_ALGORITHM = "EAGLE3"
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Answer:
    """``steps`` of the target behind the prefill; ``seconds`` since the first request of all."""

    ids: list[int]
    steps: int
    seconds: float


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--handoff", default="", metavar="PATH", help="handoff.json; default: of the spec's data set")
    parser.add_argument("--drafter", default="", metavar="DIR", help="a checkpoint; default: the training's newest")


def run(spec: RunSpec, args: Namespace) -> AcceptanceResult:
    """Measure both. Refused below the profile's minimum; TryAgain where a server does not come up."""
    settings = training_check.settings_of(spec)
    if settings.acceptance is None:
        raise BadInput("the profile has no acceptance", field="training.acceptance", value=spec.profile, fix="add it")
    handoff = training_check.read(spec, args.handoff)
    work = trainers.work_of(settings, handoff)
    work.folder.mkdir(parents=True, exist_ok=True)
    checkpoint = Path(args.drafter) if args.drafter else train.servable(work)
    served = drafter.make_servable(checkpoint, work.folder / "served", handoff)
    chosen = choose_prompts(spec, settings.acceptance, handoff)
    alone = serve_and_ask(spec.host.python, settings.acceptance, chosen, "alone", work.folder)
    drafted = serve_and_ask(
        spec.host.python, with_drafter(settings.acceptance, served), chosen, "with the drafter", work.folder
    )
    result = compare(settings.acceptance, str(served), chosen, alone, drafted)
    state.write_document(work.folder / "acceptance.json", result)
    log(result.text)
    if not result.ok:
        raise Refused(
            f"the acceptance length is {result.drafted.acceptance_length:.2f}, at least "
            f"{settings.acceptance.minimum:.2f} is wanted ({result.text})",
            field="training.acceptance.minimum",
            value=settings.acceptance.minimum,
            fix="train longer or on more samples; 1.0 hints at other layers or another norm than it was trained on",
        )
    return result


def with_drafter(settings: AcceptanceSettings, folder: Path) -> AcceptanceSettings:
    """The same, the server with a chain of ``steps`` draft tokens."""
    flags = {
        "--speculative-algorithm": _ALGORITHM,
        "--speculative-draft-model-path": str(folder),
        "--speculative-num-steps": str(settings.steps),
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": str(settings.steps + 1),
    }
    words = [word for pair in flags.items() for word in pair]
    server = replace(
        settings.server,
        args=[*settings.server.args, *words, *settings.draft_flags],
        env={**settings.server.env, **settings.draft_env},
    )
    return replace(settings, server=server)


def compare(
    settings: AcceptanceSettings, folder: str, chosen: list[Prompt], alone: list[Answer], drafted: list[Answer]
) -> AcceptanceResult:
    """The figures of both runs over the same prompts."""
    same = sum(a.ids == b.ids for a, b in zip(alone, drafted, strict=True))
    one, two = _figures(alone, 0), _figures(drafted, same)
    speedup = two.output_tok_s / one.output_tok_s if one.output_tok_s else 0.0
    held_out = bool(settings.prompts)
    return AcceptanceResult(
        drafter=folder,
        prompts=settings.prompts or "of the data set",
        held_out=held_out,
        samples=len(chosen),
        steps=settings.steps,
        alone=one,
        drafted=two,
        speedup=round(speedup, 4),
        ok=two.acceptance_length >= settings.minimum,
        text=(
            f"acceptance length {two.acceptance_length:.2f} (chain of {settings.steps}) over {len(chosen)} "
            f"{'held-out prompts' if held_out else 'prompts of the data set itself'}; {two.output_tok_s:.1f} tok/s "
            f"against {one.output_tok_s:.1f} alone ({speedup:.2f}); {same} answers are the same"
        ),
    )


def _figures(answers: list[Answer], same: int) -> ServedFigures:
    tokens, steps = sum(len(a.ids) for a in answers), sum(a.steps for a in answers)
    wall = max((a.seconds for a in answers), default=0.0)
    return ServedFigures(
        output_tok_s=round(tokens / wall, 3) if wall else 0.0,
        tokens=tokens,
        seconds=round(wall, 3),
        acceptance_length=round((tokens - len(answers)) / steps, 4) if steps else 1.0,
        same_output=same,
    )


def choose_prompts(spec: RunSpec, settings: AcceptanceSettings, handoff: HandoffResult) -> list[Prompt]:
    """The first ``samples`` prompts that leave room for the answer; BadInput where there is none."""
    facts = read_model(spec.model.path)
    longest = longest_prompt(facts, settings.server) - settings.output_tokens
    if settings.prompts:
        source: Iterator[Prompt] = prompts.read_prompts(
            settings.prompts, spec.model.path, field="training.acceptance.prompts", longest=longest
        )
    else:
        source = of_dataset(Path(handoff.path).parent, longest)
    chosen = [prompt for prompt, _ in zip(source, range(settings.samples), strict=False)]
    if not chosen:
        raise BadInput(
            f"no prompt of at most {longest} tokens", field="training.acceptance.prompts", value=settings.prompts
        )
    return chosen


def of_dataset(dataset: Path, longest: int) -> Iterator[Prompt]:
    """What stands before the first trained token of each sample of the plan."""
    from hsx_host.shards import ShardFiles, read_input, shard_ids

    for shard in shard_ids(dataset):
        samples = read_input(ShardFiles(dataset, shard))
        for i in range(len(samples)):
            sample = samples.sample(i)
            trained = sample.mask.nonzero()[0]
            length = int(trained[0]) if len(trained) else len(sample.ids) // 2
            if 0 < length <= longest:
                yield Prompt(sample.row, [int(t) for t in sample.ids[:length]])


def serve_and_ask(
    python: str, settings: AcceptanceSettings, chosen: list[Prompt], what: str, folder: Path
) -> list[Answer]:
    """Start the server, ask every prompt behind a warm-up, stop it again; answers in the order of the prompts."""
    log_file = folder / f"server-{what.replace(' ', '-')}.log"
    with server(python, settings.server, log_file, what):
        _ask(settings, chosen[:1], f"warm-up {what}")
        return _ask(settings, chosen, f"acceptance {what}")


def _ask(settings: AcceptanceSettings, chosen: list[Prompt], what: str) -> list[Answer]:
    """Every prompt, ``concurrency`` at once; ``seconds`` of an answer counts from the common start to its end."""
    progress, began = Progress(what, len(chosen)), time.monotonic()

    def one(prompt: Prompt) -> Answer:
        body = {
            "input_ids": prompt.ids,
            "sampling_params": {"max_new_tokens": settings.output_tokens, "temperature": 0, "ignore_eos": True},
        }
        with requests.Session() as session:
            session.trust_env = False
            session.headers.update(servers.headers(settings.server))
            try:
                answer = session.post(f"{servers.url(settings.server)}/generate", json=body, timeout=600)
                answer.raise_for_status()
                found = answer.json()
                meta = found["meta_info"]
                ids = [int(i) for i in found["output_ids"]]
                steps = int(meta.get("spec_verify_ct") or 0) or len(ids) - 1
                return Answer(ids, steps, time.monotonic() - began)
            except (requests.RequestException, ValueError, KeyError, TypeError) as e:
                raise TryAgain(
                    f"the server gave no answer to prompt {prompt.line} ({what}): {e}",
                    field="training.acceptance",
                    value=servers.url(settings.server),
                    fix="read the server's log in the training's folder",
                ) from None

    answers = []
    with ThreadPoolExecutor(max(1, settings.concurrency)) as pool:
        for done, found in enumerate(pool.map(one, chosen), start=1):
            answers.append(found)
            progress.update(done, tokens=sum(len(a.ids) for a in answers))
    return answers


@contextmanager
def server(python: str, settings: ServerSettings, log_file: Path, what: str) -> Iterator[None]:
    """A server for as long as the block lasts. It gets SIGTERM where this process dies, whatever of."""
    taken = processes.listeners(settings.port)
    if taken:
        raise TryAgain(
            f"something listens there already: {processes.describe(taken[0])}",
            field="training.acceptance.port",
            value=settings.port,
            fix="give a port of its own, or end what holds it",
        )
    environment = servers.environment(servers.clean_base(os.environ), settings)
    parent = os.getpid()

    def die_with_parent() -> None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    with log_file.open("wb") as out:
        child = subprocess.Popen(
            servers.command(python, settings), env=environment, cwd=log_file.parent, stdin=subprocess.DEVNULL,
            stdout=out, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip
    main = procid.identify(child.pid)
    if main is None:
        raise TryAgain(f"the server {what} ended at once", field="server log", value=log_file, fix="read it")
    owned = processes.owned(main)
    try:
        spent = health.wait_until_ready(
            settings,
            alive=lambda: child.poll() is None,
            log_file=str(log_file),
            deadline_s=settings.start_timeout_s,
            what=f"target {what}",
        )
        print(f"the target {what} is up after {spent:.0f} s", file=sys.stderr, flush=True)
        yield
    finally:
        processes.stop(owned, port=settings.port, grace_s=settings.stop_grace_s)
        child.wait()
