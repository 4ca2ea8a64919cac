"""The probe matrix, against the live extraction server, before any shard.

  length N            N tokens sent are N rows dumped: 1, 19, and around the chunk size (chunked prefill)
  eight at once       eight different prompts at once give what each gives alone
  shared prefix       two prompts with a common beginning: neither loses rows to the other
  same prompt twice   the second time is like the first: nothing comes from a cache
For each: tokens sent = rows dumped, 0 cached, the model saw the ids that were sent, every plane is there, finite and
not constant, and the next token follows from the final hidden state. A failed case ends the verb with 3.
"""

from __future__ import annotations

import random
import shutil
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from hsx_host import borrow, formats, proof, state
from hsx_host.client import Captured, Client, Engine, NoSpace, SampleFault, ServerGone, live_engine, ready_norm_class
from hsx_host.contract import PlanResult, ProbeCase, ProbeReport, RunSpec
from hsx_host.dataset import Sample, identity
from hsx_host.errors import Refused, TryAgain
from hsx_host.fingerprint import DatasetSemantics, opened
from hsx_host.model_facts import longest_prompt, read_model, server_flag
from hsx_host.norm import keep_norm
from hsx_host.progress import log

HELP = "the probe matrix against the live extraction server"

# A sample alone and in a batch takes kernels of other shapes, so that results differ by bf16 rounding: 0.001 to 0.01
# a row on dense models (relative to the row's norm); a router's near tie in a mixture of experts moves single rows by
# more. A row of another place or request is off by about 1, which even as one of 64 rows lifts the root mean square to
# 0.12.
SAME_ROWS = 0.1
_TOGETHER = 8
_SHARED = 40


def add_arguments(parser: ArgumentParser) -> None:
    pass


def run(spec: RunSpec, args: Namespace) -> ProbeReport:
    """The whole matrix; Refused names the failed cases with their numbers."""
    dataset, meaning = opened(spec)
    lock = state.locked(dataset / "probe.lock", wait_s=0, what="a probe of this data set")
    with lock, borrow.extraction_server(spec):
        report = probe(spec, dataset, meaning, live_engine(spec))
    state.write_document(state.run_dir(spec) / "probe.json", report)
    failed = [case for case in report.cases if not case.ok]
    if failed:
        raise Refused(
            f"{len(failed)} of {len(report.cases)} probe cases failed: "
            + "; ".join(f"{case.name}: {case.text}" for case in failed),
            field="probe",
            value=failed[0].name,
            fix="look at the extraction server's flags and log; nothing was extracted",
        )
    return report


def probe(spec: RunSpec, dataset: Path, meaning: DatasetSemantics, engine: Engine) -> ProbeReport:
    """Run every case, also after one failed. TryAgain where the server died or the disk is full."""
    began = time.monotonic()
    folder = dataset / "tmp" / "probe"
    shutil.rmtree(folder, ignore_errors=True)
    norm_file = keep_norm(engine.spool, ready_norm_class(engine.spool), dataset)
    form = formats.primary(meaning.formats)
    shape = meaning.shape
    client = Client(engine, form, shape, folder, spec.data.request_timeout_s)
    matrix = _Matrix(
        client,
        form,
        shape,
        proof.NextToken(spec.model.path, norm_file, meaning.dtype, meaning.final),
        meaning.vocab_size,
    )
    try:
        for length in lengths(spec, dataset, engine):
            matrix.case(f"length {length}", length, lambda n=length: matrix.alone(n))  # type: ignore[misc]
        matrix.case("eight at once", 0, matrix.together)
        matrix.case("shared prefix", 0, matrix.shared_prefix)
        matrix.case("same prompt twice", 0, matrix.twice)
    except ServerGone as e:
        raise TryAgain(f"{e}", field="extraction", fix="read the server's log, then probe again") from None
    except NoSpace as e:
        raise TryAgain(f"no space: {e}", field="host.output_root", value=dataset, fix="make room") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return ProbeReport(all(c.ok for c in matrix.cases), matrix.cases, round(time.monotonic() - began, 3))


def lengths(spec: RunSpec, dataset: Path, engine: Engine) -> list[int]:
    """Prompt lengths of the matrix, ascending, within what the server takes: also the data set's longest."""
    most = longest_prompt(read_model(spec.model.path), spec.extraction)
    chunk = chunk_size(spec, engine)
    wanted = {1, 19} | ({chunk - 1, chunk, chunk + 1, 2 * chunk + 1} if chunk > 1 else set())
    plan = state.read_or_none(PlanResult, dataset / "plan.json")
    if plan is not None and plan.longest:
        wanted.add(plan.longest)
    return sorted(n for n in wanted if 1 <= n <= most)


def chunk_size(spec: RunSpec, engine: Engine) -> int:
    """The server's chunked prefill size in tokens, -1 where it is off: from its arguments, else as it says itself."""
    import requests

    given = server_flag(spec.extraction, "--chunked-prefill-size")
    if given is not None:
        return given
    try:
        answer = requests.get(f"{engine.url}/server_info", headers=engine.headers, timeout=30)
        return int(answer.json()["chunked_prefill_size"])
    except (requests.RequestException, ValueError, KeyError, TypeError) as e:
        raise TryAgain(
            f"the server does not say its chunk size: {e}",
            field="extraction.flags.chunked-prefill-size",
            fix="set it in the profile",
        ) from None


