"""Look at a hand-off where it shall be trained on: the same data set, whole, in the format that the trainer reads.

Without ``--handoff`` it is the hand-off of the spec's own data set. ``--manifest`` is the hash that the one who sent us
here knows: another one means that the data changed since.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from hsx_host import sides, trainers
from hsx_host.contract import ContractError, HandoffCheck, HandoffResult, RunSpec, TrainingSettings, decode
from hsx_host.errors import BadInput, Refused
from hsx_host.fingerprint import dataset_dir, semantics
from hsx_host.handoff import manifest_sha256

HELP = "check a hand-off on the training host"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--handoff", default="", metavar="PATH", help="handoff.json; default: of the spec's data set")
    parser.add_argument("--manifest", default="", metavar="SHA256", help="the manifests' hash that is expected")


def run(spec: RunSpec, args: Namespace) -> HandoffCheck:
    """What the training will read, and its command. Refused where the hand-off is not (or no longer) true."""
    settings, handoff = settings_of(spec), read(spec, args.handoff)
    dataset = Path(handoff.path).parent
    if args.manifest and args.manifest != handoff.manifest_sha256:
        _stale(handoff, f"the hand-off's manifests have the hash {handoff.manifest_sha256}, expected {args.manifest}")
    found = manifest_sha256(dataset)
    if found != handoff.manifest_sha256:
        _stale(handoff, f"the manifests, with what verify found damaged, have the hash {found} now")
    data = handoff.formats.get(settings.format, "")
    if not data or not Path(data).is_dir():
        raise Refused(
            f"{settings.name} reads {settings.format}; the data set holds {', '.join(handoff.formats) or 'nothing'}",
            field="training.trainer",
            value=settings.name,
            fix=f"add {settings.format} to capture.formats, or convert the data set",
        )
    for why in sides.wrong(dataset, [settings.format], deep=False):
        _stale(handoff, why)
    if len(handoff.layers) != 3:
        raise Refused(
            f"the data set has {len(handoff.layers)} auxiliary layers, EAGLE-3 drafters are trained on three",
            field="capture.layers",
            value=handoff.layers,
        )
    for name, path in (("model", handoff.model["path"]), ("norm", handoff.norm["file"])):
        if not Path(path).exists():
            raise Refused(
                f"the {name} is not on this host", field="training.host", value=path, fix="mount it under the same path"
            )
    work = trainers.work_of(settings, handoff)
    return HandoffCheck(
        handoff=handoff.path,
        dataset_id=handoff.dataset_id,
        data=data,
        samples=handoff.samples,
        tokens=handoff.tokens,
        manifest_sha256=found,
        work=str(work.folder),
        command=trainers.fill(settings.command, trainers.places(settings, handoff, data), "training.command"),
    )


def settings_of(spec: RunSpec) -> TrainingSettings:
    """The spec's training; BadInput where the profile has none."""
    if spec.training is None:
        raise BadInput("the profile has no training", field="training", value=spec.profile, fix="add training")
    return spec.training


def read(spec: RunSpec, path: str) -> HandoffResult:
    """A hand-off from its file; BadInput where there is none."""
    file = Path(path) if path else dataset_dir(spec, semantics(spec)) / "handoff.json"
    try:
        return decode(HandoffResult, file.read_bytes())
    except OSError as e:
        raise BadInput(
            f"the hand-off can't be read: {e.strerror}",
            field="handoff",
            value=file,
            fix="run the extraction to its end; where the training host is another, mount the data under the same path",
        ) from None
    except (ContractError, json.JSONDecodeError) as e:
        raise BadInput(
            f"is no hand-off of this version: {e}", field="handoff", value=file, fix="hand off again"
        ) from None


def _stale(handoff: HandoffResult, what: str) -> None:
    raise Refused(
        f"{what}: the data set is not the one that was handed off",
        field="handoff",
        value=handoff.path,
        fix="wait for the extraction that changes it; its hand-off starts the next training",
    )
