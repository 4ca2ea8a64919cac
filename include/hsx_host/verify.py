"""Check published files against the manifest, and the next token of a seeded subset.

Every file: existence, size, header, and that the header's checksums are the manifest's. Every sample of the
plan is published, or stands in the failures. Nothing else lies in the format's folder, since its reader would train
on it. ``--deep`` also reads every byte against its checksum. Faults that no checksum sees are named: token ids that are
shifted or not the data file's, a final hidden state on the wrong side of the norm, and, with ``--reference``, layers
that are off by one or in another order, and rows that are shifted or shuffled.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from hsx_host import converted, diagnose, formats, proof, sides, state
from hsx_host.contract import PlanResult, RunSpec, VerifyReport
from hsx_host.errors import BadInput, Refused, TryAgain
from hsx_host.fingerprint import DatasetSemantics, opened
from hsx_host.manifest import (
    CUT,
    DAMAGED,
    Published,
    damaged_path,
    failures,
    is_second_manifest,
    judged,
    note_damaged,
    published_lines,
)
from hsx_host.progress import log
from hsx_host.shards import ShardFiles, read_input, shard_ids

HELP = "published files against the manifest, and the next-token proof"

_NAMED = 20
_MISSING, _FAILED, _NONE = "missing rows", "failed rows", "no sample is published"
_BY_VERB = ("writes it again", "removes it")  # how problems end that a verb mends by itself
WINDOW_ENDED = "--window-ended"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--shard", type=int, action="append", metavar="N", help="only this shard; may be repeated")
    parser.add_argument(WINDOW_ENDED, action="store_true", help="samples may be missing, though none may have failed")
    parser.add_argument(
        "--reference", type=int, default=0, metavar="N",
        help="also run N short samples through transformers, and say which layer each plane holds (loads the model)",
    )  # fmt: skip
    parser.add_argument(
        "--captured", action="store_true", help="not what convert derived: it looks at that itself, and makes it anew"
    )
    parser.add_argument("--deep", action="store_true", help="also read every byte against its checksum")


def run(spec: RunSpec, args: Namespace) -> VerifyReport:
    """The report where all is well; Refused where files are wrong, TryAgain where samples are missing or failed."""
    if args.shard:
        spec = replace(spec, data=replace(spec.data, shards=sorted(set(args.shard))))
    dataset, meaning = opened(spec)
    reference = getattr(args, "reference", 0)
    found = census(spec, dataset)
    report = check(spec, dataset, meaning, deep=args.deep, found=found, partial=args.window_ended, reference=reference)
    besides = [] if args.shard else _sides(dataset, deep=args.deep)
    if not getattr(args, "captured", False):
        besides += _derived(spec, dataset, meaning, found, deep=args.deep)
    if besides:
        problems = [*list(dict.fromkeys(besides))[:_NAMED], *report.problems]
        report = replace(report, ok=False, problems=problems[:_NAMED])
    state.write_document(state.run_dir(spec) / "verify.json", report)
    insist(report, dataset)
    return report


def _sides(dataset: Path, *, deep: bool) -> list[str]:
    """Also what readers go by beside the samples, once it was handed off: before, ``handoff`` writes it anew."""
    from hsx_host import handoff  # it builds on this module

    handed = handoff.handed_off(dataset)
    return [] if handed is None else list(islice(sides.wrong(dataset, handed.formats, deep=deep), _NAMED))


def _derived(spec: RunSpec, dataset: Path, meaning: DatasetSemantics, found: Census, *, deep: bool) -> list[str]:
    """Also what ``convert`` has made of the samples in scope, once it has; what it finds wrong is noted for the next.

    What is still to be converted is no fault: samples of another extraction, and files that a killed ``convert`` left.
    """
    problems = []
    for name in formats.names():
        form = formats.get(name)
        folder = dataset / form.FOLDER
        if name in meaning.formats or not any((folder / x).exists() for x in (converted.MEANING, converted.SAMPLES)):
            continue
        verb = "convert" if name in spec.capture.formats else f"convert --format {name}"
        if converted.is_held(folder / converted.LOCK):
            log(f"{form.FOLDER} is not looked at: a conversion is at work there")
            continue
        try:
            one = converted.opened(folder)
        except (BadInput, Refused) as e:
            problems.append(f"{form.FOLDER}: {e.doc.message}: {verb} writes it again")
            continue
        verb += " --approximate" if one.approximate else ""  # else convert refuses to write such a folder again
        made = {row: x for row, x in one.lines.items() if converted.same_sample(found.published.get(row), x)}
        wrong = converted.wrong_files(one, made, deep=deep)
        converted.note(folder, made, wrong)
        if why := converted.norm_wrong(one):
            problems.append(f"{why}: {verb} writes it again")
        problems += [f"row {row}: {form.FOLDER}/{made[row].file}: {why}: {verb} writes it again"
                     for row, why in wrong.items()]  # fmt: skip
        if not spec.data.shards:
            kept = {x.file for x in one.lines.values()} | {form.file_name(row) for row in found.published}
            strays = converted.strays(folder, form, kept)
            problems += [f"{form.FOLDER}/{stray} is in no manifest: {verb} removes it" for stray in strays]
    return problems


def insist(report: VerifyReport, dataset: Path) -> None:
    """Raise what a report that is not ok means."""
    if report.ok:
        return
    wrong = [p for p in report.problems if not p.startswith((_MISSING, _FAILED, _NONE))]
    text = f"{report.samples} samples are published, {report.missing} are missing, {report.failed} failed"
    if not wrong:
        raise TryAgain(
            f"{text}: " + "; ".join(report.problems[:_NAMED]),
            field="manifest.jsonl",
            value=dataset,
            fix="extract these shards again: only what is missing is done",
        )
    fixes = []
    if not all(p.endswith(_BY_VERB) for p in wrong):
        fixes.append("extract their shards again: the damaged samples are redone; remove files that are in no manifest")
    if any(p.endswith(_BY_VERB) for p in wrong):
        fixes.append("call the verb that is named for what it writes again or removes")
    raise Refused(
        f"{text}, and files are wrong: " + "; ".join(report.problems[:_NAMED]),
        field="manifest.jsonl",
        value=dataset,
        fix="; ".join(fixes),
    )


@dataclass
class Census:
    """What stands in the manifests of the shards in scope, against the plan."""

    published: dict[int, Published] = field(default_factory=dict)
    listed: set[str] = field(default_factory=set)  # files that stand in a manifest, whether or not its line counts
    missing: list[int] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def census(spec: RunSpec, dataset: Path, *, whole: bool = False) -> Census:
    """Read every manifest in scope (``data.shards``, or all); no sample's file is opened.

    :param whole: also count what the other shards have published, and their wrong files; what they lack is not this
        run's to judge.
    """
    found = Census()
    for shard in shard_ids(dataset):
        in_scope = not spec.data.shards or shard in spec.data.shards
        if not in_scope and not whole:
            continue
        files = ShardFiles(dataset, shard)
        hashes = read_input(files).hashes()
        good, why, lines = judged(dataset, files.manifest, hashes)
        found.published |= good
        found.listed |= {line.file for line in lines.values()}
        if not in_scope:  # a trainer reads the whole folder, so a wrong file of any shard is no hand-off's
            wrong = {row: reason for row, reason in why.items() if reason.startswith((DAMAGED, CUT))}
            found.wrong += [f"row {row} {reason}" for row, reason in wrong.items()]
            continue
        found.wrong += [f"row {row} is published, but is not in the plan" for row in why if row not in hashes]
        failed = failures(files.failures)
        for row in hashes:
            if row in found.published:
                continue
            if row in failed:
                found.failed[row] = failed[row].reason
            else:
                found.missing.append(row)
                if row in why:
                    found.wrong.append(f"row {row} {why[row]}")
    return found


def check(
    spec: RunSpec,
    dataset: Path,
    meaning: DatasetSemantics,
    *,
    deep: bool,
    whole: bool = False,
    found: Census | None = None,
    partial: bool = False,
    reference: int = 0,
) -> VerifyReport:
    """Look at everything; problems of files first, then one line each for what is missing and what failed.

    :param found: the census, where the caller has read the manifests already.
    :param partial: missing samples are counted, and are no problem: the window ended before they were asked for.
    :param reference: this many samples are compared with the model in transformers.
    """
    found = found or census(spec, dataset, whole=whole)
    form = formats.primary(meaning.formats)
    problems = [*found.wrong, *_strays(spec, dataset, form, meaning, found), *_lost_shards(spec, dataset, found)]
    lines = [found.published[row] for row in sorted(found.published)]
    damaged = converted.files_wrong(dataset, lines, form, meaning.shape, deep=deep, what="verify")
    problems += [f"row {row}: {found.published[row].file}: {why}" for row, why in damaged.items()]
    _remember(dataset, meaning, found, damaged)  # what follows may stop at a damaged norm
    chosen = proof.seeded(lines, spec.data.proof_samples, meaning.dataset_id)
    _, unproved = proof.prove_published(spec.model.path, dataset, meaning, chosen)
    problems += [f"row {row}: {why}" for row, why in unproved.items()]
    sound = {row: line for row, line in found.published.items() if row not in damaged}
    whole_set, by_row = _diagnosed(spec, dataset, meaning, sound, [c for c in chosen if c.index in sound], reference)
    problems += [*whole_set, *(f"row {row}: {why}" for row, why in by_row.items())]
    _remember(dataset, meaning, found, {row: why for row, why in (unproved | by_row).items() if row in sound})
    named = problems[: _NAMED - 2]
    if len(problems) > len(named):
        named[-1] = f"{named[-1]} (and {len(problems) - len(named)} more)"
    if found.missing and not partial:
        named.append(f"{_MISSING}: {_some(found.missing)}")
    if found.failed:
        first = next(iter(found.failed))
        named.append(f"{_FAILED}: {_some(sorted(found.failed))} (row {first}: {found.failed[first]})")
    if not lines and not (partial and found.missing):
        named.append(_NONE)
    return VerifyReport(
        ok=not named,
        samples=len(lines),
        tokens=sum(line.tokens for line in sound.values()),
        bytes=sum(line.bytes for line in sound.values()),
        missing=len(found.missing),
        failed=len(found.failed),
        proved=len(chosen) - len(unproved),
        problems=named,
    )


def _diagnosed(
    spec: RunSpec,
    dataset: Path,
    meaning: DatasetSemantics,
    sound: dict[int, Published],
    chosen: list[Published],
    reference: int,
) -> tuple[list[str], dict[int, str]]:
    """Faults that checksums can't see: of the data set as a whole, and by row."""
    one = converted.Collection(
        dataset, formats.primary(meaning.formats), meaning.shape, meaning, False,
        dataset / proof.NORM_FILE, sound,
    )  # fmt: skip
    by_row: dict[int, str] = {}
    for shard in sorted({row // meaning.shard_size for row in sound}):
        by_row |= diagnose.ids(one, read_input(ShardFiles(dataset, shard)))
    whole = [why for why in [diagnose.norm(one, chosen) if chosen else ""] if why]
    if reference:
        trust = "--trust-remote-code" in spec.extraction.args
        by_row |= diagnose.against_reference(one, reference, trust_remote_code=trust)
    return whole, by_row


def _remember(dataset: Path, meaning: DatasetSemantics, found: Census, damaged: dict[int, str]) -> None:
    """Damaged samples leave the manifest when their shard is extracted the next time."""
    for shard in sorted({row // meaning.shard_size for row in damaged}):
        rows = [row for row in damaged if row // meaning.shard_size == shard]
        noted = damaged_path(ShardFiles(dataset, shard).manifest)
        note_damaged(noted, [(found.published[row], damaged[row]) for row in rows])


def _strays(
    spec: RunSpec, dataset: Path, form: formats.Format, meaning: DatasetSemantics, found: Census
) -> Iterator[str]:
    """Files in the format's folder that no manifest names. Rows of shards out of scope belong to other runs."""
    for shard in shard_ids(dataset):
        if spec.data.shards and shard not in spec.data.shards:
            continue
        manifest = ShardFiles(dataset, shard).manifest
        beside = [p for p in sorted(manifest.parent.iterdir()) if is_second_manifest(p) and p != damaged_path(manifest)]
        if beside and _is_busy(dataset, shard):  # it renames its documents into place
            continue
        for path in beside:
            yield f"{path.relative_to(dataset)} stands beside the manifest"
    folder, prefix = dataset / form.FOLDER, f"{form.FOLDER}/"
    kept = {name.removeprefix(prefix) for name in found.listed}
    if spec.data.shards:
        for shard in shard_ids(dataset):
            if shard not in spec.data.shards:
                first = shard * meaning.shard_size
                kept |= {form.file_name(row) for row in range(first, first + meaning.shard_size)}
    strays = list(converted.strays(folder, form, kept))
    if strays:
        kept = {name.removeprefix(prefix) for name in _since(dataset, form, meaning)}
    for name in strays:
        if name not in kept:
            yield f"{prefix}{name} is in no manifest"


def _since(dataset: Path, form: formats.Format, meaning: DatasetSemantics) -> set[str]:
    """Files that an extraction at work has published since the census, or may have renamed a moment before their line.

    The lock is looked at first: an extraction that has ended since has written all of its lines.
    """
    known: set[str] = set()
    for shard in shard_ids(dataset):
        if _is_busy(dataset, shard):
            first = shard * meaning.shard_size
            known |= {f"{form.FOLDER}/{form.file_name(row)}" for row in range(first, first + meaning.shard_size)}
        known |= {line.file for line in published_lines(ShardFiles(dataset, shard).manifest).values()}
    return known


def _is_busy(dataset: Path, shard: int) -> bool:
    """Whether a shard is being extracted, or its samples moved."""
    return converted.is_held(ShardFiles(dataset, shard).lock)


def _lost_shards(spec: RunSpec, dataset: Path, found: Census) -> Iterator[str]:
    """The plan knows how many samples there are: a shard whose folder is gone is no smaller data set."""
    plan = state.read_or_none(PlanResult, dataset / "plan.json")
    known = len(found.published) + len(found.missing) + len(found.failed)
    if plan is not None and not spec.data.shards and known < plan.valid:
        yield f"the plan has {plan.valid} samples, the shards' folders hold {known}: plan again"


def _some(rows: list[int]) -> str:
    return ", ".join(map(str, rows[:10])) + (f" and {len(rows) - 10} more" if len(rows) > 10 else "")
