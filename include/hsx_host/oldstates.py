"""Old hidden states below the configured roots: folders that look like a set, and their sizes. Deletes nothing."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path

from hsx_host.contract import OldState, RunSpec

# Files that make a folder a set of hidden states: speculators v1 and hs-safetensors, SpecForge, and single samples.
_FILES = ("data_*.pt", "hs_*.safetensors", "data_*.ckpt", "sample_*.pt", "sample_*.safetensors")
_FOLDERS = ("rows_*-*", "hidden_states")
_DATASET = ("shards", "v1", "speculators", "specforge", "modelopt")
_DEPTH = 3


def find(spec: RunSpec, current: str) -> list[OldState]:
    """Folders directly below the old-state roots that look like old sets, by path.

    :param current: the data set of this run, which is never listed; neither is what contains it, the output root or
        hsx's home. Data sets of hsx in the output root are live, whoever made them. Symbolic links are not followed,
        nor listed.
    """
    keep = [Path(os.path.realpath(p)) for p in (current, spec.host.output_root, spec.host.home) if p]
    output, found = Path(os.path.realpath(spec.host.output_root)), []
    for root in dict.fromkeys(os.path.realpath(r) for r in spec.host.old_state_roots):
        if not os.path.isdir(root):
            continue
        for entry in sorted(os.scandir(root), key=lambda e: e.name):
            if entry.is_symlink() or not entry.is_dir(follow_symlinks=False):
                continue
            path = Path(entry.path)
            if any(k == path or k.is_relative_to(path) for k in keep) or not looks_like_states(path):
                continue
            if path.parent == output and _is_dataset(path):
                continue
            found.append(measure(path))
    return found


def looks_like_states(folder: Path) -> bool:
    """Whether a folder holds hidden states of a known trainer format, or is a data set of hsx."""
    return _is_dataset(folder) or _holds_samples(folder, _DEPTH)


def measure(folder: Path) -> OldState:
    """Size on disk (allocated blocks, each file once), number of files, and the newest change in a folder."""
    top = os.lstat(folder)
    bytes_, files, newest, seen = 0, 0, top.st_mtime, set()
    for where, folders, names in os.walk(folder):
        for name in [*folders, *names]:
            info = os.lstat(os.path.join(where, name))
            newest = max(newest, info.st_mtime)
            if (info.st_dev, info.st_ino) in seen:
                continue
            seen.add((info.st_dev, info.st_ino))
            bytes_ += info.st_blocks * 512
        files += len(names)
    return OldState(str(folder), bytes_ + top.st_blocks * 512, files, top.st_dev, top.st_ino, newest)


def list_hash(states: list[OldState]) -> str:
    """16 hex digits that stand for exactly this list: what a person approves."""
    return hashlib.sha256(json.dumps([asdict(s) for s in states], sort_keys=True).encode()).hexdigest()[:16]


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
