"""Write ``handoff.json``, the last file of a data set: what a trainer and a server need to use it rightly.

Refused where ``verify`` (without ``--deep``) is not content. Also writes the files that the format's reader
wants beside the samples.
"""

from __future__ import annotations

import hashlib
import shlex
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from hsx_host import convert, converted, drafter, formats, proof, sides, state, verify
from hsx_host.contract import ContractError, HandoffResult, RunSpec, decode
from hsx_host.errors import BadInput, Refused, TryAgain
from hsx_host.fingerprint import DatasetSemantics, opened
from hsx_host.manifest import Published, damaged_path
from hsx_host.shards import ShardFiles, shard_ids

_FINALS = {
    "before_norm": "before_norm: the residual stream behind the last block, before the final norm",
    "after_norm": "after_norm: the residual stream behind the last block, after the final norm",
}
HELP = "write handoff.json for the trainer and for serving"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        verify.WINDOW_ENDED, action="store_true", help="where samples are only missing: exit 75, the next run goes on"
    )


def run(spec: RunSpec, args: Namespace) -> HandoffResult:
    """The hand-off of all that is published; Refused where a shard of this run is not whole."""
    dataset, meaning = opened(spec)
    with state.locked(dataset / "handoff.lock", wait_s=60, what="a hand-off of this data set"):
        return _hand_off(spec, args, dataset, meaning)


def _hand_off(spec: RunSpec, args: Namespace, dataset: Path, meaning: DatasetSemantics) -> HandoffResult:
    found = verify.census(spec, dataset, whole=True)
    report = verify.check(spec, dataset, meaning, deep=False, whole=True, found=found)
    if args.window_ended and report.missing and not report.failed:
        raise TryAgain(
            f"{report.missing} samples are left for the next run, {report.samples} are published",
            field=verify.WINDOW_ENDED,
            value=dataset,
            fix="the hand-off follows when the data set is whole",
        )
    if not report.ok:
        raise Refused(
            f"the data set is not whole ({report.missing} missing, {report.failed} failed): "
            + "; ".join(report.problems),
            field="data.name",
            value=dataset,
            fix="extract the missing samples, then verify",
        )
    lines = found.published
    form = formats.primary(meaning.formats)
    folder = dataset / form.FOLDER
    converted.sweep(folder)
    form.side_files(folder, convert.rows(dataset, form, meaning.shape, lines.values()), asdict(meaning))
    folders = {form.NAME: str(folder)} | _derived(spec, dataset, lines)
    result = HandoffResult(
        path=str(dataset / "handoff.json"),
        profile=spec.profile,
        dataset_id=meaning.dataset_id,
        dataset_dir=str(dataset),
        samples=report.samples,
        tokens=report.tokens,
        bytes=report.bytes,
        formats=folders,
        layers=meaning.layers,
        final=_FINALS[meaning.final],
        layer_ids=layer_ids(meaning.layers, meaning.architecture),
        norm={"kind": "RMSNorm", "eps": repr(meaning.norm_eps), "file": str(dataset / proof.NORM_FILE)},
        model={
            "path": meaning.model_path,
            "revision": meaning.model_revision,
            "architecture": meaning.architecture,
            "config_sha256": meaning.model_config_sha256,
            "weights_sha256": meaning.model_weights_sha256,
        },
        engine={"name": meaning.engine, "version": meaning.engine_version},
        manifest_sha256=manifest_sha256(dataset),
        commands=commands(meaning, folders),
    )
    state.write_document(dataset / "handoff.json", result)
    return result


def _derived(spec: RunSpec, dataset: Path, lines: dict[int, Published]) -> dict[str, str]:
    """The run's other formats; Refused where one is not whole."""
    found = {}
    for form in formats.of_run(spec.capture.formats)[1:]:
        folder = dataset / form.FOLDER
        missing = converted.missing(folder, lines)
        wrong = [f"{len(missing)} samples are missing"] if missing else list(converted.problems(folder, deep=False))
        if wrong:
            raise Refused(
                f"the format {form.NAME} is not whole: " + "; ".join(wrong[:10]),
                field="capture.formats",
                value=folder,
                fix="run convert: it makes what is missing",
            )
        found[form.NAME] = str(folder)
    return found


