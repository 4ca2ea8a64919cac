"""Write published samples in another trainer's format, or a part of them.

Without ``--format``: every format of the run but the one that the capture wrote, each into its own folder of the data
set. With ``--format`` and ``--out``: one format into any folder, of the data set or of a folder that ``convert`` made
before (``--source``). Samples that are there already are left, so that the verb can be stopped and called again; the
folder ends as exactly what was asked for.

The final hidden state follows the format's norm: before -> after is exact, through the kept norm (float32, rounded to
the data set's dtype); after -> before needs ``--approximate``, divides by the norm's weight, and is recorded.
"""

from __future__ import annotations

import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hsx_host import converted, fill, formats, norm, proof, state, verify
from hsx_host.contract import ConvertedFormat, ConvertResult, RunSpec
from hsx_host.converted import Collection, ConvertedSet
from hsx_host.errors import BadInput, Refused
from hsx_host.fingerprint import opened
from hsx_host.layouts import faults
from hsx_host.manifest import Ledger, Published, published_lines, remove, rewrite
from hsx_host.norm import FinalNorm
from hsx_host.progress import Progress, log

HELP = "write a data set, or a part of it, in other trainers' formats"

_WRITERS = 4


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--format", default="", metavar="NAME", help=", ".join(formats.names()) + " (the run's others)")
    parser.add_argument("--out", default="", metavar="DIR", help="the new folder (the data set's own for the format)")
    parser.add_argument("--source", default="", metavar="DIR", help="a folder that convert made (the data set)")
    parser.add_argument("--shards", default="", metavar="N,N", help="only these shards")
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="at most this many samples")
    parser.add_argument("--min-tokens", type=int, default=0, metavar="N", help="only samples of N tokens or more")
    parser.add_argument("--max-tokens", type=int, default=0, metavar="N", help="only samples of N tokens or fewer")
    parser.add_argument("--approximate", action="store_true", help="allow after-norm -> before-norm, and record it")


def run(spec: RunSpec, args: Namespace) -> ConvertResult:
    """Convert what is published; BadInput where nothing is, or an argument does not fit."""
    for field in ("limit", "min_tokens", "max_tokens"):
        if getattr(args, field) < 0:
            raise BadInput(
                "is less than 0", field=f"--{field.replace('_', '-')}", value=getattr(args, field),
                fix="give a number of 1 or more, or leave it out for all",
            )  # fmt: skip
    part = bool(args.shards or args.limit or args.min_tokens or args.max_tokens)
    if (part or args.source) and not (args.format and args.out):
        raise BadInput(
            "a part, or another source, goes to a folder of its own", field="--out", value=args.out,
            fix="give --format NAME --out DIR",
        )  # fmt: skip
    source = converted.opened(Path(args.source)) if args.source else of_dataset(spec)
    wanted = [args.format] if args.format else spec.capture.formats[1:]
    lines = chosen(source, args)
    done = []
    for name in wanted:
        form = formats.get(name)
        out = Path(args.out) if args.out else source.base / form.FOLDER
        _check_place(source, form, out, own=not args.out)
        done.append(write(source, form, out, lines, approximate=args.approximate))
    return ConvertResult(formats=done)


def of_dataset(spec: RunSpec) -> Collection:
    """All that a data set has published, in the format that the capture wrote."""
    dataset, meaning = opened(spec)
    lines = verify.census(spec, dataset, whole=True).published
    form = formats.primary(meaning.formats)
    return Collection(dataset, form, meaning.shape, meaning, False, dataset / proof.NORM_FILE, lines)


