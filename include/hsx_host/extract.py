"""Extract one shard: every sample of the plan that is not published yet, several in flight, longest first.

A sample is published by fsync, rename and a synced line in the manifest, in that order, so that a crash
at any moment loses at most what was in flight. What fails is tried again, then stands in ``failures.jsonl``
with its reason, and the verb ends with 75: another call does only what is missing. A dead server or a full disk
ends the verb at once and costs no sample its tries; what was in flight at a death is asked for alone the next time,
so that a sample that kills the server is found (see ``suspects``).
"""

from __future__ import annotations

import contextlib
import shutil
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

from hsx_host import borrow, formats, norm, pace, proof, serve, state, suspects
from hsx_host.client import Client, NoSpace, ServerGone, live_engine, ready_norm_class
from hsx_host.contract import PlanResult, RunSpec, ShardSummary
from hsx_host.crew import Crew, failed_line
from hsx_host.errors import BadInput, Refused, TryAgain
from hsx_host.fingerprint import DatasetSemantics, opened
from hsx_host.layouts import faults
from hsx_host.manifest import (
    Failed,
    Ledger,
    Published,
    failures,
    judged,
    remove_leftovers,
    remove_second_manifests,
    resume,
    rewrite,
    settle_failures,
)
from hsx_host.progress import log
from hsx_host.shards import ShardFiles, ShardInput, read_input, row_numbers, shard_name

HELP = "extract one shard: resumable, concurrent, self-checking"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--shard", type=int, required=True, metavar="N", help="the shard's number, from plan")
    parser.add_argument(
        "--stop-after",
        type=float,
        default=0.0,
        metavar="T",
        help="unix seconds: ask for no further sample from then on; what is left is no failure",
    )


def run(spec: RunSpec, args: Namespace) -> ShardSummary:
    """Extract a shard; TryAgain names what is missing and why, Refused a failed proof."""
    dataset, meaning = opened(spec)
    files = ShardFiles(dataset, args.shard)
    if not files.folder.is_dir():
        raise BadInput(
            "the plan has no such shard", field="--shard", value=args.shard, fix="see plan.json of the data set"
        )
    with state.locked(files.lock, wait_s=0, what=f"shard {args.shard:05d}"):
        return _Shard(spec, dataset, meaning, files, args.stop_after).extract()


