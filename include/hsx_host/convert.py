"""Write the published samples of a data set in another trainer's format.

Where that format wants the final hidden state after the norm, it is derived with the norm that was kept beside the
data set (float32, rounded to the data set's dtype). Files that are there already and not older than their source are
left: the verb can be stopped and called again. The hand-off's command lines name the formats.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path

from hsx_host import formats, proof, state, verify
from hsx_host.contract import ConvertResult, RunSpec
from hsx_host.errors import BadInput
from hsx_host.fingerprint import opened
from hsx_host.progress import Progress

HELP = "write a data set in another trainer's format"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--format", required=True, metavar="NAME", help="specforge")
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder of the new data set")
    parser.add_argument("--shards", default="", metavar="N,N", help="only these shards")
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="at most this many samples")


def run(spec: RunSpec, args: Namespace) -> ConvertResult:
    """Convert what is published; BadInput where nothing is, or an argument does not fit."""
    dataset, meaning = opened(spec)
    target = formats.derived(args.format)
    chosen = _shards(args.shards)
    out = Path(args.out)
    if out.resolve().is_relative_to((dataset / "v1").resolve()):
        raise BadInput("lies in a folder of samples", field="--out", value=out, fix="give a folder of its own")
    lines = sorted(verify.census(spec, dataset).published.values(), key=lambda line: line.index)
    if chosen:
        lines = [line for line in lines if line.index // meaning.shard_size in chosen]
    lines = lines[: args.limit] if args.limit > 0 else lines
    if not lines:
        raise BadInput("no published sample to convert", field="--shards", value=args.shards, fix="extract first")
    source = formats.direct(meaning.formats)
    shape = formats.Shape(meaning.planes, meaning.hidden_size, meaning.dtype)
    norm = proof.NextToken(spec.model.path, dataset / proof.NORM_FILE, meaning.dtype)
    progress = Progress("convert", len(lines))
    size = tokens = 0
    out.mkdir(parents=True, exist_ok=True)
    with state.locked(out / ".lock", wait_s=0, what=f"a conversion to {out}"):
        for done, line in enumerate(lines, start=1):
            path, from_ = out / target.file_name(line.index), dataset / line.file
            if not path.exists() or path.stat().st_mtime < from_.stat().st_mtime:
                sample = source.load(from_, shape)
                if target.NORM == "after" and source.NORM == "before":
                    sample["planes"] = [*sample["planes"][:-1], norm.normed(sample["planes"][-1])]
                target.write(path, sample, shape)
            size, tokens = size + path.stat().st_size, tokens + line.tokens
            progress.update(done, tokens=tokens, bytes=size)
        facts = asdict(meaning) | {"final": f"{target.NORM}_norm", "formats": [target.NAME]}
        target.side_files(out, {line.index: line.tokens for line in lines}, facts)
    return ConvertResult(format=target.NAME, path=str(out), samples=len(lines), bytes=size)


def _shards(text: str) -> set[int]:
    try:
        return {int(part) for part in text.split(",") if part.strip()}
    except ValueError:
        raise BadInput("not numbers with commas between", field="--shards", value=text, fix="e.g. 0,3,7") from None