def chosen(source: Collection, args: Namespace) -> list[Published]:
    """The lines that the arguments ask for, by row; BadInput where none is left."""
    shards = _shards(args.shards)
    lines = [source.lines[row] for row in sorted(source.lines)]
    if shards:
        lines = [line for line in lines if line.index // source.meaning.shard_size in shards]
    lines = [line for line in lines if line.tokens >= args.min_tokens]
    if args.max_tokens:
        lines = [line for line in lines if line.tokens <= args.max_tokens]
    lines = lines[: args.limit] if args.limit > 0 else lines
    if not lines:
        raise BadInput("no published sample to convert", field="--shards", value=args.shards, fix="extract first")
    return lines


def write(
    source: Collection, form: formats.Format, out: Path, lines: list[Published], *, approximate: bool
) -> ConvertedFormat:
    """Make ``out`` hold exactly ``lines`` in ``form``."""
    step = _norm_rule(source, form, approximate)
    meaning = replace(source.meaning, final=f"{form.NORM}_norm", formats=[form.NAME])
    rough = source.approximate or step == "undo"
    here = ConvertedSet(form.NAME, meaning.final, rough, str(source.base), source.meaning)
    out.mkdir(parents=True, exist_ok=True)
    with state.locked(out / converted.LOCK, wait_s=0, what=f"a conversion to {out}"):
        kept = _settle(out, here, source, own=out == source.base / form.FOLDER)
        noted = converted.noted(out, kept)
        todo = [x for x in lines if x.index in noted or not _done(out, x, kept.get(x.index), source, form)]
        needed = sum(form.file_bytes(line.tokens, source.shape) for line in todo)
        needed += form.side_bytes(len(lines), sum(line.tokens for line in lines))
        missing = {line.index for line in todo}
        made = {line.index: kept[line.index] for line in lines if line.index not in missing}
        ledger: Ledger[Published] = Ledger(out / converted.SAMPLES)
        lock = threading.Lock()
        rule = FinalNorm(source.norm_file, meaning.dtype) if step else None
        progress, written = Progress(f"convert {form.NAME}", len(lines)), [0, 0]

        def one(line: Published) -> None:
            if why := converted.file_wrong(source.base, line, source.form, source.shape, True):
                raise Refused(
                    f"row {line.index}: {line.file}: {why}", field="--source", value=source.base,
                    fix="make the sample again: verify --deep, then extract its shard (or convert to this folder)",
                )  # fmt: skip
            sample = source.form.load(source.base / line.file, source.shape)
            if rule is not None:
                final = rule.apply(sample["planes"][-1]) if step == "apply" else rule.undo(sample["planes"][-1])
                sample["planes"] = [*sample["planes"][:-1], final]
            name = form.file_name(line.index)
            if (out / name).is_dir():
                remove(out / name)
            size, crcs = fill.write_sample(form, out / name, sample, source.shape)
            with lock:
                made[line.index] = replace(line, file=name, bytes=size, crc32=crcs)
                ledger.append(made[line.index])
                written[0], written[1] = written[0] + line.tokens, written[1] + size
                progress.update(len(made), tokens=written[0], bytes=written[1])

        room = faults.room(out, needed, f"{len(todo)} samples of {form.NAME} and what its reader wants beside them")
        try:
            # reads, copies and checksums release the interpreter's lock
            with room, ThreadPoolExecutor(_WRITERS) as pool:
                futures = [pool.submit(one, line) for line in todo]
                try:
                    for future in futures:
                        future.result()
                except BaseException:
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise
        finally:
            ledger.close()
        rewrite(out / converted.SAMPLES, [made[row] for row in sorted(made)])
        (out / converted.DAMAGED).unlink(missing_ok=True)
        for stray in list(converted.strays(out, form, {line.file for line in made.values()})):
            (out / stray).unlink()
        form.side_files(out, rows(out, form, source.shape, made.values()), asdict(meaning) | {"approximate": rough})
    return ConvertedFormat(
        format=form.NAME,
        path=str(out),
        final=meaning.final,
        approximate=rough,
        samples=len(made),
        written=len(todo),
        tokens=sum(line.tokens for line in made.values()),
        bytes=sum(line.bytes for line in made.values()),
    )


def rows(base: Path, form: formats.Format, shape: formats.Shape, lines: Iterable[Published]) -> list[formats.Row]:
    """Published samples as side files want them; ids and mask are read from a file only where asked for."""

    def read(line: Published) -> tuple[Any, Any]:
        sample = form.load(base / line.file, shape)
        return sample["input_ids"].numpy(), sample["loss_mask"].numpy()

    ordered = sorted(lines, key=lambda line: line.index)
    return [formats.Row(line.index, line.tokens, lambda line=line: read(line)) for line in ordered]  # type: ignore[misc]


def _norm_rule(source: Collection, form: formats.Format, approximate: bool) -> str:
    """What becomes of the final hidden state: nothing, apply or undo the norm."""
    if source.final == f"{form.NORM}_norm":
        return ""
    if form.NORM == "after":
        return "apply"
    if not approximate:
        raise BadInput(
            f"{form.NAME} needs the final hidden state before the norm, the source holds it after the norm",
            field="--format",
            value=form.NAME,
            fix="convert from a before-norm format, or give --approximate: the norm's weight is divided out, "
            "bf16 rounding moves an element by 1.2 % at most",
        )
    return "undo"


def _settle(out: Path, here: ConvertedSet, source: Collection, *, own: bool) -> dict[int, Published]:
    """The folder's meaning written, its lines so far; BadInput where it holds something else. What a data set's own
    folder of a format holds, and no longer says what it is, is made anew."""
    lines, meaning = out / converted.SAMPLES, out / converted.MEANING
    known = (state.read_or_none if own else state.read_document)(ConvertedSet, meaning)
    if anew := own and (lines.exists() or meaning.exists()) and (known is None or known.format != here.format):
        known = None
        remove(lines)
    theirs = (
        p.name for p in out.iterdir() if p.name not in converted.OWN_FILES and not converted.is_unfinished(p.name)
    )
    if known is None and not anew and any(theirs):
        raise BadInput("the folder holds other files", field="--out", value=out, fix="give an empty or new folder")
    if known is not None and known != here:
        raise BadInput(
            f"the folder holds {known.format} ({known.final}{', approximate' if known.approximate else ''}) "
            f"made from {known.source}",
            field="--out",
            value=out,
            fix="give another folder, or remove this one",
        )
    converted.sweep(out)
    norm.copy(source.norm_file, out)
    if known is None:
        state.write_document(meaning, here)
    try:
        return published_lines(lines, repair=True)
    except Refused as e:  # a damaged line: all that the folder holds can be made of the source again
        log(f"{lines}: {e.doc.message}: every sample is written again")
        remove(lines)
        return {}


def _done(out: Path, line: Published, have: Published | None, source: Collection, form: formats.Format) -> bool:
    """Whether a sample was made of this very line, and its file is whole."""
    if have is None or not converted.same_sample(have, line):
        return False
    return have.file == form.file_name(line.index) and not converted.file_wrong(out, have, form, source.shape, False)


def _check_place(source: Collection, form: formats.Format, out: Path, *, own: bool) -> None:
    """Refuse a folder inside another format's: its reader would train on what comes to lie there."""
    place = out.resolve()
    for name in formats.names():
        theirs = (source.base / formats.get(name).FOLDER).resolve()
        if place.is_relative_to(theirs) and not (own and name == form.NAME and form.NAME != source.form.NAME):
            raise BadInput("lies in a folder of samples", field="--out", value=out, fix="give a folder of its own")
    if place == source.base.resolve():
        raise BadInput("is the source itself", field="--out", value=out, fix="give a folder of its own")


def _shards(text: str) -> set[int]:
    try:
        return {int(part) for part in text.split(",") if part.strip()}
    except ValueError:
        raise BadInput("not numbers with commas between", field="--shards", value=text, fix="e.g. 0,3,7") from None