class _Shard:
    def __init__(
        self, spec: RunSpec, dataset: Path, meaning: DatasetSemantics, files: ShardFiles, stop_after: float
    ) -> None:
        self._spec, self._dataset, self._meaning, self._files = spec, dataset, meaning, files
        self._form = formats.primary(meaning.formats)
        self._shape = meaning.shape
        self._folder = dataset / self._form.FOLDER
        self._input: ShardInput = read_input(files)
        first, size = files.id * meaning.shard_size, meaning.shard_size
        self._names = {row: self._form.file_name(row) for row in range(first, first + size)}
        self._published: dict[int, Published] = {}
        self._failed: dict[int, Failed] = {}
        self._suspects: dict[int, suspects.Suspect] = {}
        self._began = 0.0
        self._tokens = self._bytes = 0
        self._stop_after, self._left = stop_after, 0  # left: samples that the end of the window left unasked

    def extract(self) -> ShardSummary:
        began = time.monotonic()
        self._began = time.time()
        if self._window_ended():
            return self._untouched()
        todo = self._resume()
        asked = self._without_guilty(todo)
        if asked or self._norm_damaged():
            try:
                with borrow.extraction_server(self._spec):
                    self._extract(asked)
            finally:
                shutil.rmtree(self._files.tmp, ignore_errors=True)
            self._keep_failures()
        summary = self._summary(len(todo), time.monotonic() - began)
        self._verdict(summary)
        return summary

    def _norm_damaged(self) -> bool:
        """Whether the server is needed for the norm alone."""
        why = norm.damage(self._dataset / norm.NORM_FILE) if self._published else ""
        if why:
            log(f"the final norm {why}: it is taken from the server again")
        return bool(why)

    def _keep_failures(self) -> None:
        """What failed before and was not asked for in this window is a failure still, and no sample just left over."""
        known = settle_failures(self._files.failures, self._input.hashes(), self._published)
        older = {row: line for row, line in known.items() if row not in self._failed}
        self._failed |= older
        self._left -= len(older)

    def _window_ended(self) -> bool:
        return bool(self._stop_after) and time.time() >= self._stop_after

    def _untouched(self) -> ShardSummary:
        """The shard as it stands: the window had ended before it was begun. Its failures keep their reasons."""
        log("the window has ended: nothing of this shard is asked for")
        hashes = self._input.hashes()
        self._published, _, _ = judged(self._dataset, self._files.manifest, hashes)
        known = failures(self._files.failures)
        self._failed = {row: line for row, line in known.items() if row in hashes and row not in self._published}
        missing = len(self._input) - len(self._published)
        self._left = missing - len(self._failed)
        summary = self._summary(missing, 0.0)
        self._verdict(summary)
        return summary

    def _resume(self) -> list[int]:
        """Bring manifest and folder into agreement; what is left to do, longest first."""
        self._folder.mkdir(parents=True, exist_ok=True)
        hashes = self._input.hashes()
        self._published = resume(self._dataset, self._files.manifest, hashes, log)
        shutil.rmtree(self._files.tmp, ignore_errors=True)
        gone = remove_leftovers(self._folder, self._dataset, self._names, self._published)
        gone += [*remove_second_manifests(self._files.manifest), *self._strangers()]
        if gone:
            log(f"removed {len(gone)} files that are not in the manifest: {', '.join(gone[:5])}")
        todo = [i for i, row in enumerate(self._input.rows.tolist()) if row not in self._published]
        settle_failures(self._files.failures, hashes, self._published)  # the others count until their next verdict
        lengths = self._input.offsets[1:] - self._input.offsets[:-1]
        return sorted(todo, key=lambda i: -int(lengths[i]))

    def _strangers(self) -> list[str]:
        """Remove files that would be trained on and belong to no row of the data set (another run's leftovers)."""
        ending = Path(self._form.file_name(0)).suffix
        there = [p for p in self._folder.rglob("*") if p.suffix in (ending, ".tmp", ".part") and p.is_file()]
        # asked last: a plan may make a shard and its files meanwhile
        rows = row_numbers(self._dataset, self._meaning.shard_size)
        known = {self._folder / self._form.file_name(row) for row in rows}
        parents = {path.parent for path in known}
        strangers = [path for path in there if path not in known and path.parent in parents]
        for path in strangers:
            path.unlink()
        return [str(path.relative_to(self._folder)) for path in strangers]

    def _without_guilty(self, todo: list[int]) -> list[int]:
        """Samples known to kill the server go to the ledger unasked."""
        known = suspects.read(self._files.suspects, self._input.hashes())
        self._suspects = {row: s for row, s in known.items() if row not in self._published}
        guilty = {row for row, s in self._suspects.items() if s.guilty(self._spec.run_id)}
        ledger: Ledger[Failed] = Ledger(self._files.failures)
        for i in todo:
            if self._row(i) in guilty:
                suspect = self._suspects[self._row(i)]
                line = failed_line(self._input.sample(i), suspect.reason, suspect.deaths)
                ledger.append(line)
                self._failed[line.index] = line
        ledger.close()
        return [i for i in todo if self._row(i) not in guilty]

    def _row(self, i: int) -> int:
        return int(self._input.rows[i])

    def _extract(self, todo: list[int]) -> None:
        engine = live_engine(self._spec)
        norm.keep_norm(engine.spool, ready_norm_class(engine.spool), self._dataset)
        data = self._spec.data
        client = Client(engine, self._form, self._shape, self._files.tmp, data.request_timeout_s, data.concurrency)
        crew = Crew(
            client, self._form, self._files, self._input, tries=data.tries, left=len(todo), enough=self._window_ended
        )
        alone = [i for i in todo if self._row(i) in self._suspects]
        began = time.time()
        try:
            if alone:
                log(f"{len(alone)} samples were in flight when the server died: each is asked for alone first")
                crew.run(alone, 1)
            crew.run([i for i in todo if self._row(i) not in self._suspects], data.concurrency)
            if not crew.left:  # else some suspects may not have been asked for yet
                guilty = [s for s in self._suspects.values() if s.guilty(self._spec.run_id)]
                suspects.write(self._files.suspects, guilty)
        except Exception as e:
            if isinstance(e, ServerGone):
                self._died(crew, str(e))
            elif _is_full(e):
                self._no_space(crew, str(e))
            self._published |= crew.published
            raise self._translated(e, crew.left) from None
        finally:
            crew.close()
            if crew.tokens:
                pace.keep(self._spec, crew.tokens, began, time.time())
        self._published |= crew.published
        self._failed |= crew.failed
        self._tokens, self._left = crew.tokens, crew.left
        self._bytes = sum(line.bytes for line in crew.published.values())

    def _died(self, crew: Crew, why: str) -> None:
        """Remember what was in flight when the server died; what was alone again goes to the ledger."""
        rows = [(self._row(i), self._input.hash[i].tobytes()) for i in sorted(crew.flying)]
        self._suspects = suspects.died(self._suspects, rows, self._spec.run_id, why)
        done = self._published.keys() | crew.published.keys()
        suspects.write(self._files.suspects, [s for row, s in self._suspects.items() if row not in done])
        for i in crew.flying:
            suspect = self._suspects[self._row(i)]
            if suspect.guilty(self._spec.run_id):
                crew.fail(i, suspect.reason, suspect.deaths)

    def _no_space(self, crew: Crew, why: str) -> None:
        """What was in flight was tried for nothing, and says so in the ledger, where that finds room."""
        with contextlib.suppress(OSError):
            for i in sorted(crew.flying):
                crew.fail(i, f"no space: {why}", 1)

    def _translated(self, error: Exception, count: int) -> Exception:
        left = f"{count} samples of shard {self._files.id:05d} are left"
        if isinstance(error, ServerGone):
            return TryAgain(
                f"{error}; {left}",
                field="extraction",
                value=self._spec.extraction.port,
                fix="read the server's log; run this shard again, it does only what is missing",
            )
        if _is_full(error):
            needed = sum(
                self._form.file_bytes(n, self._shape)
                for row, n in self._input.lengths().items()
                if row not in self._published
            )
            return TryAgain(
                f"no space: {error}; {left}, which need {needed} bytes",
                field="host.output_root",
                value=self._dataset,
                fix="make room, then run this shard again: it does only what is missing",
            )
        return error

    def _summary(self, todo: int, seconds: float) -> ShardSummary:
        lines = list(self._published.values())
        seed = f"{self._meaning.dataset_id} {self._files.id}"
        chosen = proof.seeded(lines, self._spec.data.proof_samples, seed)
        text, problems = proof.prove_published(self._spec.model.path, self._dataset, self._meaning, chosen)
        if problems:
            self._unpublish(problems)
            named = [f"row {row}: {why}" for row, why in problems.items()]
            raise Refused(
                f"the next-token proof failed in shard {self._files.id:05d} ({text}): " + "; ".join(named[:5]),
                field="shard",
                value=self._files.id,
                fix="what this step extracted counts no longer: run probe, look at the capture plugin, extract again",
            )
        plan = state.read_or_none(PlanResult, self._dataset / "plan.json")
        rows = max(plan.rows if plan else 0, int(self._input.rows.max(initial=-1)) + 1)
        return ShardSummary(
            shard=self._files.id,
            name=shard_name(self._files.id, self._meaning.shard_size, rows),
            samples=len(self._input),
            published=len(lines),
            extracted=todo - len(self._failed) - self._left,
            failed=len(self._failed),
            tokens=sum(line.tokens for line in lines),
            bytes=sum(line.bytes for line in lines),
            seconds=round(seconds, 3),
            tok_s=round(self._tokens / seconds, 1) if seconds > 0 else 0.0,
            proof=text,
            left=self._left,
            new_tokens=self._tokens,
            new_bytes=self._bytes,
            server=serve.recorded_facts(self._spec),
            failures=[f"row {f.index} after {f.tries} tries: {f.reason}" for f in list(self._failed.values())[:20]],
        )

    def _unpublish(self, problems: dict[int, str]) -> None:
        """Take disproved samples, and all that this call made with them, out of the manifest: they are redone."""
        made = {row for row, line in self._published.items() if line.time >= self._began}
        rewrite(self._files.manifest, [v for row, v in self._published.items() if row not in made | set(problems)])
        ledger: Ledger[Failed] = Ledger(self._files.failures)
        for row, why in problems.items():
            line = self._published[row]
            ledger.append(Failed(row, line.tokens, line.ids_hash, f"next-token proof: {why}", 1, time.time()))
        ledger.close()

    def _verdict(self, summary: ShardSummary) -> None:
        missing = summary.samples - summary.published
        if missing and missing == summary.left:
            log(f"the window has ended: {missing} samples are left for the next run")
        elif missing:
            raise TryAgain(
                f"{missing} of {summary.samples} samples of shard {summary.shard:05d} are not published: "
                + "; ".join(summary.failures[:5]),
                field="failures.jsonl",
                value=self._files.failures,
                fix="run this shard again: it does only these",
                count=summary.failed,
            )


def _is_full(error: Exception) -> bool:
    """Whether the data set's file system, or the quota on it, is full."""
    return isinstance(error, NoSpace) or faults.is_full(error)
