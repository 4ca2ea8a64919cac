"""What it does
  Deletes exactly the old hidden states that `disk` has listed for this run (disk.json), after the list was approved:
  --approve takes the list's hash, or the path of a file that holds it or the approved DiskVerdict. Under policy `auto`
  the list needs no approval; under `never` the verb is refused. Where the run fits already, nothing is deleted.
  Each folder is looked at again right before it goes: with another device, inode, size, number of files or time of
  change, in a place that is not directly below a root, held open by a process, or a live data set, it stays. A
  deletion that was cut off goes on where it stopped.
Result: CleanupResult: deleted, refused with reasons, bytes freed.
Example
  python -m hsx_host cleanup --approve 5d41402abc4b2a76 --spec S
"""

from __future__ import annotations

import os
import shutil
from argparse import ArgumentParser, Namespace
from pathlib import Path

from hsx_host import disk, oldstates, openfiles, processes, state
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
    lock = state.folder(spec, "state") / "cleanup.lock"  # not the transitions': nobody waits for terabytes to go
    with state.locked(lock, wait_s=600.0, what="the cleanup"):
        return clean(spec, listed.old_states)


def clean(spec: RunSpec, listed: list[OldState]) -> CleanupResult:
    """Delete what was listed and is still the same. ``freed_bytes`` is what the file system counts, not the list."""
    where = disk.existing(spec.host.output_root)
    before = disk.free_bytes(where)
    begun = [old for old in listed if _begun(old)]
    now = disk.verdict(spec)
    if now.verdict == "fits" and not begun:
        log(f"nothing is deleted: {now.text}")
        return CleanupResult(deleted=[], refused={}, freed_bytes=0)
    if now.verdict == "fits":
        listed = begun
    current = disk.read_plan(spec).dataset_dir
    deleted, refused = [], {}
    progress = Progress("cleanup", len(listed))
    for done, old in enumerate(listed, start=1):
        why = _delete(old) if _begun(old) else _why_not(old, oldstates.look(spec, current, old.path)) or _delete(old)
        if why:
            refused[old.path] = why
            log(f"stays: {old.path}: {why}")
            state.journal(spec, "old states stay", path=old.path, why=why)
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
        text = Path(approve).read_bytes().decode(errors="replace")
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


def _why_not(old: OldState, now: OldState | str) -> str:
    """Why a listed folder may not be deleted (any more); empty where it may."""
    if isinstance(now, str):
        return now
    for what in ("device", "inode", "bytes", "files", "newest"):
        if getattr(now, what) != getattr(old, what):
            return f"it changed since it was listed: {what} was {getattr(old, what)}, is {getattr(now, what)}"
    return ""


def _begun(old: OldState) -> bool:
    """Whether an earlier call has begun to delete the folder: it has its name of deletion, and is the same folder."""
    try:
        info = os.lstat(Path(old.path).with_name(oldstates.doomed(old)))
    except OSError:
        return False
    return (info.st_dev, info.st_ino) == (old.device, old.inode) and Path(old.path).name != oldstates.doomed(old)


def _delete(old: OldState) -> str:
    """Delete one folder; why it did not go, or empty.

    By the descriptor of its root, so that no link takes the root's place meanwhile. It gets another name first: from
    then on nobody opens it by its own, and who has it open already is seen.
    """
    path, name = Path(old.path), oldstates.doomed(old)
    try:
        root = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as e:
        return f"its root can't be opened: {e.strerror}"
    try:
        here = path.name if not _begun(old) else name
        if here != name:
            os.rename(path.name, name, src_dir_fd=root, dst_dir_fd=root)
        info = os.stat(name, dir_fd=root, follow_symlinks=False)
        why = "" if (info.st_dev, info.st_ino) == (old.device, old.inode) else "another folder took its place"
        moved = path.with_name(name)
        if not why and (pids := openfiles.holders(moved)):
            why = "it is held open by " + "; ".join(processes.describe(pid) for pid in pids[:5])
        if not why and (mounted := openfiles.mounted_below(moved)):
            why = f"something is mounted in it: {', '.join(mounted[:3])}"
        if why:
            if here != name:
                os.rename(name, path.name, src_dir_fd=root, dst_dir_fd=root)
            return why
        shutil.rmtree(name, dir_fd=root)  # by directory descriptors: symbolic links are removed, not followed
    except OSError as e:
        return f"it can't be deleted: {e.strerror} ({e.filename})"
    finally:
        os.close(root)
    return ""
