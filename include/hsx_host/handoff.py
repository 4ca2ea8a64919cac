"""Write ``handoff.json``, the last file of a data set: what a trainer and a server need to use it rightly.

Refused where ``verify`` (without ``--deep``) is not content. Also writes the files that the format's reader
wants beside the samples.
"""

from __future__ import annotations

import hashlib
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path

from hsx_host import formats, proof, state, verify
from hsx_host.contract import HandoffResult, RunSpec
from hsx_host.errors import Refused
from hsx_host.fingerprint import DatasetSemantics, opened
from hsx_host.shards import ShardFiles, shard_ids

HELP = "write handoff.json for the trainer and for serving"


def add_arguments(parser: ArgumentParser) -> None:
    pass


def run(spec: RunSpec, args: Namespace) -> HandoffResult:
    """The hand-off of all that is published; Refused where a shard of this run is not whole."""
    dataset, meaning = opened(spec)
    report = verify.check(spec, dataset, meaning, deep=False, whole=True)
    if not report.ok:
        raise Refused(
            f"the data set is not whole ({report.missing} missing, {report.failed} failed): "
            + "; ".join(report.problems),
            field="data.name",
            value=dataset,
            fix="extract the missing samples, then verify",
        )
    lines = verify.census(spec, dataset, whole=True).published
    form = formats.direct(meaning.formats)
    folder = dataset / form.FOLDER
    form.side_files(folder, {row: line.tokens for row, line in lines.items()}, asdict(meaning))
    result = HandoffResult(
        path=str(dataset / "handoff.json"),
        dataset_id=meaning.dataset_id,
        dataset_dir=str(dataset),
        samples=report.samples,
        tokens=report.tokens,
        bytes=report.bytes,
        formats={form.NAME: str(folder)},
        layers=meaning.layers,
        final="before_norm: the residual stream behind the last block, before the final norm",
        layer_ids=layer_ids(meaning.layers),
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
        commands=commands(meaning, folder),
    )
    state.write_document(dataset / "handoff.json", result)
    return result


def layer_ids(layers: list[int]) -> dict[str, list[int]]:
    """The same auxiliary layers in each tool's numbers; the final hidden state is never among them.

    Some tools name the stream that enters block k, others the block k-1 that it comes out of. Source: the
    tools' own code, at the versions named.
    """
    entering = ("hsx", "huggingface_hidden_states", "sglang_layers_to_capture", "vllm", "speculators_target_layer_ids")
    leaving = ("sglang_llama_setter", "speculators_0.4_layer_ids", "specforge", "torchspec")
    return {name: list(layers) for name in entering} | {name: [k - 1 for k in layers] for name in leaving}


def commands(meaning: DatasetSemantics, folder: Path) -> dict[str, str]:
    """Command lines that begin training on this data set. ``--legacy-data`` is the flag for v1 files."""
    ids = " ".join(map(str, meaning.layers))
    return {
        "speculators_0.7": (
            "python scripts/train.py --speculator-type eagle3 "
            f"--verifier-name-or-path {meaning.model_path} --data-path {folder} --legacy-data --target-layer-ids {ids}"
        ),
        "convert_specforge": "python -m hsx_host convert --spec SPEC --format specforge --out DIR",
    }


def manifest_sha256(dataset: Path) -> str:
    """SHA-256 over all manifests, in the order of the shards: it changes when any published sample does."""
    digest = hashlib.sha256()
    for shard in shard_ids(dataset):
        path = ShardFiles(dataset, shard).manifest
        if path.exists():
            digest.update(f"{shard}\n".encode() + path.read_bytes())
    return digest.hexdigest()
