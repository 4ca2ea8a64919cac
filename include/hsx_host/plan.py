"""Read and validate the data file, cut shards, size them, and leave out what is already published.

One streaming pass: memory holds one shard, and the manifests. Each shard's valid samples go to
``shards/<id>/input.safetensors`` of the data set, where ``extract`` finds them; the plan itself goes to ``plan.json``
of both. A row's number is its line number, rejects included; published samples that stand in another row now are given
its number. With ``--dry-run`` nothing is written below the output root.
"""

from __future__ import annotations

import itertools
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from hsx_host import converted, formats, handoff, pace, reuse, state, topup
from hsx_host.contract import PlanResult, RunSpec, ShardPlan, encode
from hsx_host.dataset import Reject, Sample, read_samples
from hsx_host.errors import BadInput, Refused
from hsx_host.fingerprint import DatasetSemantics, dataset_dir, semantics, settle
from hsx_host.manifest import Published, failures, judged, published_lines
from hsx_host.model_facts import ModelFacts, longest_prompt, read_model
from hsx_host.progress import log
from hsx_host.shards import FIRST_TOP_UP, ShardFiles, pack, shard_ids, shard_name, write_input

HELP = "validate the data set, cut shards, size them, leave out what is already extracted"

_NAMED_REJECTS = 20
_NAMED_FAILURES = 3
_NOT_READ_ON = 1000  # this many rejects beyond the limit: the file is of another kind, and reading on tells nothing new


@dataclass(frozen=True)
class RejectedRow:
    """One line of ``rejects.jsonl``: ``line`` counts from 1 as editors do, ``row`` from 0 as hsx does."""

    row: int
    line: int
    reason: str


@dataclass
class _Counts:
    rows: int = 0
    valid: int = 0
    done: int = 0
    duplicates: int = 0
    longest: int = 0
    top_ups: int = 0
    replaced: list[str] = field(default_factory=list)  # identities that rows to do had before
    rejects: list[Reject] = field(default_factory=list)
    seen: set[bytes] = field(default_factory=set)
    published: dict[bytes, Published] = field(default_factory=dict)  # by identity, in whatever row
    moves: dict[int, Published] = field(default_factory=dict)  # by new row
    standing: dict[int, Published] = field(default_factory=dict)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="write nothing below the output root")
    parser.add_argument("--failed", action="store_true", help="only shards with samples that failed")


def run(spec: RunSpec, args: Namespace) -> PlanResult:
    """The plan of a run. BadInput and Refused name the field; see the module for what is written."""
    facts = read_model(spec.model.path)
    meaning = semantics(spec, facts)
    folder = dataset_dir(spec, meaning)
    if args.failed:
        spec = replace(spec, data=replace(spec.data, shards=failing(folder)))
    with state.locked(state.folder(spec, "state") / f"plan-{meaning.dataset_id}.lock", wait_s=60, what="this plan"):
        settle(folder, meaning, write=False)
        # inputs take their names only once the whole file has passed
        with nullcontext() if args.dry_run else reuse.alone(folder, meaning.shard_size):
            counts, shards = _pass(spec, meaning, facts, folder, None if args.dry_run else reuse.draft(folder))
            _check(spec, counts, {s.id for s in shards})
            strange = _check_nothing_lost(spec, folder, counts, {s.id for s in shards})
            if args.failed and not spec.data.shards:
                shards = []
            result = _result(spec, meaning, folder, counts, shards)
            if not args.dry_run:
                _keep(folder, meaning, counts, result)
                _set_aside(folder, strange)
    state.write_document(state.run_dir(spec) / "plan.json", result)
    return result


def failing(folder: Path) -> list[int]:
    """The shards that have samples which were tried and are not published."""
    found = []
    for shard in shard_ids(folder):
        files = ShardFiles(folder, shard)
        published = published_lines(files.manifest, repair=True)
        if failures(files.failures).keys() - published.keys():
            found.append(shard)
    return found


def _pass(
    spec: RunSpec, meaning: DatasetSemantics, facts: ModelFacts, folder: Path, draft: Path | None
) -> tuple[_Counts, list[ShardPlan]]:
    """Stream the file once; inputs go to ``draft`` where one is given."""
    counts = _Counts(published=reuse.published(folder))
    shards: list[ShardPlan] = []
    shard: list[Sample] = []
    told = time.monotonic()
    for item in read_samples(
        spec.data.path,
        vocab_size=facts.vocab_size,
        longest=longest_prompt(facts, spec.extraction),
        model=spec.model.path,
        trust_remote_code="--trust-remote-code" in spec.extraction.args,
    ):
        if item.row and item.row % spec.data.shard_size == 0:
            shards.append(_close(spec, meaning, folder, len(shards), shard, counts, draft))
            shard = []
        counts.rows += 1
        if isinstance(item, Sample):
            shard.append(item)
            _count(counts, item)
        else:
            counts.rejects.append(item)
            if len(counts.rejects) == spec.data.max_rejects + _NOT_READ_ON:
                _too_many(spec, counts, more=True)
        if time.monotonic() - told > 5:
            told = time.monotonic()
            log(f"plan: {counts.rows} rows read, {len(counts.rejects)} rejected")
    shards.append(_close(spec, meaning, folder, len(shards), shard, counts, draft))
    return counts, [*shards, *_top_ups(spec, meaning, folder, counts, draft)]