class _Failed(Exception):
    """A case failed, with numbers."""


class _Matrix:
    def __init__(self, client: Client, form: Any, shape: formats.Shape, prover: proof.NextToken, vocab: int) -> None:
        self._client, self._form, self._shape, self._prover, self._vocab = client, form, shape, prover, vocab
        self._prompts = 0
        self.cases: list[ProbeCase] = []

    def case(self, name: str, tokens: int, body: Callable[[], tuple[int, str]]) -> None:
        """Run one case and keep its verdict."""
        try:
            sent, text = body()
            case = ProbeCase(name, sent, True, text)
        except (SampleFault, _Failed, ValueError) as e:  # ValueError: the file is not what its trainer loads
            case = ProbeCase(name, tokens, False, str(e))
        self.cases.append(case)
        log(f"probe {name}: {'ok' if case.ok else 'FAILED'}: {case.text}")

    def alone(self, length: int) -> tuple[int, str]:
        _, text = self._ask(self._prompt(length))
        return length, text

    def together(self) -> tuple[int, str]:
        """Eight prompts of different lengths at once, then each alone."""
        prompts = [self._prompt(24 + 5 * i) for i in range(_TOGETHER)]
        with ThreadPoolExecutor(_TOGETHER) as pool:
            at_once = [f.result()[0] for f in [pool.submit(self._ask, p) for p in prompts]]
        worst = 0.0
        for i, (prompt, planes) in enumerate(zip(prompts, at_once, strict=True)):
            solo, _ = self._ask(prompt)
            worst = max(worst, self._same(planes, solo, f"prompt {i} of {len(prompt.ids)} tokens, at once and alone"))
        sent = sum(len(p.ids) for p in prompts)
        return sent, f"{_TOGETHER} prompts, {sent} sent, {sent} dumped, 0 cached; off by {worst:.4f} at most from alone"

    def shared_prefix(self) -> tuple[int, str]:
        """Two prompts with the same beginning, one after the other, then at once."""
        prefix = self._prompt(_SHARED).ids
        pair = [_sample(np.concatenate([prefix, self._prompt(16).ids])) for _ in range(2)]
        solo = [self._ask(p)[0] for p in pair]
        worst = self._same([t[:_SHARED] for t in solo[1]], [t[:_SHARED] for t in solo[0]], "the shared rows of both")
        with ThreadPoolExecutor(2) as pool:
            both = [f.result()[0] for f in [pool.submit(self._ask, p) for p in pair]]
        for i in range(2):
            worst = max(worst, self._same(both[i], solo[i], f"prompt {i}, at once and alone"))
        sent = sum(len(p.ids) for p in pair)
        return sent, f"{_SHARED} shared, {sent} sent, {sent} dumped, 0 cached; off by {worst:.4f} at most"

    def twice(self) -> tuple[int, str]:
        prompt = self._prompt(64)
        first, _ = self._ask(prompt)
        second, _ = self._ask(prompt)
        off = self._same(second, first, "the second time and the first")
        return 128, f"64 sent, 64 dumped, 0 cached, twice; off by {off:.4f}"

    def _ask(self, prompt: Sample) -> tuple[list[Any], str]:
        """One capture with every check; its planes, read into memory."""
        captured: Captured = self._client.capture(prompt)
        try:
            body = self._form.load(captured.path, self._shape)
            if not np.array_equal(body["input_ids"].numpy(), prompt.ids):
                raise _Failed(f"{captured.text}: the file holds other ids than were sent")
            planes = [t.clone() for t in body["planes"]]
            if not all(bool(t.isfinite().all()) for t in planes):
                raise _Failed(f"{captured.text}: not finite")
            verdict = self._prover.prove(planes[-1][-1], captured.next_token)
        finally:
            captured.path.unlink(missing_ok=True)
        if not verdict.ok:
            raise _Failed(f"{captured.text}, {len(planes)} planes: {verdict.text}")
        return planes, f"{captured.text}, {len(planes)} planes, {verdict.text}"

    def _same(self, planes: list[Any], others: list[Any], what: str) -> float:
        """The largest difference of a plane (see ``difference``); fails beyond SAME_ROWS."""
        worst = 0.0
        for name, a, b in zip(self._shape.planes, planes, others, strict=True):
            off = difference(a, b)
            if not off <= SAME_ROWS:
                raise _Failed(f"{what}: {name} is off by {off:.3f}, {SAME_ROWS} is allowed")
            worst = max(worst, off)
        return worst

    def _prompt(self, length: int) -> Sample:
        """A prompt of random ids from the middle of the vocabulary (special tokens stand at its ends).

        Each begins with another id, so that only the prompts that are meant to share a beginning do.
        """
        self._prompts += 1
        rng = random.Random(self._prompts)
        low, high = min(100, self._vocab // 10), self._vocab * 9 // 10
        ids = [rng.randrange(low, high) for _ in range(length)]
        ids[0] = low + self._prompts % (high - low)
        return _sample(np.array(ids, np.int32))


def difference(a: Any, b: Any) -> float:
    """Root mean square over rows of ||a_r - b_r|| / ||b_r||, of two [n, H]: rows weigh the same, however large."""
    a, b = a.float(), b.float()
    rows = (a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-30)
    return float(rows.pow(2).mean().sqrt())


def _sample(ids: Any) -> Sample:
    mask = np.ones(len(ids), np.uint8)
    return Sample(0, ids, mask, identity(ids, mask))