def layer_ids(layers: list[int], architecture: str) -> dict[str, list[int]]:
    """The same auxiliary layers in each tool's numbers; the final hidden state is never among them.

    Some tools name the stream that enters block k, others the block k-1 that it comes out of. ``sglang_draft_config``
    is what the drafter's config.json must say for this target. Source: the tools' own code, at the versions named.
    """
    entering = (
        "hsx", "huggingface_hidden_states", "sglang_layers_to_capture", "sglang_deepseek_setter_since_25454", "vllm",
        "speculators_target_layer_ids",
    )  # fmt: skip
    leaving = (
        "sglang_llama_setter", "sglang_deepseek_setter_before_25454", "speculators_0.4_layer_ids", "specforge",
        "torchspec",
    )  # fmt: skip
    named = {name: list(layers) for name in entering} | {name: [k - 1 for k in layers] for name in leaving}
    with suppress(BadInput):  # no list leads there
        named["sglang_draft_config"] = drafter.sglang_layer_ids(architecture, layers)
    return named


def commands(meaning: DatasetSemantics, folders: dict[str, str]) -> dict[str, str]:
    """Command lines that begin training on this data set, one a trainer whose format it holds.

    ``--legacy-data`` is speculators' flag for v1 files, ``--no-norm-before-residual`` makes a drafter that SGLang
    serves. A format that is not there has the line that makes it.
    """
    ids, model = " ".join(map(str, meaning.layers)), shlex.quote(meaning.model_path)
    below = ",".join(str(k - 1) for k in meaning.layers)
    train = {
        "speculators_v1": (
            "speculators_0.7",
            "python scripts/train.py --speculator-type eagle3 --no-norm-before-residual "
            f"--verifier-name-or-path {model} --data-path {{data}} --legacy-data --target-layer-ids {ids}",
        ),
        "speculators": (
            "speculators_0.9",
            "python scripts/train.py --speculator-type eagle3 --no-norm-before-residual "
            f"--verifier-name-or-path {model} --data-path {{data}} --on-missing raise --target-layer-ids {ids}",
        ),
        "specforge": (
            "specforge_0.2",
            f"specforge train --config CONFIG model.target_model_path={model} data.hidden_states_path={{data}} "
            f"training.strategy=eagle3 'model.aux_hidden_state_layer_ids=[{below}]'",
        ),
        "modelopt": (
            "modelopt",
            f"accelerate launch examples/speculative_decoding/main.py --mode eagle3 --model_name_or_path {model} "
            "--offline-data-path {data} --output_dir DIR",
        ),
    }
    lines = {}
    for form, (name, line) in train.items():
        if form in folders:
            lines[name] = line.format(data=shlex.quote(folders[form]))
        else:
            lines[f"convert_{form}"] = f"python -m hsx_host convert --spec SPEC --format {form} --out DIR"
    return lines


def is_current(dataset: Path) -> bool:
    """Whether the hand-off that is there is of the manifests as they are now, and what readers go by is of them too."""
    found = handed_off(dataset)
    return found is not None and not any(sides.wrong(dataset, found.formats, deep=False))


def handed_off(dataset: Path) -> HandoffResult | None:
    """The hand-off that is there, where it is of the manifests as they are now."""
    try:
        found = decode(HandoffResult, (dataset / "handoff.json").read_bytes())
    except (OSError, ContractError):  # none, or of an older hsx
        return None
    return found if found.manifest_sha256 == manifest_sha256(dataset) else None


def manifest_sha256(dataset: Path) -> str:
    """SHA-256 over all manifests, in the order of the shards: it changes when any published sample does, and when
    ``verify`` finds one damaged.
    """
    digest = hashlib.sha256()
    for shard in shard_ids(dataset):
        manifest = ShardFiles(dataset, shard).manifest
        if manifest.exists():
            digest.update(f"{shard}\n".encode() + manifest.read_bytes())
        damaged = damaged_path(manifest)
        if damaged.is_file() and (found := damaged.read_bytes()):
            digest.update(f"{shard} damaged\n".encode() + found)
    return digest.hexdigest()
