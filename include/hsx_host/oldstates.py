"""Old hidden states below the configured roots: folders that look like a set, and their sizes. Deletes nothing."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import os
import stat
from dataclasses import asdict
from pathlib import Path

from hsx_host import openfiles, state
from hsx_host.contract import OldState, RunSpec
from hsx_host.progress import log

# Files that make a folder a set of hidden states: speculators v1 and hs-safetensors, SpecForge, and single samples.
_FILES = ("data_*.pt", "hs_*.safetensors", "data_*.ckpt", "sample_*.pt", "sample_*.safetensors")
_FOLDERS = ("rows_*-*", "hidden_states")
_DATASET = ("shards", "v1", "speculators", "specforge", "modelopt")
_DEPTH = 3
DOOMED = ".hsx-deleting-"
_UNREADABLE = "it can't be read"


def find(spec: RunSpec, current: str) -> list[OldState]:
    """Folders directly below the old-state roots that look like old sets, by path; see ``look`` for what is left out.

    :param current: the data set of this run.
    """
    found = []
    for root in dict.fromkeys(os.path.realpath(r) for r in spec.host.old_state_roots):
        if os.path.isdir(root):
            for entry in sorted(os.scandir(root), key=lambda e: e.name):
                seen = look(spec, current, entry.path)
                if not isinstance(seen, str):
                    found.append(seen)
                elif seen.startswith(_UNREADABLE):
                    log(f"not listed: {entry.path}: {seen}")
    return found


def look(spec: RunSpec, current: str, place: str) -> OldState | str:
    """One folder as it stands now, or why it is no old set that may be deleted.

    Never the current data set, what contains it, the output root or hsx's home; nor a data set of hsx where it was
    made: in the output root, or where a run of this host has planned it. Symbolic links are not followed, and a folder
    with something mounted in it is nobody's to delete; nor is one that this login can't read, in whole.
    """
    try:
        return _look(spec, current, Path(place))
    except FileNotFoundError:
        return "it is gone"
    except OSError as e:
        return f"{_UNREADABLE}: {e.strerror} ({e.filename})"


def _look(spec: RunSpec, current: str, path: Path) -> OldState | str:
    roots = {os.path.realpath(r) for r in spec.host.old_state_roots}
    if os.path.realpath(path.parent) not in roots or path.name in ("", ".", ".."):
        return "it is not directly below a configured root (any more)"
    if not os.path.lexists(path):
        return "it is gone"
    if path.is_symlink() or not path.is_dir():
        return "it is no folder, or a link"
    path = Path(os.path.realpath(path.parent), path.name)
    keep = [Path(os.path.realpath(p)) for p in (current, spec.host.output_root, spec.host.home) if p]
    if any(k == path or k.is_relative_to(path) for k in keep):
        return "it is, or holds, the current data set, the output root or hsx's home"
    if _is_dataset(path) and (path.parent == Path(os.path.realpath(spec.host.output_root)) or path in _planned(spec)):
        return "it is a live data set of hsx"
    if not looks_like_states(path) and not path.name.startswith(DOOMED):
        return "it does not look like an old set of hidden states"
    if mounted := openfiles.mounted_below(path):
        return f"something is mounted in it: {', '.join(mounted[:3])}"
    return measure(path)


def doomed(old: OldState) -> str:
    """The name that a folder has while it is deleted: a half-deleted set keeps no set's name, and is found again."""
    name = Path(old.path).name
    return name if name.startswith(DOOMED) else f"{DOOMED}{name}-{old.inode}"


def looks_like_states(folder: Path) -> bool:
    """Whether a folder holds hidden states of a known trainer format, or is a data set of hsx."""
    return _is_dataset(folder) or _holds_samples(folder, _DEPTH)


def measure(folder: Path) -> OldState:
    """Size on disk (allocated blocks, each file once), number of files, the newest change, and when a file was read
    last, as far as the file system notes that."""
    top = os.lstat(folder)
    bytes_, files, newest, read, seen = 0, 0, top.st_mtime, 0.0, set()  # a new name of the set is no change
    for where, folders, names in os.walk(folder, onerror=_unless_gone):
        for name in [*folders, *names]:
            try:
                info = os.lstat(os.path.join(where, name))
            except FileNotFoundError:  # it goes while the set is looked at
                continue
            read = read if stat.S_ISDIR(info.st_mode) else max(read, info.st_atime)
            newest = max(newest, _changed(info))
            if (info.st_dev, info.st_ino) in seen:
                continue
            seen.add((info.st_dev, info.st_ino))
            bytes_ += info.st_blocks * 512
        files += len(names)
    return OldState(str(folder), bytes_ + top.st_blocks * 512, files, top.st_dev, top.st_ino, newest, read)


def _changed(info: os.stat_result) -> float:
    """When an entry was changed last. A copy may set its contents' time back (rsync -t), never its inode's."""
    return max(info.st_mtime, info.st_ctime)


def _unless_gone(e: OSError) -> None:
    if not isinstance(e, FileNotFoundError):
        raise e


def list_hash(states: list[OldState]) -> str:
    """16 hex digits that stand for exactly this list: what a person approves."""
    same = [{k: v for k, v in asdict(s).items() if k != "accessed"} for s in states]
    return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:16]


def _planned(spec: RunSpec) -> set[Path]:
    """The data sets that runs of this host have planned, where they have planned them."""
    found = set()
    for file in (state.home(spec) / "runs").glob("*/plan.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            found.add(Path(os.path.realpath(json.loads(file.read_bytes())["dataset_dir"])))
    return found


def _is_dataset(folder: Path) -> bool:
    """A data set of hsx: its ``dataset.json`` beside folders of a known format (other tools use that name too)."""
    return (folder / "dataset.json").is_file() and any((folder / name).is_dir() for name in _DATASET)


def _holds_samples(folder: Path, depth: int) -> bool:
    inner = []
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            inner.append(entry)
        elif entry.is_file(follow_symlinks=False) and any(fnmatch.fnmatch(entry.name, p) for p in _FILES):
            return True
    if depth <= 0:
        return False
    known = [e for e in inner if any(fnmatch.fnmatch(e.name, p) for p in (*_FOLDERS, *_DATASET))]
    return any(_holds_samples(Path(e.path), depth - 1) for e in known)