def _top_ups(
    spec: RunSpec, meaning: DatasetSemantics, folder: Path, counts: _Counts, draft: Path | None
) -> Iterator[ShardPlan]:
    """The shards behind the data file's: what production has answered so far."""
    by_shard = itertools.groupby(topup.Ledger(folder).kept(meaning.shard_size), lambda s: s.row // meaning.shard_size)
    for shard, samples in by_shard:
        members = list(samples)
        for sample in members:
            counts.top_ups += 1
            _count(counts, sample)
        yield _close(spec, meaning, folder, shard, members, counts, draft)


def _keep(folder: Path, meaning: DatasetSemantics, counts: _Counts, result: PlanResult) -> None:
    """Let everything that the pass made take effect; ``plan.json`` last."""
    settle(folder, meaning, write=True)
    reuse.take_effect(folder, formats.primary(meaning.formats), meaning.shard_size, counts.moves)
    state.write_whole(folder / "rejects.jsonl", _reject_lines(counts))
    state.write_document(folder / "plan.json", result)


def _set_aside(folder: Path, shards: list[int]) -> None:
    """Rename folders that are no shards of the plan (copies of others): each verb would take them for shards."""
    for files in (ShardFiles(folder, shard) for shard in shards):
        with state.locked(files.lock, wait_s=0, what=f"shard {files.id:05d}"):
            state.set_aside(files.folder)
        log(f"{files.folder} is no shard of the plan and has no sample of its own: it is set aside")


def _reject_lines(counts: _Counts) -> bytes:
    return "".join(encode(RejectedRow(r.row, r.row + 1, r.reason)) + "\n" for r in counts.rejects).encode()


def _count(counts: _Counts, sample: Sample) -> None:
    counts.valid += 1
    counts.longest = max(counts.longest, len(sample.ids))
    if sample.hash in counts.seen:
        counts.duplicates += 1
    counts.seen.add(sample.hash)


def _close(
    spec: RunSpec,
    meaning: DatasetSemantics,
    folder: Path,
    shard: int,
    samples: list[Sample],
    counts: _Counts,
    draft: Path | None,
) -> ShardPlan:
    """Size one shard that was read to its end, and write its input where the run has it to do."""
    first = shard * spec.data.shard_size
    size = len(samples) if shard >= FIRST_TOP_UP else counts.rows - first
    hashes = {s.row: s.hash for s in samples}
    good, _, lines = judged(folder, ShardFiles(folder, shard).manifest, hashes, repair=True)
    # a line of a row of another shard is that one's to have
    lost = sorted(row for row in lines if row not in hashes and row // spec.data.shard_size == shard)
    if lost:
        why = next((r.reason for r in counts.rejects if r.row == lost[0]), "the file ends before it")
        _lost(spec, f"row {lost[0]} is published, and the data file no longer has it: {why}")
    todo = []
    in_scope = not spec.data.shards or shard in spec.data.shards
    for s in samples:
        if s.row in good:
            counts.standing[s.row] = good[s.row]
            counts.done += in_scope
        elif s.hash in counts.published:  # out of scope too: its row may be another sample's now
            counts.moves[s.row] = counts.standing[s.row] = counts.published[s.hash]
            counts.done += in_scope
        elif in_scope:
            todo.append(s)
            if s.row in lines and lines[s.row].ids_hash != s.hash.hex():
                counts.replaced.append(lines[s.row].ids_hash)
    moves = any(row in counts.moves for row in hashes)
    if draft and (moves or (in_scope and (samples or ShardFiles(folder, shard).input.exists()))):
        write_input(draft / f"{shard:05d}.safetensors", pack(samples))
    known = failures(ShardFiles(folder, shard).failures)
    failed = [known[s.row] for s in todo if s.row in known and known[s.row].ids_hash == s.hash.hex()]
    shape = meaning.shape
    return ShardPlan(
        id=shard,
        name=shard_name(shard, spec.data.shard_size, first + size),
        first_row=first,
        rows=size,
        todo=len(todo),
        tokens=sum(len(s.ids) for s in todo),
        bytes=sum(f.file_bytes(len(s.ids), shape) for f in formats.of_run(spec.capture.formats) for s in todo),
        failed=len(failed),
        reasons=[f"row {f.index} after {f.tries} tries: {f.reason}" for f in failed[:_NAMED_FAILURES]],
    )


def _check(spec: RunSpec, counts: _Counts, shards: set[int]) -> None:
    unknown = sorted(s for s in spec.data.shards if s not in shards)
    if unknown:
        raise BadInput(
            f"shard {unknown[0]} does not exist: {counts.rows} rows make shards 0 to "
            f"{max(s for s in shards if s < FIRST_TOP_UP)}",
            field="data.shards",
            value=spec.data.shards,
            fix="name shards that exist, or none for all",
        )
    if len(counts.rejects) > spec.data.max_rejects:
        _too_many(spec, counts)
    if not counts.valid:
        raise BadInput(
            f"no valid sample in {counts.rows} rows: {_first(counts)}",
            field="data.path",
            value=spec.data.path,
            fix="repair the file",
        )


def _check_nothing_lost(spec: RunSpec, folder: Path, counts: _Counts, planned: set[int]) -> list[int]:
    """Refused where rows would be lost. Shards that have a folder, no row of the plan and no sample of their own."""
    before = state.read_or_none(PlanResult, folder / "plan.json")  # written anew anyway
    if before and before.rows > counts.rows:
        _lost(spec, f"the data set was made of {before.rows} rows, and the file now has {counts.rows}")
    strange = []
    for shard in (s for s in shard_ids(folder) if s not in planned):
        lines = published_lines(ShardFiles(folder, shard).manifest, repair=True)
        own = sorted(row for row in lines if row // spec.data.shard_size == shard)
        if not own:
            strange.append(shard)
        elif shard < FIRST_TOP_UP:  # what lies behind may be of a top-up that was removed to make it anew
            _lost(spec, f"row {own[0]} is published, and the data file no longer has it: the file ends before it")
    return strange


def _lost(spec: RunSpec, what: str) -> NoReturn:
    raise Refused(
        f"{what} (rows would be lost)",
        field="data.path",
        value=spec.data.path,
        fix="give the rows back, or give the data set another data.name",
    )


def _too_many(spec: RunSpec, counts: _Counts, more: bool = False) -> NoReturn:
    listed = state.run_dir(spec) / "rejects.jsonl"
    state.write_whole(listed, _reject_lines(counts))
    count = f"{len(counts.rejects)}{' or more' if more else ''} of {counts.rows}{' read so far' if more else ''}"
    raise BadInput(
        f"{count} rows are rejected, at most {spec.data.max_rejects} may be: {_first(counts)}",
        field="data.max_rejects",
        value=spec.data.max_rejects,
        fix=f"repair these rows ({listed} lists them all), or raise the limit",
    )


def _first(counts: _Counts) -> str:
    return "; ".join(f"row {r.row}: {r.reason}" for r in counts.rejects[:5])


def _underived(spec: RunSpec, meaning: DatasetSemantics, folder: Path, counts: _Counts) -> tuple[int, int]:
    """Published samples that a derived format of the run does not have yet, and the bytes that they take there."""
    samples = size = 0
    shape = meaning.shape
    for form in formats.of_run(spec.capture.formats)[1:]:
        have = published_lines(folder / form.FOLDER / converted.SAMPLES, repair=True)  # convert makes the others
        missing = [line for row, line in counts.standing.items() if not converted.same_sample(have.get(row), line)]
        samples += len(missing)
        size += sum(form.file_bytes(line.tokens, shape) for line in missing)
    return samples, size


def _result(
    spec: RunSpec, meaning: DatasetSemantics, folder: Path, counts: _Counts, shards: list[ShardPlan]
) -> PlanResult:
    todo = [s for s in shards if s.todo]
    derive, derive_bytes = _underived(spec, meaning, folder, counts)
    return PlanResult(
        dataset_id=meaning.dataset_id,
        dataset_dir=str(folder),
        rows=counts.rows,
        valid=counts.valid,
        rejected=len(counts.rejects),
        duplicates=counts.duplicates,
        done=counts.done,
        todo=sum(s.todo for s in todo),
        todo_tokens=sum(s.tokens for s in todo),
        todo_bytes=sum(s.bytes for s in todo),
        bytes_per_token=meaning.bytes_per_token,
        longest=counts.longest,
        shards=todo,
        rejects=[f"row {r.row}: {r.reason}" for r in counts.rejects[:_NAMED_REJECTS]],
        pace=pace.measured(spec),
        top_ups=counts.top_ups,
        handed_off=handoff.is_current(folder),
        changed=sum(bytes.fromhex(known) not in counts.seen for known in counts.replaced),  # else it has moved
        moved=len(counts.moves),
        derive=derive,
        derive_bytes=derive_bytes,
    )
