"""What it does
  Deletes exactly the old hidden states that `disk` has listed for this run (disk.json), after the list was approved:
  --approve takes the list's hash, or the path of a file that holds it or the approved DiskVerdict. Under policy `auto`
  the list needs no approval; under `never` the verb is refused. Where the run fits already, nothing is deleted.
  Each folder is looked at again first: another device, inode, size, number of files or time of change, or a place that
  is not directly below a root, and it stays.
Result: CleanupResult: deleted, refused with reasons, bytes freed.
Example
  python -m hsx_host cleanup --approve 5d41402abc4b2a76 --spec S
"""

from __future__ import annotations

import os
import shutil
from argparse import ArgumentParser, Namespace
from pathlib import Path

from hsx_host import disk, oldstates, state
from hsx_host.contract import CleanupResult, ContractError, DiskVerdict, OldState, RunSpec, decode
from hsx_host.errors import BadInput, Refused
from hsx_host.progress import Progress, log

HELP = "delete the old hidden states that were listed and approved"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--approve", default="", metavar="HASH|FILE", help="the approved list")


def run(spec: RunSpec, args: Namespace) -> CleanupResult:
    if spec.cleanup.policy == "never":
        raise Refused("the policy is to delete nothing", field="cleanup.policy", value="never", fix="use ask or auto")
    listed = state.read_document(DiskVerdict, state.run_dir(spec) / "disk.json")
    if listed is None:
        raise BadInput("nothing was listed for this run", field="--approve", value=args.approve, fix="run disk first")
    _check_approval(spec, listed.old_states, args.approve)
    with state.transition(spec, wait_s=600.0):
        return clean(spec, listed.old_states)


def clean(spec: RunSpec, listed: list[OldState]) -> CleanupResult:
    """Delete what was listed and is still the same. ``freed_bytes`` is what the file system counts, not the list."""
    now = disk.verdict(spec)
    if now.verdict == "fits":
        log(f"nothing is deleted: {now.text}")
        return CleanupResult(deleted=[], refused={}, freed_bytes=0)
    where = disk.existing(spec.host.output_root)
    before = disk.free_bytes(where)
    allowed = {s.path: s for s in oldstates.find(spec, disk.read_plan(spec).dataset_dir)}
    deleted, refused = [], {}
    progress = Progress("cleanup", len(listed))
    for done, old in enumerate(listed, start=1):
        why = _why_not(old, allowed.get(old.path))
        if not why:
            why = _delete(old)
        if why:
            refused[old.path] = why
            log(f"stays: {old.path}: {why}")
        else:
            deleted.append(old.path)
            state.journal(spec, "old states deleted", path=old.path, bytes=old.bytes)
        progress.update(done, bytes=sum(s.bytes for s in listed[:done] if s.path in deleted))
    return CleanupResult(deleted=deleted, refused=refused, freed_bytes=max(0, disk.free_bytes(where) - before))


def _check_approval(spec: RunSpec, listed: list[OldState], approve: str) -> None:
    wanted = oldstates.list_hash(listed)
    if not approve:
        if spec.cleanup.policy == "auto":
            return
        raise Refused("the list was not approved", field="--approve", value="", fix=f"approve list {wanted}")
    given = approve
    if os.path.isfile(approve):
        text = Path(approve).read_text()
        try:
            given = oldstates.list_hash(decode(DiskVerdict, text).old_states)
        except ContractError:
            given = text.strip()
    if given != wanted:
        raise Refused(
            f"another list was approved: the list of this run is {wanted}",
            field="--approve",
            value=approve,
            fix="run disk again and approve what it lists now",
        )


def _why_not(old: OldState, now: OldState | None) -> str:
    """Why a listed folder may not be deleted (any more); empty where it may."""
    if not os.path.lexists(old.path):
        return "it is gone"
    if now is None:
        return "it is not an old set directly below a configured root (any more), or it belongs to the current data set"
    for what in ("device", "inode", "bytes", "files", "newest"):
        if getattr(now, what) != getattr(old, what):
            return f"it changed since it was listed: {what} was {getattr(old, what)}, is {getattr(now, what)}"
    return ""


def _delete(old: OldState) -> str:
    """Delete one folder; why it did not go, or empty. Renamed first, so that a half-deleted set keeps no set's name."""
    path = Path(old.path)
    doomed = path.with_name(f".hsx-deleting-{path.name}-{old.inode}")
    try:
        os.rename(path, doomed)
        info = os.lstat(doomed)
        if (info.st_dev, info.st_ino) != (old.device, old.inode):
            os.rename(doomed, path)
            return "another folder took its place"
        shutil.rmtree(doomed)  # by directory descriptors: symbolic links are removed, not followed
    except OSError as e:
        return f"it can't be deleted: {e.strerror} ({e.filename})"
    return ""
